"""The clocks of a job: how long it may wait, start, run and be silent, each with a limit of its own.

Pure: times come from the objects' own timestamps, `now` is passed in, and the supervisor sleeps until what is due.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Limit
from airflow_provider_ktrain.core.state.status import Phase, true_conditions, wants_suspension

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits in seconds; None waits for ever.

    :param queue: suspended (a queue such as Kueue has not admitted the job).
    :param schedule: a pod has no node, or is not made (a quota).
    :param startup: a pod has a node, and its containers do not run (pulling, mounting, init containers); or no operator
        has taken the job up.
    :param log_stall: the job runs, and no replica that is followed writes a line.
    :param max_restarts: a number: restarts of containers, and pods that failed and were made anew (ExitCode).
    :param crash_loop: a number: failures of one container in a row, each after a short run; see `core.crashloop`.
    """

    queue: float | None = None
    schedule: float | None = None
    startup: float | None = None
    log_stall: float | None = None
    max_restarts: int | None = None
    crash_loop: int | None = None

    def to_dict(self) -> dict[str, float | None]:
        return asdict(self)


@dataclass(frozen=True)
class Clock:
    """One limit that is running, due at epoch second `due`."""

    limit: Limit
    due: float
    seconds: float


def epoch(timestamp: str | None) -> float | None:
    """Seconds since the epoch of a Kubernetes timestamp; None where there is none."""
    return datetime.datetime.fromisoformat(timestamp).timestamp() if timestamp else None


def clocks(
    job: Object,
    pods: Iterable[Object],
    phase: Phase,
    limits: Limits,
    *,
    deadline: float | None,
    last_line: float,
    heard: bool = False,
) -> Iterator[Clock]:
    """Every limit that runs in this state.

    :param deadline: epoch seconds at which the whole execution is over, or None.
    :param last_line: epoch seconds of the last log line, or of when following began.
    :param heard: whether there are events of the job: an operator that cannot make its pods, as for a quota, writes no
        status at all.
    """
    created = epoch((job.get("metadata") or {}).get("creationTimestamp"))
    if deadline is not None:
        yield Clock(Limit.EXECUTION, deadline, deadline - (created or deadline))
    if phase in (Phase.QUEUED, Phase.SUSPENDED):
        if limits.queue is not None and (since := _queued_since(job)) is not None:
            yield Clock(Limit.QUEUE, since + limits.queue, limits.queue)
        return
    if phase in (Phase.RUNNING, Phase.RESTARTING) and limits.log_stall is not None:
        yield Clock(Limit.LOG_STALL, last_line + limits.log_stall, limits.log_stall)
    known = list(pods)
    for pod in known:
        yield from _pod_clocks(pod, limits)
    if not known and not (job.get("status") or {}).get("conditions") and not wants_suspension(job):
        limit, seconds = (Limit.SCHEDULE, limits.schedule) if heard else (Limit.STARTUP, limits.startup)
        if seconds is not None and created is not None:
            yield Clock(limit, created + seconds, seconds)


def _pod_clocks(pod: Object, limits: Limits) -> Iterator[Clock]:
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    if status.get("phase", "Pending") != "Pending" or meta.get("deletionTimestamp"):
        return
    created = epoch(meta.get("creationTimestamp"))
    if not (pod.get("spec") or {}).get("nodeName"):
        if limits.schedule is not None and created is not None:
            yield Clock(Limit.SCHEDULE, created + limits.schedule, limits.schedule)
        return
    scheduled = next(
        (epoch(c.get("lastTransitionTime")) for c in status.get("conditions") or () if c.get("type") == "PodScheduled"),
        None,
    )
    since = scheduled or created
    if limits.startup is not None and since is not None:
        yield Clock(Limit.STARTUP, since + limits.startup, limits.startup)


def restarts(pods: Iterable[Object]) -> int:
    """Restarts of containers, init containers included, over all pods that are there."""
    return sum(
        int(c.get("restartCount") or 0)
        for pod in pods
        for key in ("initContainerStatuses", "containerStatuses")
        for c in (pod.get("status") or {}).get(key) or ()
    )


def _queued_since(job: Object) -> float | None:
    """None while spec and condition disagree: a queue writes the one, the operator follows with the other."""
    suspended = true_conditions(job).get("Suspended")
    if not wants_suspension(job):
        return None
    if suspended is not None:
        return epoch(suspended.since) or epoch((job.get("metadata") or {}).get("creationTimestamp"))
    started = (job.get("status") or {}).get("startTime")
    return None if started else epoch((job.get("metadata") or {}).get("creationTimestamp"))
