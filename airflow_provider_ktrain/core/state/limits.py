"""The time limits of a job: how long it may be queued, scheduled, start, run and write no log.

A clock starts at a timestamp of the cluster, so it is the same for every process that follows the job.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass

from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.state.pods.partial_start import scheduled_at
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups, partial_start_since
from airflow_provider_ktrain.core.state.status import Phase, runs_on, wants_suspension
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

RUNS_ON_SECONDS = 300.0  #: How long a failed job that runs on logs no line before it is over: see `Kind.runs_on`.


class Limit(enum.StrEnum):
    """The limits of a task, by the names of the operators' parameters."""

    QUEUE = "queue_timeout"
    SCHEDULE = "schedule_timeout"
    STARTUP = "startup_timeout"
    PARTIAL_START = "partial_start_timeout"
    EXECUTION = "execution_timeout"
    LOG_STALL = "log_stall_timeout"
    PROGRESS = "progress_timeout"
    RESTARTS = "max_restarts"
    CRASH_LOOP = "crash_loop_limit"
    NAN = "fail_on_nan"


@dataclass(frozen=True)
class Limits:
    """The limits of a task, which docs/how-to/failures.md describes: seconds, or a number of restarts or failures.

    None, the default of each, means no limit.
    """

    queue: float | None = None
    schedule: float | None = None
    startup: float | None = None
    log_stall: float | None = None
    max_restarts: int | None = None
    crash_loop: int | None = None
    partial_start: float | None = None
    progress: float | None = None


@dataclass(frozen=True)
class Clock:
    """A running time limit.

    :param due: when it is exceeded, in epoch seconds.
    :param unchanged_since: the transition time of the condition that shows the job's present state, in epoch seconds:
        it proves that nothing has changed since, also while nobody could look. Default: none does.
    """

    limit: Limit
    due: float
    seconds: float
    unchanged_since: float = math.inf


def clocks(
    job: Json,
    groups: PodGroups,
    phase: Phase,
    limits: Limits,
    *,
    deadline: float | None,
    deadline_seconds: float | None = None,
    last_line: float,
    progress_since: float | None = None,
    has_events: bool = False,
    had_pods: bool = False,
) -> Iterator[Clock]:
    """The time limits that run in the job's present state. Of those of pods, the first one of each state of a pod.

    :param deadline: when the whole execution must end (`core/manifest/deadline.py`), in epoch seconds; None: never.
    :param deadline_seconds: from the submission to the deadline. Default: None, from the job's creation.
    :param last_line: time of the last log line, or of the start of following, in epoch seconds.
    :param progress_since: from when on the job makes no progress, in epoch seconds: see `progress.py`. Default: None,
        this doesn't count.
    :param has_events: whether the job has events. An operator that can't create pods, as for a quota, writes events but
        no status. Default: False.
    :param had_pods: whether the job has had pods, so that an operator has reconciled it. Default: False.
    """
    created = objects.created_at(job)
    if deadline is not None:
        since_creation = deadline - (created or deadline)  # less than `deadline_seconds` if a worker must end sooner
        yield Clock(Limit.EXECUTION, deadline, min(deadline_seconds or math.inf, since_creation))
    if phase in (Phase.QUEUED, Phase.SUSPENDED):
        yield from _clock(Limit.QUEUE, limits.queue, _queued_since(job), _transition(job, "Suspended", "True"))
        return
    if phase in (Phase.RUNNING, Phase.RESTARTING):
        yield from _silence(job, limits.log_stall, last_line)
        yield from _clock(Limit.PROGRESS, limits.progress, progress_since)
    for pod in groups.examples():
        yield from _pod_clocks(pod, limits)
    if limits.partial_start is not None:
        yield from _clock(Limit.PARTIAL_START, limits.partial_start, partial_start_since(job, groups))
    resumed = objects.resumed_at(job)
    reconciled = groups.pods or (resumed is None and (had_pods or (job.get("status") or {}).get("conditions")))
    if not reconciled and phase is Phase.PENDING and not wants_suspension(job):
        rejected = has_events or resumed is not None
        limit, seconds = (Limit.SCHEDULE, limits.schedule) if rejected else (Limit.STARTUP, limits.startup)
        yield from _clock(limit, seconds, resumed or created)


def _clock(
    limit: Limit, seconds: float | None, since: float | None, unchanged_since: float | None = None
) -> Iterator[Clock]:
    if seconds is not None and since is not None:
        yield Clock(limit, since + seconds, seconds, math.inf if unchanged_since is None else unchanged_since)


def _transition(obj: Json, type_: str, status: str) -> float | None:
    """Since when the condition has this status, in epoch seconds; None if it has another one, or no time."""
    condition = objects.condition_of(obj, type_)
    return epoch_seconds(condition.get("lastTransitionTime")) if str(condition.get("status")) == status else None


def _silence(job: Json, seconds: float | None, last_line: float) -> Iterator[Clock]:
    """Of a job that has lost replicas for good, silence has a limit of its own: the others may wait for them."""
    if runs_on(job):
        seconds = min(seconds or RUNS_ON_SECONDS, RUNS_ON_SECONDS)
        last_line = max(last_line, epoch_seconds(true_conditions(job)["Failed"].since) or 0.0)
    yield from _clock(Limit.LOG_STALL, seconds, last_line)


def _pod_clocks(pod: Json, limits: Limits) -> Iterator[Clock]:
    if (pod.get("status") or {}).get("phase", "Pending") != "Pending" or objects.is_being_deleted(pod):
        return
    if objects.node_of(pod):
        yield from _clock(Limit.STARTUP, limits.startup, scheduled_at(pod), _transition(pod, "Ready", "False"))
    else:
        unplaced_since = _transition(pod, "PodScheduled", "False")
        yield from _clock(Limit.SCHEDULE, limits.schedule, objects.created_at(pod), unplaced_since)


def _queued_since(job: Json) -> float | None:
    """None while spec and condition disagree: the operator sets the condition after the queue wrote the spec."""
    suspended = true_conditions(job).get("Suspended")
    if not wants_suspension(job):
        return None
    if suspended is not None:
        return epoch_seconds(suspended.since) or objects.created_at(job)
    started = (job.get("status") or {}).get("startTime")
    return None if started else objects.created_at(job)
