"""The formats that processes and releases exchange: a reader ignores unknown fields and has defaults for missing ones.

docs/reference/formats.md describes each format. Fields may be added, but never renamed or used with another meaning.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

VERSION = 1  #: Version of all formats of this release. It is written, and a reader accepts any.

# keys of the task store: Airflow's `task_state_store`, which keeps values for later tries of a task
SUBMISSION_STATE = "ktrain_submission"  #: Where this life of the task submits jobs, and the number of submissions.
JOB_STATE = "ktrain_job"  #: The job, as `core.identity.names.JobRef`.
DEFERRAL_STATE = "ktrain_deferral"  #: Arguments of the last trigger, as `engine.follow.deferral.Deferral`.
OUTCOME_STATE = "ktrain_outcome"  #: The outcome of the last try that followed its job to the end.
FAILED_NODES_STATE = "ktrain_failed_nodes"  #: Nodes that later tries avoid (`avoid_failed_nodes`).
TRIES_STATE = "ktrain_tries"  #: A summary of each of the last tries.

NEXT_DUE = "next_due"  #: Field of the status: when the next one is due, in epoch seconds.
STATUS_XCOM = "ktrain_status"  #: Key of the XCom that the training page shows: see `core.reporting.status_document`.
SUMMARY_XCOM = "ktrain_summary"  #: Key of the XCom that lists of trainings show: see `core.reporting.summary`.
ALL_TRIES = "all_tries"  #: Field of the XCom `usage`: the usage of all tries together.

MAX_OUTCOME_BYTES = 60 * 1024  #: Size of the stored outcome's JSON.
MAX_TRIES = 10  #: Tries that are summarized.
MAX_FAILED_NODES = 8  #: Nodes that are avoided: the latest.
MAX_STEP = 2**53  #: Steps are below it: a double has each integer up to it, and differences can't overflow.

#: What replaces fields of an outcome that is too large, one after another.
_REPLACEMENTS: Sequence[Mapping[str, Any]] = (
    {"status": {}, "released": "", "training_metrics": {}, "metrics": {}, "usage": {}},
    {"cause": None},
    {
        "result": None,
        "result_error": "Its result is left out: it is too large to be stored for a later try "
        f"({MAX_OUTCOME_BYTES:,} bytes)",
    },
)


def known_fields(cls: type, data: Any) -> dict[str, Any]:
    """The fields of `data` that the dataclass `cls` has. Missing fields get the defaults of `cls`.

    :param data: a mapping; anything else counts as an empty one.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in mapping(data).items() if name in names}


def mapping(data: Any) -> Mapping[str, Any]:
    """`data` if it is a mapping, else an empty one."""
    return data if isinstance(data, Mapping) else {}


def stored_outcome(outcome: Mapping[str, Any], try_number: int, max_tries: int) -> dict[str, Any]:
    """An outcome as it is stored for later tries, in at most MAX_OUTCOME_BYTES.

    :param outcome: `engine.follow.outcome.Outcome` as a dict.
    :param max_tries: of its task instance. Only a clear changes it, so it identifies the life of the task.
    """
    kept = dict(outcome)
    for fields in _REPLACEMENTS:
        if json_size(kept) > MAX_OUTCOME_BYTES:
            kept |= fields
    return {"version": VERSION, "try_number": try_number, "max_tries": max_tries, "outcome": kept}


def earlier_success(stored: Any, try_number: int, max_tries: int) -> Mapping[str, Any] | None:
    """The outcome of an earlier try of the same life of the task, if that try's training succeeded.

    The outcome of a failed training is not used again: a retry submits a new job.

    :param stored: the return value of `stored_outcome`, or None.
    """
    read = mapping(stored)
    outcome = mapping(read.get("outcome"))
    number = read.get("try_number")
    same_life = read.get("max_tries") == max_tries and isinstance(number, int) and number <= try_number
    return outcome if same_life and outcome.get("succeeded") is True and not outcome.get("superseded") else None


