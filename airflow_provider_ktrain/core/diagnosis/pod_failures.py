"""The failures of a job's pods, in the order in which they happened, causes apart from effects.

Pods are given as last seen, deleted ones included: operators delete pods that failed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from airflow_provider_ktrain.core.diagnosis.failure_patterns import explain_disruption, names_network_error
from airflow_provider_ktrain.core.diagnosis.log_parser import BUILD_FAILED, Tail, read_tail
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.devices import requests_gpus
from airflow_provider_ktrain.core.state.pods.objects import SIGKILLED, SIGTERMED, Json
from airflow_provider_ktrain.core.state.pods.pod_changes import MAX_CLOCK_SKEW_SECONDS
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

#: How long replicas may take to notice a lost peer: NCCL's timeout is 10 minutes.
PEER_LOSS_DELAY = timedelta(minutes=15)
PEER_LEAVES = 60.0  #: Seconds from an error that a replica logs until others lose it.
CLOCK_SKEW = timedelta(seconds=MAX_CLOCK_SKEW_SECONDS)


@dataclass(frozen=True)
class Failure:
    """A container that failed, or a pod that Kubernetes ended.

    :param container: name of the container; empty if the pod ended before any container failed.
    :param exit_code: exit code of its last failed run; None if unknown.
    :param reason: from the kubelet or the pod: Error, OOMKilled, StartError, Evicted, ...
    :param since: when the container first failed, as far as is known; None if unknown.
    :param is_running: whether it has not ended, although its log shows why the job fails. Default: False.
    :param is_latest: whether no other pod has replaced its pod. If the job failed, the failure that caused it is one of
        the latest.
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
    since: datetime | None
    restarts: int
    tail: Tail
    is_latest: bool
    has_gpus: bool
    node: str
    is_running: bool = False

    @property
    def is_ended_by_cluster(self) -> bool:
        """Whether Kubernetes ended the pod, or killed its program because of its memory."""
        return explain_disruption(self.reason, self.message) is not None or self.reason == "OOMKilled"

    def follows_peers(self, launchers: Collection[str]) -> bool:
        """Whether it may have failed because it lost a peer: by its log, or as a launcher whose log shows no cause.

        :param launchers: roles whose program needs the pods of other roles.
        """
        if self.tail.is_peer_loss or self.role not in launchers:
            return self.tail.is_peer_loss
        tail = self.tail
        printed = (tail.exception or tail.crash_signal or tail.record) and not self.is_effect
        return not (printed or self.is_ended_by_cluster or self.exit_code in (SIGKILLED, SIGTERMED))

    @property
    def is_effect(self) -> bool:
        """Whether the program failed because another one has: it lost a peer, or says that another process failed."""
        return self.tail.is_peer_loss or self.tail.points_elsewhere


def find_failures(
    kind: Kind, pods: Sequence[Json], logs: Mapping[str, Sequence[str]], *, include_recovered: bool = False
) -> list[Failure]:
    """All failures, the earliest first; replicas that only lost a peer come last, by an error of the network first.

    Containers that ended because their pod was deleted are not failures.
    """
    newest = {_replica_key(kind, pod): pod for pod in sorted(pods, key=_creation_order)}
    tail = functools.cache(lambda key, message: read_tail(logs.get(key), message))  # recreated pods share a log
    found = [
        failure
        for pod in pods
        for failure in _failures_of_pod(kind, pod, newest[_replica_key(kind, pod)] is pod, tail, include_recovered)
    ]

    def order(f: Failure) -> tuple[object, ...]:
        lost = f.tail.is_peer_loss * (2 - names_network_error(f.tail.exception or f.tail.crash_line))
        began = f.since.timestamp() if f.since else 0
        return lost > 0 or f.is_effect or follows_build(f, found), lost, f.since is None, began, f.role, f.index

    return sorted(found, key=order)


def follows_build(f: Failure, found: Sequence[Failure]) -> bool:
    """Whether a replica can't import what another one has failed to build."""
    if not f.tail.exception.startswith("ImportError"):
        return False
    builds = (BUILD_FAILED.search(other.tail.exception) for other in found)
    return any(build is not None and build[1] in f.tail.exception for build in builds)


def causes_of_peers(kind: Kind, pods: Sequence[Json], logs: Mapping[str, Sequence[str]]) -> list[Failure]:
    """What the logs of containers show that still run or were ended by a deletion, the most likely cause first.

    The replica with the cause often ends last: it writes a checkpoint, or torchrun waits for its processes. By then,
    the operator may have deleted its pod. That is an exception, a crash or a kill, else an error that the program has
    logged or printed shortly before another one has lost it.
    """
    found = list(_unended(kind, pods, logs))
    sure = [f for f in found if f.tail.crash_signal or f.tail.is_kill_reported or _is_unhandled(f.tail)]
    effects = (f for f in find_failures(kind, pods, logs) if f.is_effect)
    lost = min((at for f in effects if (at := f.tail.at or (f.since and f.since.timestamp()))), default=0.0)
    logged = [f for f in found if f.tail.at and lost - PEER_LEAVES <= f.tail.at <= lost]
    return sorted(sure or logged, key=lambda f: (f.tail.at is None, f.tail.at or 0))


