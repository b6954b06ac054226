"""The failures of a job's pods, in the order in which they happened, causes apart from effects.

Pods are given as last seen, deleted ones included: operators delete pods that failed.
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
from airflow_provider_ktrain.core.timestamps import parse_timestamp

Json = Mapping[str, Any]
SIGKILLED, SIGTERMED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
#: How long replicas may take to notice a lost peer: NCCL's timeout is 10 minutes.
PEER_LOSS_DELAY = timedelta(minutes=15)
_TIMESTAMP_RESOLUTION = timedelta(seconds=1)  #: Kubernetes writes most times in whole seconds


@dataclass(frozen=True)
class Failure:
    """A container that failed, or a pod that Kubernetes ended.

    :param role: for example `Worker`.
    :param index: the replica's index.
    :param replica: the replica's name, for example `Worker 3`.
    :param pod: name of the pod.
    :param container: name of the container; empty if the pod ended before any container failed.
    :param is_init: whether it is an init container.
    :param exit_code: exit code of its last failed run; None if unknown.
    :param reason: from the kubelet or the pod: Error, OOMKilled, StartError, Evicted, ...
    :param message: the message for that reason.
    :param when: when the last failed run ended; None if unknown.
    :param since: the container's first known failure: earlier than `when` if it was restarted.
    :param restarts: restarts of the container.
    :param tail: the end of its log, or its termination message.
    :param is_latest: whether no other pod has replaced its pod. If the job failed, the failure that caused it is one of
        the latest.
    :param gpus: GPUs that the pod requests. Default: 0.
    :param node: name of the pod's node. Default: "", unknown.
    """

    role: str
    index: int
    replica: str
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
    is_latest: bool
    gpus: int = 0
    node: str = ""

    @property
    def is_peer_loss(self) -> bool:
        """Whether it failed only because it lost a peer."""
        return self.tail.is_peer_loss


def find_failures(
    kind: Kind, pods: Sequence[Json], logs: Mapping[str, Sequence[str]], *, include_recovered: bool = False
) -> list[Failure]:
    """All failures, the earliest first; replicas that only lost a peer come last.

    Containers that ended because their pod was deleted are not failures.

    :param kind: kind of the job.
    :param pods: its pods, each as last seen.
    :param logs: last lines of containers, by `log_key`.
    :param include_recovered: include containers that run again or have succeeded since. Default: False.
    """
    newest = {_replica_key(kind, pod): pod for pod in sorted(pods, key=_creation_order)}
    tail = functools.cache(lambda key, message: read_tail(logs.get(key), message))  # recreated pods share a log
    found = [
        failure
        for pod in pods
        for failure in _failures_of_pod(kind, pod, newest[_replica_key(kind, pod)] is pod, tail, include_recovered)
    ]
    return sorted(
        found, key=lambda f: (f.is_peer_loss, f.since is None, f.since.timestamp() if f.since else 0, f.role, f.index)
    )


def likely_causes(found: Sequence[Failure]) -> list[Failure]:
    """The failures that can be the cause, the most likely first.

    A failure whose pod was replaced is over, with two exceptions: nothing else has failed, or all others only lost a
    peer. In the second case, a replaced pod that failed shortly before is the peer that they lost.

    :param found: all failures, as `find_failures` returns them.
    """
    latest = [f for f in found if f.is_latest]
    if not latest or not latest[0].is_peer_loss:
        return latest or list(found)
    first = latest[0].since
    lost_peers = [
        f for f in found if not f.is_latest and f.since and first and first - PEER_LOSS_DELAY <= f.since <= first
    ]
    return [*lost_peers, *latest]


def restarts_of(pod: Json) -> Iterator[int]:
    """The number of restarts of each container of a pod, init containers included."""
    for _, container in _containers(pod.get("status") or {}):
        yield int(container.get("restartCount") or 0)


def log_key(pod: str, container: str) -> str:
    """The key of a container's last lines in the mappings that a diagnosis takes."""
    return f"{pod}/{container}"


def signal_name(exit_code: int | None) -> str:
    """`SIGKILL` for 137 and for -9; empty if the exit code does not denote a signal."""
    number = (exit_code or 0) - 128 if (exit_code or 0) > 128 else -(exit_code or 0)
    try:
        return signal.Signals(number).name if number > 0 else ""
    except ValueError:
        return ""


def describe_exit_code(exit_code: int | None) -> str:
    """For example `exit code 137, SIGKILL`; `no exit code` if there is none."""
    name = signal_name(exit_code)
    return "no exit code" if exit_code is None else f"exit code {exit_code}" + (f", {name}" if name else "")


def deletion_requested_at(pod: Json) -> datetime | None:
    """When the deletion of a pod was requested: its deletionTimestamp less the grace period; None if it was not."""
    deadline = parse_timestamp(_meta(pod).get("deletionTimestamp"))
    return deadline - timedelta(seconds=_grace_seconds(pod)) if deadline else None


def _grace_seconds(pod: Json) -> float:
    return float(_meta(pod).get("deletionGracePeriodSeconds") or 0)


