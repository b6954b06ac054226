"""What a task keeps in Airflow's task store for later tries and resumes: see docs/reference/formats.md.

The place and number of the submission are stored by `submission.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.formats import (
    DEFERRAL_STATE,
    FAILED_NODES_STATE,
    JOB_STATE,
    OUTCOME_STATE,
    SUBMISSION_STATE,
    TRIES_STATE,
    VERSION,
    earlier_success,
    failed_nodes,
    mapping,
    step_of_tries,
    stored_outcome,
    total_usage,
    usage_of_other_tries,
    usage_of_try,
    with_failed_nodes,
    with_try,
)
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.reporting.earlier_curves import with_bounded_curves
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.deferral import Deferral
from airflow_provider_ktrain.engine.follow.outcome import Outcome

if TYPE_CHECKING:
    from airflow.sdk import Context


def write_job(context: Context, job: JobRef, *, code: str = "", checkpoint_dir: str = "") -> None:
    """Store the job that this try has submitted or adopted.

    :param code: hash of its code. Default: empty, it has none.
    :param checkpoint_dir: its checkpoint directory. Default: empty, it has none.
    """
    described = {"job": job.to_dict(), "code": code, "checkpoint_dir": checkpoint_dir}
    compat.remember(context, JOB_STATE, {"version": VERSION, **described})


def read_job(context: Context) -> JobRef | None:
    """The job that this task submitted or adopted last; None if none is stored."""
    with contextlib.suppress(ValueError):
        return JobRef.from_dict(mapping(mapping(compat.recall(context, JOB_STATE)).get("job")))
    return None


def read_left_job(context: Context) -> JobRef | None:
    """The job that a try since the last clear has submitted, if it is known that none has stored its end; else None."""
    ti, job = context["ti"], read_job(context)
    submission, end = (mapping(compat.recall(context, key)) for key in (SUBMISSION_STATE, OUTCOME_STATE))
    if job is None or submission.get("max_tries") != ti.max_tries:
        return None
    of_end = mapping(mapping(mapping(end.get("outcome")).get("status")).get("job")).get("uid")
    return None if end and of_end in (None, job.uid) else job


def read_job_description(context: Context) -> dict[str, Any]:
    """`job` and `checkpoint_dir` of the last job, as other tasks see them; empty if none is stored."""
    stored = mapping(compat.recall(context, JOB_STATE))
    with contextlib.suppress(ValueError):
        job = JobRef.from_dict(mapping(stored.get("job"))).described(str(stored.get("code") or ""))
        return {"job": job, "checkpoint_dir": stored.get("checkpoint_dir")}
    return {}


def write_deferral(context: Context, deferral: Deferral) -> None:
    """Store the arguments of the trigger, and the time."""
    compat.remember(context, DEFERRAL_STATE, {**deferral.to_dict(), "deferred_at": _now()})


def read_deferral(context: Context) -> tuple[Deferral, str] | None:
    """The arguments of this try's last trigger, and when it was deferred; None if this try has stored none."""
    stored = mapping(compat.recall(context, DEFERRAL_STATE))
    with contextlib.suppress(ValueError):
        deferral = Deferral.from_dict(stored)
        if deferral.job.owner == str(context["ti"].id):
            return deferral, str(stored.get("deferred_at") or "the deferral")
    return None


def write_outcome(context: Context, outcome: Outcome) -> bool:
    """Store how this try ended, for later tries; False if the task has no state store (Airflow below 3.3)."""
    ti = context["ti"]
    stored = stored_outcome(outcome.to_dict(), ti.try_number, ti.max_tries)
    if not compat.remember(context, OUTCOME_STATE, stored):
        return False
    cause = str(outcome.cause["summary"]) if outcome.cause else outcome.unmet
    series = outcome.status.get("series") or {}
    write_try(context, cause=cause, usage=outcome.usage, step=outcome.step, series=series)
    return True


def write_try(context: Context, **fields: Any) -> None:
    """Store how this try ended, for the training page: see `with_try`. Fields that aren't given stay as they are."""
    ti = context["ti"]
    started = getattr(ti, "start_date", None)
    times = {"started_at": started.isoformat(timespec="seconds") if started else "", "ended_at": _now()}
    entry = {"try_number": ti.try_number, "max_tries": ti.max_tries, **times, **fields}
    document = with_try(compat.recall(context, TRIES_STATE), entry)
    compat.remember(context, TRIES_STATE, {**document, "tries": with_bounded_curves(document["tries"])})


def read_total_usage(context: Context, usage: Mapping[str, Any] | None) -> dict[str, Any]:
    """What all tries used, also before a clear; of those whose usage is stored: none below Airflow 3.3.

    :param usage: of this try. None: it has none, as before its job is submitted.
    """
    others = usage_of_other_tries(compat.recall(context, TRIES_STATE), context["ti"].try_number)
    return total_usage([*others, *([] if usage is None else [usage_of_try(usage)])])


def read_earlier_step(context: Context, first_try: int) -> float | None:
    """The highest step that an earlier try reached, of those with the same checkpoint directory; None if unknown."""
    return step_of_tries(compat.recall(context, TRIES_STATE), first_try, context["ti"].try_number)


def read_failed_nodes(context: Context) -> dict[str, str]:
    """The nodes on which earlier tries failed since the last clear, each with the reason."""
    return failed_nodes(compat.recall(context, FAILED_NODES_STATE), context["ti"].max_tries)


def add_failed_nodes(context: Context, nodes: Mapping[str, str]) -> bool:
    """Store nodes on which this try failed, for later tries; False without a state store (Airflow below 3.3)."""
    stored = compat.recall(context, FAILED_NODES_STATE)
    return compat.remember(context, FAILED_NODES_STATE, with_failed_nodes(stored, context["ti"].max_tries, nodes))


def read_earlier_success(context: Context) -> Outcome | None:
    """The outcome of an earlier try, since the last clear, that succeeded; None if there is none."""
    ti = context["ti"]
    stored = earlier_success(compat.recall(context, OUTCOME_STATE), ti.try_number, ti.max_tries)
    return None if stored is None else Outcome.from_dict(stored)


def _now() -> str:
    return timing.utc_now().isoformat(timespec="seconds")
