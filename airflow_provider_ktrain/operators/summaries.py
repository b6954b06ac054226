"""Writes the XCom `ktrain_summary` of a task, and the cause of a try that ends without an outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM, VERSION, mapping
from airflow_provider_ktrain.core.identity.names import delete_command
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.reporting import asset_events
from airflow_provider_ktrain.core.reporting.summary import CLUSTER, CONFIGURATION, metrics_of, parameters_of, summary
from airflow_provider_ktrain.core.state.pods.usage import NO_USAGE
from airflow_provider_ktrain.core.text.output import first_line, masked
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.exceptions import (
    BY_CATEGORY,
    TrainingClusterError,
    TrainingConfigurationError,
    TrainingJobError,
    TrainingSupersededError,
    airflow_error,
)
from airflow_provider_ktrain.operators import task_store

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.follow.outcome import Outcome
    from airflow_provider_ktrain.operators.job_parameters import JobParameters


def push_begun(operator: JobParameters, context: Context, job: Mapping[str, str], checkpoint: str) -> None:
    """Push the summary of a training that is about to be submitted.

    :param job: `kind`, `namespace`, `name` and `cluster`.
    :param checkpoint: its checkpoint directory; empty if it has none.
    """
    words = [*_words(operator.command), *_words(operator.args)]
    _push(
        context,
        {},
        try_number=context["ti"].try_number,
        state="running",
        job=dict(job),
        started=round(timing.epoch(), 1),
        usage=task_store.read_total_usage(context, None),
        parameters=parameters_of(words, mapping(operator.env), operator.function_arguments(), compat.hides),
        checkpoint=checkpoint,
    )


def push_found(operator: JobParameters, context: Context) -> None:
    """Push the summary of a try that submits nothing, because an earlier one succeeded, with what is stored of it."""
    ref, checkpoint = task_store.read_job(context), task_store.read_job_description(context).get("checkpoint_dir")
    job = ref and {"kind": ref.kind, "namespace": ref.namespace, "name": ref.name, "cluster": ref.cluster}
    push_begun(operator, context, job or {}, checkpoint or "")


def _words(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else []


def push_ended(context: Context, outcome: Outcome, usage: Mapping[str, Any]) -> None:
    """Push the summary of a training that has ended.

    :param usage: of all tries: see `core.formats.total_usage`.
    """
    before = mapping(compat.own_xcom(context["ti"], SUMMARY_XCOM))
    cause = mapping(outcome.cause) or mapping(outcome.status.get("cause"))
    model = ""
    with contextlib.suppress(ValueError):
        model = asset_events.model_uri(outcome.result)
    _push(
        context,
        before,
        try_number=context["ti"].try_number,
        state="succeeded" if outcome.succeeded and not outcome.unmet else "failed",
        cause=first_line(str(cause.get("summary") or "")),
        category=str(cause.get("category") or ""),
        ended=round(timing.epoch(), 1),
        usage=dict(usage),
        metrics=metrics_of(outcome.training_metrics),
        code=str(mapping(compat.own_xcom(context["ti"], "job")).get("code") or ""),
        model_uri=model,
    )


def _push(context: Context, before: Mapping[str, Any], **changes: Any) -> None:
    compat.push(context, SUMMARY_XCOM, summary(before, **changes))


@contextlib.contextmanager
def explained(
    context: Context, log: Any, job_end: Callable[[], tuple[bool, bool]] = lambda: (False, False)
) -> Iterator[None]:
    """Store the error of the body as the cause of the try, unless an outcome has stored one.

    It must not delay or hide how the try ends: what can't be stored is logged, and a SIGTERM whose release has not been
    decided stores nothing. An error of this project also says which job may be left, as the training page does.

    :param job_end: returns whether a job of this try, if it has submitted one, may still hold accelerators, and whether
        it was deleted. Default: there is none.
    """
    try:
        yield
    except (TrainingSupersededError, AirflowSkipException):
        raise
    except (Exception, AirflowTaskTimeout) as e:
        try:
            left = _explain(context, e, *job_end())
            if left and isinstance(e, KtrainError):
                e.args = (f"{e}\n{left}",)
        except Exception as failure:
            log.warning("The cause could not be stored in Airflow.\n%s: %s", type(failure).__name__, failure)
        raise


def _explain(context: Context, raised: BaseException, is_left: bool, is_deleted: bool) -> str:
    """Store the cause. Returns the line that names the job that may be left; empty if none is, or the error has it."""
    ti = context["ti"]
    status, before = (mapping(compat.own_xcom(ti, key)) for key in (STATUS_XCOM, SUMMARY_XCOM))
    numbers = {one.get("try_number", ti.try_number) for one in (status, before)}
    if status.get("cause") or numbers != {ti.try_number}:  # after a kill, the next try may have begun
        return ""
    error = airflow_error(raised) if isinstance(raised, KtrainError) else raised
    text = masked(str(error) if isinstance(error, TrainingJobError) else f"{type(error).__name__}: {error}")
    if isinstance(error, AirflowTaskTimeout):
        text = "The task did not finish within its execution_timeout."
    now = round(timing.epoch(), 1)
    head, _, detail = text.partition("\n")
    cause = {"category": _category(error), "summary": head[:500], "detail": detail[:1500]}
    job = mapping(compat.own_xcom(ti, "job")) or mapping(before.get("job"))
    has_submitted = bool(before or job)  # either one may be missing: Airflow rejected it
    known = {} if has_submitted else {"usage": NO_USAGE.as_dict()}
    if not has_submitted:
        left = None if is_deleted else task_store.read_left_job(context)  # by an earlier try
        job, is_left = left.described() if left else {}, bool(left)
    of_job = {name: str(value) for name, value in job.items() if name != "cluster"}
    first = {"version": VERSION, "try_number": ti.try_number, "host": "worker", **known}
    shown = {**first, **({"job": of_job} if job and (is_left or is_deleted) else {}), **status}
    ended = bool(status.get("ended")) or not is_left
    last = {"written_at": now, "ended": ended, "job_deleted": is_deleted, "cause": cause}
    compat.push(context, STATUS_XCOM, {**shown, **last})
    task_store.write_try(context, cause=head[:500], **known)
    changes: dict[str, Any] = {"state": "failed", "cause": head, "category": cause["category"], "ended": now}
    if known:
        changes["usage"] = task_store.read_total_usage(context, known["usage"])
    elif before.get("state") == "running":
        changes["usage"] = {**mapping(before.get("usage")), "at_least": True}
    _push(context, before, try_number=ti.try_number, **changes)
    if ended or not job:
        return ""
    command = delete_command(kind_of(job["kind"]), job["namespace"], job["name"])
    if command in text:
        return ""
    return f"{job['kind']} {job['namespace']}/{job['name']} may still hold accelerators. To delete it, run: {command}"


def _category(error: BaseException) -> str:
    if isinstance(error, TrainingConfigurationError):
        return CONFIGURATION
    if isinstance(error, TrainingClusterError):
        return CLUSTER
    if isinstance(error, AirflowTaskTimeout):
        return Category.TIMEOUT.value
    return next((c.value for c, of in BY_CATEGORY.items() if isinstance(error, of)), Category.UNKNOWN.value)
