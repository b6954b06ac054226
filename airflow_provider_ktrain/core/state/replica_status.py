"""How many replicas run, and what the others wait for: `3/4 Running · Worker 2 ImagePullBackOff 26 s`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.timestamps import parse_timestamp

Json = Mapping[str, Any]
MAX_NAMED_REPLICAS = 3  #: with the same problem
RUNNING, SUCCEEDED, FAILED, INITIALIZING = "Running", "Succeeded", "Failed", "Initializing"
_CREATING = "ContainerCreating"
#: states that pass by themselves: replicas in them are only counted
_NORMAL = (RUNNING, SUCCEEDED, INITIALIZING, _CREATING, "PodInitializing", "Pending", "Terminating")
_SAME = {"ErrImagePull": "ImagePullBackOff"}  # the kubelet alternates between the two


@dataclass(frozen=True)
class ReplicaStatus:
    """The replicas at one moment.

    :param states: what changes, without times: two equal ones need one line.
    :param line: for the log.
    :param all_run: whether every replica runs or has succeeded.
    """

    states: tuple[tuple[str, tuple[str, ...]], ...]
    line: str
    all_run: bool


def replica_status(kind: Kind, job: Json, pods: Iterable[Json], now: datetime) -> ReplicaStatus:
    """The status of a job's replicas.

    :param kind: of the job.
    :param job: as last seen.
    :param pods: that exist.
    :param now: the current time, for how long a replica has had its problem.
    """
    found: dict[str, list[tuple[tuple[str, int], datetime | None]]] = {}
    for pod in pods:
        state, since = _state_of(kind, job, pod)
        role = kind.pod_role((pod.get("metadata") or {}).get("labels") or {})
        found.setdefault(state, []).append((role, since))
    present = sum(map(len, found.values()))
    wanted = max(kind.size(job), present)
    running = len(found.pop(RUNNING, ()))
    others: list[str] = []
    states: list[tuple[str, tuple[str, ...]]] = [(RUNNING, (str(running), str(wanted)))]
    for state, replicas in sorted(found.items(), key=lambda entry: (entry[0] in _NORMAL, entry[0])):
        replicas.sort(key=lambda replica: replica[0])
        names = tuple(kind.replica_name(*role) for role, _ in replicas)
        if state in _NORMAL:
            others.append(f"{len(names)} {state}")
            states.append((state, (str(len(names)),)))
        else:
            oldest = min((since for _, since in replicas if since), default=None)
            waited = "" if oldest is None else f" {_age(max((now - oldest).total_seconds(), 0))}"
            others.append(f"{_named(names)} {state}{waited}")
            states.append((state, names))
    if wanted > present:
        others.append(f"{wanted - present} not created")
    done = running + len(found.get(SUCCEEDED, ()))
    return ReplicaStatus(tuple(states), _line(running, wanted, others), done == wanted > 0)


def _line(running: int, wanted: int, others: list[str]) -> str:
    """The number of replicas that run has changed, or what the others wait for."""
    rest = "".join(f" · {other}" for other in others)
    return f"{running}/{wanted} Running{rest}"


def _named(names: tuple[str, ...]) -> str:
    shown, more = names[:MAX_NAMED_REPLICAS], len(names) - MAX_NAMED_REPLICAS
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _state_of(kind: Kind, job: Json, pod: Json) -> tuple[str, datetime | None]:
    """The state of a pod in one word, as kubectl shows it, and since when it has been in it, if known."""
    status = pod.get("status") or {}
    phase = str(status.get("phase") or "Pending")
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "Terminating", None
    if phase in (SUCCEEDED, FAILED):
        return phase, None
    scheduled: Json = next((c for c in status.get("conditions") or () if c.get("type") == "PodScheduled"), {})
    since = parse_timestamp(scheduled.get("lastTransitionTime"))
    if scheduled.get("status") == "False":
        return str(scheduled.get("reason") or "Unschedulable"), since
    for waiting in _waiting(kind, job, pod):
        reason = str(waiting.get("reason") or _CREATING)
        if reason not in (_CREATING, "PodInitializing"):
            return _SAME.get(reason, reason), since
    if phase == RUNNING:
        return RUNNING, since
    if any("running" in (c.get("state") or {}) for c in status.get("initContainerStatuses") or ()):
        return INITIALIZING, since
    return (_CREATING if (pod.get("spec") or {}).get("nodeName") else "Pending"), since


def _waiting(kind: Kind, job: Json, pod: Json) -> Iterable[Json]:
    """The waiting states of the init containers, then that of the main container."""
    status, main = pod.get("status") or {}, kind.main_container_name(job, pod)
    containers = [c for c in status.get("containerStatuses") or () if c.get("name") == main]
    for container in [*(status.get("initContainerStatuses") or ()), *containers]:
        if waiting := (container.get("state") or {}).get("waiting"):
            yield waiting
