"""What went wrong where: the failures of a job's pods, in the order in which they happened, cause apart from effect.

Pods are given as they were last seen, also those that are gone by now: operators delete what failed.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from airflow_provider_ktrain.core.diagnosis.log_parser import Tail, read_tail
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.manifest.resources import pod_gpus

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
    :param gpus: how many GPUs its pod requests.
    :param final: False where another pod took its place, whether that one runs by now or has failed too. True where
        none did: what made the job fail, where the job did, is among those.
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
    gpus: int = 0

    @property
    def replica(self) -> str:
        """`Worker 3`, or `Launcher` where there is only one."""
        return self.role if self.role == "Launcher" else f"{self.role} {self.index}"

    @property
    def is_effect(self) -> bool:
        """Whether it only tells that another one was lost."""
        return self.tail.is_effect


def failures(
    kind: Kind, pods: Sequence[Json], logs: Mapping[str, Sequence[str]], *, healed: bool = False
) -> list[Failure]:
    """All failures, the earliest first, those that only lost a peer last.

    Left out is what the deletion of a pod did to its containers.

    :param healed: whether to tell also of containers that run again, or have ended well since.
    """
    newest = {_place(kind, pod): pod for pod in sorted(pods, key=_age)}
    tail = functools.cache(lambda key, message: read_tail(logs.get(key), message))  # pods made anew share a log
    found = [f for pod in pods for f in _of_pod(kind, pod, newest[_place(kind, pod)] is pod, tail, healed)]
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


def _place(kind: Kind, pod: Json) -> str:
    """What a pod and those made in its stead have in common: each Launcher of a batch Job has a name of its own."""
    role, _ = kind.pod_role(_meta(pod).get("labels") or {})
    return role if role == "Launcher" else _name(pod)


def _age(pod: Json) -> tuple[str, bool]:
    """In the same second one that is being deleted is the older one."""
    return str(_meta(pod).get("creationTimestamp")), not _meta(pod).get("deletionTimestamp")


def _of_pod(
    kind: Kind, pod: Json, is_newest: bool, tail: Callable[[str, str], Tail], healed: bool
) -> Iterator[Failure]:
    status = pod.get("status") or {}
    role, index = kind.pod_role(_meta(pod).get("labels") or {})
    taken, taken_message, taken_at = taken_away(status)
    told = False
    for is_init, container in _containers(status):
        genuine = [t for t in _ends(container, healed) if taken or not is_collateral(t, pod)]
        if not genuine:
            continue
        first, last = genuine[0], genuine[-1]
        told = True
        name = str(container.get("name"))
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
            tail(log_key(_name(pod), name), str(last.get("message") or "")),
            is_newest,
            pod_gpus(pod.get("spec") or {}),
        )
    if taken and not told:
        yield Failure(
            role, index, _name(pod), "", False, None, taken, taken_message, taken_at, taken_at, 0, Tail(), is_newest
        )


def _containers(status: Json) -> Iterator[tuple[bool, Json]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield key.startswith("init"), container


def _ends(container: Json, healed: bool = False) -> list[Json]:
    """The failed runs of a container, oldest first: the run before and the present one.

    Unless `healed`, a failure is over and done with when the container runs again, or has ended well since.
    """
    state, last = container.get("state") or {}, container.get("lastState") or {}
    ends = [s["terminated"] for s in (last, state) if s.get("terminated")]
    over = state.get("running") or (state.get("terminated") and not run_failed(state["terminated"]))
    return [] if over and not healed else [end for end in ends if run_failed(end)]


def run_failed(end: Json) -> bool:
    """Whether a terminated container run failed: by its exit code or for memory."""
    return end.get("exitCode") not in (0, None) or end.get("reason") == "OOMKilled"


def is_collateral(end: Json, pod: Json) -> bool:
    """Whether a container ended because its pod was being deleted. A kill for memory never is.

    Deletion sends SIGTERM at once and SIGKILL when the grace period is over; a program that handles SIGTERM may end
    with any code. In the same second as the deletion an exit of its own may as well be the reason for it. The kubelet
    removes the object with a grace period of 0, which overwrites when the deletion was asked for (recorded): then every
    kill counts as the deletion's.
    """
    meta = _meta(pod)
    over, grace = moment(meta.get("deletionTimestamp")), float(meta.get("deletionGracePeriodSeconds") or 0)
    at, code = moment(end.get("finishedAt")), end.get("exitCode")
    if over is None or end.get("reason") == "OOMKilled":
        return False
    if at is None or not grace:
        return code in (SIGKILLED, SIGTERMED)
    asked = over - timedelta(seconds=grace)
    if code == SIGKILLED:
        return at >= over - _SLACK
    return at >= asked if code == SIGTERMED else at > asked


def taken_away(status: Json) -> tuple[str, str, datetime | None]:
    """Reason, message and time, where something other than the program ended the pod."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = str(condition.get("reason") or "DisruptionTarget"), str(condition.get("message") or "")
            return status.get("reason") or reason, message, moment(condition.get("lastTransitionTime"))
    reason = str(status.get("reason") or "") if status.get("phase") == "Failed" else ""
    return (reason, str(status.get("message") or ""), _last_end(status)) if reason else ("", "", None)


def _last_end(status: Json) -> datetime | None:
    ends = [moment(t.get("finishedAt")) for _, c in _containers(status) for t in _ends(c)]
    return max((at for at in ends if at), default=moment(status.get("startTime")))


def _meta(pod: Json) -> Json:
    return pod.get("metadata") or {}


def _name(pod: Json) -> str:
    return str(_meta(pod).get("name"))


def exit_code_text(code: int | None) -> str:
    name = signal_name(code)
    return "no exit code" if code is None else f"exit code {code}" + (f", {name}" if name else "")
