"""What went wrong where: the failures of a job's pods, in the order in which they happened, cause apart from effect.

Pods are given as they were last seen, also those that are gone by now: operators delete what failed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.status import true_conditions
from airflow_provider_ktrain.core.tails import Tail, read_tail

Json = Mapping[str, Any]
SIGKILLED, SIGTERMED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
INFECTIOUS = timedelta(minutes=15)  #: how long a lost peer can go unnoticed: NCCL's timeout is 10 minutes
_SLACK = timedelta(seconds=1)  #: times of Kubernetes are in whole seconds


def moment(text: Any) -> datetime | None:
    """An RFC 3339 time; None for what is none."""
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


@dataclass(frozen=True)
class Failure:
    """One container that failed, or one pod that was taken away.

    :param when: when it ended; None where nobody says.
    :param since: the first failure of that container that is known: earlier where it was restarted.
    :param reason: the kubelet's or the pod's word: Error, OOMKilled, StartError, Evicted, ...
    :param restarts: how often the container was started again.
    :param tail: what its log, or its termination message, says.
    :param final: False where another pod took its place.
    """

    role: str
    index: int
    pod: str
    container: str
    is_init: bool
    exit_code: int | None
    reason: str
    message: str
    when: datetime | None
    since: datetime | None
    restarts: int
    tail: Tail
    final: bool

    @property
    def replica(self) -> str:
        """`Worker 3`, or `Launcher` where there is only one."""
        return self.role if self.role == "Launcher" else f"{self.role} {self.index}"

    @property
    def is_effect(self) -> bool:
        """Whether it only tells that another one was lost."""
        return self.tail.is_effect


def failures(kind: Kind, job: Json, pods: Sequence[Json], logs: Mapping[str, Sequence[str]]) -> list[Failure]:
    """All failures, the earliest first, those that only lost a peer last.

    Left out are containers killed (SIGTERM, SIGKILL) because their pod was being deleted or the job had failed.
    """
    ended = _failed_at(job)
    newest = {_name(pod): pod for pod in sorted(pods, key=lambda p: str(_meta(p).get("creationTimestamp")))}
    found = [f for pod in pods for f in _of_pod(kind, pod, newest[_name(pod)] is pod, ended, logs)]
    return sorted(
        found, key=lambda f: (f.is_effect, f.since is None, f.since.timestamp() if f.since else 0, f.role, f.index)
    )


def suspects(found: Sequence[Failure]) -> list[Failure]:
    """Those among all failures that can be the cause, the likeliest first.

    A failure whose pod was replaced since is over, unless it may have infected those that lost a peer, or nothing else
    has failed.
    """
    final = [f for f in found if f.final]
    if not final or not final[0].is_effect:
        return final or list(found)
    first = final[0].since
    infected = [f for f in found if not f.final and f.since and first and first - INFECTIOUS <= f.since <= first]
    return [*infected, *final]


def log_key(pod: str, container: str) -> str:
    """The key of a container's last lines in the mapping that `diagnose` takes."""
    return f"{pod}/{container}"


def signal_name(exit_code: int | None) -> str:
    """`SIGKILL` for 137 and for -9; empty where the code tells no signal."""
    number = (exit_code or 0) - 128 if (exit_code or 0) > 128 else -(exit_code or 0)
    try:
        return signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""


def deletion_of(pod: Json) -> datetime | None:
    """When the deletion of a pod was asked for: its deletionTimestamp is when the grace period ends."""
    ends = moment(_meta(pod).get("deletionTimestamp"))
    return ends - timedelta(seconds=float(_meta(pod).get("deletionGracePeriodSeconds") or 0)) if ends else None


def _of_pod(
    kind: Kind, pod: Json, is_newest: bool, ended: datetime | None, logs: Mapping[str, Sequence[str]]
) -> Iterator[Failure]:
    status = pod.get("status") or {}
    role, index = kind.pod_role(_meta(pod).get("labels") or {})
    taken, taken_message, taken_at = _taken_away(status)
    told = False
    for is_init, container in _containers(status):
        genuine = [t for t in _ends(container) if taken or not _is_collateral(t, pod, ended)]
        if not genuine:
            continue
        first, last = genuine[0], genuine[-1]
        told = True
        name = str(container.get("name"))
        lines = logs.get(log_key(_name(pod), name))
        yield Failure(
            role,
            index,
            _name(pod),
            name,
            is_init,
            last.get("exitCode"),
            taken or str(last.get("reason") or ""),
            taken_message or str(last.get("message") or ""),
            moment(last.get("finishedAt")),
            taken_at or moment(first.get("finishedAt")),
            int(container.get("restartCount") or 0),
            read_tail(lines, str(last.get("message") or "")),
            is_newest,
        )
    if taken and not told:
        yield Failure(
            role, index, _name(pod), "", False, None, taken, taken_message, taken_at, taken_at, 0, Tail(), is_newest
        )


def _containers(status: Json) -> Iterator[tuple[bool, Json]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield key.startswith("init"), container


def _ends(container: Json) -> list[Json]:
    """The failed runs of a container, oldest first: the run before, if it also failed, and the present one.

    A run before the present one is over and done with, unless the present one failed too or waits to be restarted.
    """
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ends = [s["terminated"] for s in (last, state) if s.get("terminated")]
    failed = [t for t in ends if t.get("exitCode") not in (0, None) or t.get("reason") == "OOMKilled"]
    return [] if state.get("running") or not failed else failed


def _is_collateral(end: Json, pod: Json, ended: datetime | None) -> bool:
    """Whether a kill is what deletion, or the end of the job, does to a pod. A kill for memory never is."""
    if end.get("exitCode") not in (SIGKILLED, SIGTERMED) or end.get("reason") == "OOMKilled":
        return False
    at, deleted = moment(end.get("finishedAt")), deletion_of(pod)
    if deleted and (at is None or at >= deleted - _SLACK):
        return True
    return bool(ended and at and at >= ended - _SLACK)


def _taken_away(status: Json) -> tuple[str, str, datetime | None]:
    """Reason, message and time, where something other than the program ended the pod."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = str(condition.get("reason") or "DisruptionTarget"), str(condition.get("message") or "")
            return status.get("reason") or reason, message, moment(condition.get("lastTransitionTime"))
    reason = str(status.get("reason") or "")
    return (reason, str(status.get("message") or ""), _last_end(status)) if reason else ("", "", None)


def _last_end(status: Json) -> datetime | None:
    ends = [moment(t.get("finishedAt")) for _, c in _containers(status) for t in _ends(c)]
    return max((at for at in ends if at), default=moment(status.get("startTime")))


def _failed_at(job: Json) -> datetime | None:
    failed = true_conditions(job).get("Failed")
    return moment(failed.since) if failed else None


def _meta(pod: Json) -> Json:
    return pod.get("metadata") or {}


def _name(pod: Json) -> str:
    return str(_meta(pod).get("name"))