def _replica_key(kind: Kind, pod: Json) -> str:
    """The same for a pod and its replacements: the name, except that each pod of a batch Job has another."""
    role, index = kind.pod_role(_meta(pod).get("labels") or {})
    return kind.replica_name(role, index) if kind.renames_pods(role) else _name(pod)


def _creation_order(pod: Json) -> tuple[str, bool]:
    """Of two pods created in the same second, the one that is being deleted is older."""
    return str(_meta(pod).get("creationTimestamp")), not _meta(pod).get("deletionTimestamp")


def _failures_of_pod(
    kind: Kind, pod: Json, is_latest: bool, tail: Callable[[str, str], Tail], include_recovered: bool
) -> Iterator[Failure]:
    status = pod.get("status") or {}
    role, index = kind.pod_role(_meta(pod).get("labels") or {})
    node = str((pod.get("spec") or {}).get("nodeName") or "")
    disruption, disruption_message, disrupted_at = disruption_of(status)
    has_failed_container = False
    for is_init, container in _containers(status):
        failed = _failed_runs(container, include_recovered)
        runs = [run for run in failed if disruption or not was_ended_by_deletion(run, pod)]
        if not runs:
            continue
        first, last = runs[0], runs[-1]
        has_failed_container = True
        name = str(container.get("name"))
        yield Failure(
            role,
            index,
            kind.replica_name(role, index),
            _name(pod),
            name,
            is_init,
            last.get("exitCode"),
            disruption or str(last.get("reason") or ""),
            disruption_message or str(last.get("message") or ""),
            parse_timestamp(last.get("finishedAt")),
            disrupted_at or parse_timestamp(first.get("finishedAt")),
            int(container.get("restartCount") or 0),
            tail(log_key(_name(pod), name), str(last.get("message") or "")),
            is_latest,
            pod_gpus(pod.get("spec") or {}),
            node,
        )
    if disruption and not has_failed_container:
        at, message = disrupted_at, disruption_message
        replica = kind.replica_name(role, index)
        yield Failure(
            role,
            index,
            replica,
            _name(pod),
            "",
            False,
            None,
            disruption,
            message,
            at,
            at,
            0,
            Tail(),
            is_latest,
            node=node,
        )


def _containers(status: Json) -> Iterator[tuple[bool, Json]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield key.startswith("init"), container


def _failed_runs(container: Json, include_recovered: bool = False) -> list[Json]:
    """The terminated states of a container's failed runs, oldest first: at most the previous and the current one.

    Unless `include_recovered`, there are none if the container runs again or has succeeded since.
    """
    state, last = container.get("state") or {}, container.get("lastState") or {}
    runs = [s["terminated"] for s in (last, state) if s.get("terminated")]
    recovered = state.get("running") or (state.get("terminated") and not run_failed(state["terminated"]))
    return [] if recovered and not include_recovered else [run for run in runs if run_failed(run)]


def run_failed(terminated: Json) -> bool:
    """Whether a run of a container failed, by its terminated state."""
    return terminated.get("exitCode") not in (0, None) or terminated.get("reason") == "OOMKilled"


def was_ended_by_deletion(terminated: Json, pod: Json) -> bool:
    """Whether a container ended because its pod was being deleted. An OOM kill never counts as such.

    A deletion sends SIGTERM at once and SIGKILL at the end of the grace period; a program that handles SIGTERM may end
    with any exit code. If a container exits in the same second in which the deletion is requested, its exit may be the
    reason for the deletion, so only SIGTERM counts then. When the kubelet removes the object, it sets the grace period
    to 0, and the time of the request is lost (recorded): then every SIGKILL and SIGTERM counts.

    :param terminated: the terminated state of the run.
    :param pod: its pod.
    """
    deadline, requested = parse_timestamp(_meta(pod).get("deletionTimestamp")), deletion_requested_at(pod)
    finished, code = parse_timestamp(terminated.get("finishedAt")), terminated.get("exitCode")
    if deadline is None or requested is None or terminated.get("reason") == "OOMKilled":
        return False
    if finished is None or not _grace_seconds(pod):
        return code in (SIGKILLED, SIGTERMED)
    if code == SIGKILLED:
        return finished >= deadline - _TIMESTAMP_RESOLUTION
    return finished >= requested if code == SIGTERMED else finished > requested


def disruption_of(status: Json) -> tuple[str, str, datetime | None]:
    """Reason, message and time, if Kubernetes ended the pod rather than its program; else empty, empty and None.

    :param status: status of the pod.
    """
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason, message = str(condition.get("reason") or "DisruptionTarget"), str(condition.get("message") or "")
            return status.get("reason") or reason, message, parse_timestamp(condition.get("lastTransitionTime"))
    reason = str(status.get("reason") or "") if status.get("phase") == "Failed" else ""
    return (reason, str(status.get("message") or ""), _last_end(status)) if reason else ("", "", None)


def _last_end(status: Json) -> datetime | None:
    ends = [parse_timestamp(run.get("finishedAt")) for _, c in _containers(status) for run in _failed_runs(c)]
    return max((at for at in ends if at), default=parse_timestamp(status.get("startTime")))


def _meta(pod: Json) -> Json:
    return pod.get("metadata") or {}


def _name(pod: Json) -> str:
    return str(_meta(pod).get("name"))