def with_try(stored: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The summaries of the last tries with one more. Fields of an earlier summary of the same try are replaced.

    :param stored: the previous return value, or None.
    :param entry: `try_number`, and of `max_tries`, `cause`, `started_at`, `ended_at`, `usage`, `step`, `series` some.
    """
    own = [one for one in _tries(stored) if one.get("try_number") == entry["try_number"]]
    others = [one for one in _tries(stored) if one.get("try_number") != entry["try_number"]]
    tries = [*others, {**(own[-1] if own else {}), **entry}]
    document = {"version": VERSION, "tries": tries[-MAX_TRIES:]}
    older = [*(usage_of_try(one.get("usage")) for one in tries[:-MAX_TRIES]), *_older(stored)]
    return {**document, "older": total_usage(older)} if older else document


def usage_of_other_tries(stored: Any, try_number: int) -> list[Mapping[str, Any]]:
    """What other tries of the task used, also before a clear: for `total_usage`.

    :param stored: the return value of `with_try`, or None.
    """
    others = [one for one in _tries(stored) if one.get("try_number") != try_number]
    return [*(usage_of_try(one.get("usage")) for one in others), *_older(stored)]


def total_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accelerator-seconds of several tries together: `held` and `wasted`; and `tries`, of how many all is known.

    `at_least` if only a part is known of one.

    :param usages: each has `tries`, too, if it isn't about one try.
    """
    amounts = {name: round(sum(_seconds(one.get(name)) for one in usages), 1) for name in ("held", "wasted")}
    bound = {"at_least": True} if any(one.get("at_least") for one in usages) else {}
    return {"tries": sum(int(_seconds(one.get("tries", 1))) for one in usages), **amounts, **bound}


def larger_usage(stored: Any, read: Any) -> Mapping[str, Any]:
    """Of two usages of one try the larger one: what was read last lacks pods that were gone by then.

    :return: has `at_least` if it is the stored one, because the try has used more since.
    """
    before, now = mapping(stored), mapping(read)
    return {**before, "at_least": True} if _seconds(before.get("held")) > _seconds(now.get("held")) else now


def usage_of_try(usage: Any) -> Mapping[str, Any]:
    """The usage of one try for `total_usage`; `tries` is 1 only if all that it has used is known.

    :param usage: None or empty if nobody has stored it.
    """
    known = mapping(usage)
    return {**known, "tries": int(bool(known) and not known.get("at_least"))}


def _older(stored: Any) -> list[Mapping[str, Any]]:
    return [older] if (older := mapping(mapping(stored).get("older"))) else []


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def step_of_tries(stored: Any, first_try: int, try_number: int) -> float | None:
    """The highest step that earlier tries of this life of the task reached; None if none of them reported a step.

    :param stored: the return value of `with_try`, or None.
    """
    numbers = range(first_try, try_number)
    steps = [one.get("step") for one in _tries(stored) if one.get("try_number") in numbers]
    return max((step for step in steps if is_step(step)), default=None)


def is_step(value: Any) -> TypeGuard[float | int]:
    """Whether the value can be a training step: a finite number below MAX_STEP in absolute value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and abs(value) < MAX_STEP if isinstance(value, float) else abs(value) < MAX_STEP


def _tries(stored: Any) -> list[Mapping[str, Any]]:
    listed = mapping(stored).get("tries")
    return [mapping(one) for one in listed] if isinstance(listed, list) else []


def failed_nodes(stored: Any, max_tries: int) -> dict[str, str]:
    """The nodes on which earlier tries of this life of the task failed, the latest last, each with the reason.

    :param stored: the return value of `with_failed_nodes`, or None.
    :param max_tries: of the task instance. A clear changes it, and the nodes stored before don't count any more.
    """
    read = mapping(stored)
    nodes = mapping(read.get("nodes")) if read.get("max_tries") == max_tries else {}
    return {name: str(reason) for name, reason in nodes.items() if name}


def with_failed_nodes(stored: Any, max_tries: int, more: Mapping[str, str]) -> dict[str, Any]:
    """The stored nodes with those of one more try, at most MAX_FAILED_NODES.

    :param stored: the previous return value, or None.
    :param more: names of nodes, each with the reason.
    """
    before = {name: why for name, why in failed_nodes(stored, max_tries).items() if name not in more}
    latest = list({**before, **more}.items())[-MAX_FAILED_NODES:]
    return {"version": VERSION, "max_tries": max_tries, "nodes": dict(latest)}


def json_size(data: Any) -> int:
    """Bytes of its JSON. Airflow stores and counts it with other characters than ASCII escaped."""
    return len(json.dumps(data))