def _unended(kind: Kind, pods: Sequence[Json], logs: Mapping[str, Sequence[str]]) -> Iterator[Failure]:
    """Containers that still run or were ended by a deletion, and whose log shows why they fail."""
    for pod in pods:
        for container in objects.main_containers(pod):
            name = str(container.get("name") or "")
            ended = objects.state_of(container, "terminated")
            if ended.get("exitCode") == 0 or not kind.is_main_container(name):
                continue
            tail = read_tail(logs.get(log_key(objects.name_of(pod), name)))
            made = replace(_failure(kind, pod, {"name": name}, {}, tail), is_running=not ended)
            reported = tail.is_last_printed or (not tail.exception and (tail.is_kill_reported or tail.record))
            if tail.crash_signal or ((_is_unhandled(tail) or reported) and not made.is_effect):
                yield made


def _is_unhandled(tail: Tail) -> bool:
    return bool(tail.exception) and not tail.is_handled


def silent_peers(kind: Kind, pods: Sequence[Json], logs: Mapping[str, Sequence[str]]) -> list[tuple[Json, Json]]:
    """Pods whose logs aren't known, with their main containers, if the first failure is the effect of another one.

    Those come first that the log of this failure names.
    """
    first = next(iter(likely_causes(find_failures(kind, pods, logs), kind.launchers)), None)
    if first is None or not first.is_effect or causes_of_peers(kind, pods, logs):
        return []
    found = []
    for pod in pods:
        for container in objects.main_containers(pod):
            name, key = str(container.get("name") or ""), objects.name_of(pod)
            ended = objects.state_of(container, "terminated")
            if ended.get("exitCode") != 0 and kind.is_main_container(name) and log_key(key, name) not in logs:
                found.append((pod, container))

    def is_named(pod: Json) -> bool:
        names = objects.name_of(pod), str((pod.get("status") or {}).get("podIP") or "")
        return any(re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", first.tail.text) for name in names if name)

    return sorted(found, key=lambda one: not is_named(one[0]))


def likely_causes(found: Sequence[Failure], launchers: Collection[str] = ()) -> list[Failure]:
    """The failures that can be the cause, the most likely first.

    A failure whose pod was replaced is over, with two exceptions: nothing else has failed, or the others failed because
    they lost a peer. In the second case, a replaced pod that failed shortly before is the peer that they lost, as is
    one that Kubernetes ended.

    :param launchers: see `Failure.follows_peers`. Default: none.
    """
    latest = [f for f in found if f.is_latest]
    if not latest or latest[0].since is None or not latest[0].follows_peers(launchers):
        return latest or list(found)
    lost_peer, at = latest[0].tail.is_peer_loss, latest[0].since
    lost_peers = [
        f
        for f in found
        if f.since
        and at - PEER_LOSS_DELAY <= f.since <= at + CLOCK_SKEW
        and (f.is_ended_by_cluster or (lost_peer and not f.is_latest))
    ]
    return [*lost_peers, *(f for f in latest if f not in lost_peers)]


def log_key(pod: str, container: str) -> str:
    """The key of a container's last lines in the mappings that a diagnosis takes."""
    return f"{pod}/{container}"


def describe_exit_code(exit_code: int | None) -> str:
    """For example `exit code 137, SIGKILL`; `no exit code` if there is none."""
    name = objects.signal_name(exit_code)
    return "no exit code" if exit_code is None else f"exit code {exit_code}" + (f", {name}" if name else "")


def _replica_key(kind: Kind, pod: Json) -> str:
    """The same for a pod and its replacements: the name, except that each pod of a batch Job has another."""
    return kind.replica(pod) if kind.behavior.renames_pods(kind.role_of(pod)[0]) else objects.name_of(pod)


def _creation_order(pod: Json) -> tuple[str, bool]:
    """Of two pods created in the same second, the one that is being deleted is older."""
    return objects.created(pod), not objects.is_being_deleted(pod)


def _failures_of_pod(
    kind: Kind, pod: Json, is_latest: bool, tail: Callable[[str, str], Tail], include_recovered: bool
) -> Iterator[Failure]:
    for is_init, container, runs in objects.failures_of(pod, include_recovered):
        first, last = runs[0], runs[-1]
        key = log_key(objects.name_of(pod), str(container.get("name") or ""))
        made = _failure(kind, pod, container, last, tail(key, str(last.get("message") or "")))
        since = objects.disruption_of(pod)[2] or parse_timestamp(first.get("finishedAt"))
        yield replace(made, is_init=is_init, is_latest=is_latest, since=since)


def _failure(kind: Kind, pod: Json, container: Json, last: Json, tail: Tail) -> Failure:
    """The failure of a container.

    :param last: terminated state of its last run; empty if it still runs.
    """
    role, index = kind.role_of(pod)
    disruption, disruption_message, _ = objects.disruption_of(pod)
    return Failure(
        role=role,
        index=index,
        replica=kind.replica(pod),
        pod=objects.name_of(pod),
        container=str(container.get("name") or ""),
        is_init=False,
        exit_code=last.get("exitCode"),
        reason=disruption or str(last.get("reason") or ""),
        message=disruption_message or str(last.get("message") or ""),
        since=None,
        restarts=objects.restart_count(container),
        tail=tail,
        is_latest=True,
        has_gpus=requests_gpus(pod.get("spec") or {}),
        node=objects.node_of(pod),
    )
