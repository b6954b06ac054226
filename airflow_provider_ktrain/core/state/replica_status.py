"""How many replicas run, and what the others wait for: `3/4 Running · Worker 2 ImagePullBackOff 26 s`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.pod_state import FAILED, RUNNING, SUCCEEDED, passes_by_itself, state_of_pod
from airflow_provider_ktrain.core.timestamps import parse_timestamp

Json = Mapping[str, Any]
MAX_NAMED_REPLICAS = 3  #: with the same problem


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


def replica_status(
    kind: Kind, job: Json, pods: Iterable[Json], now: datetime, known: PodGroups | None = None
) -> ReplicaStatus:
    """The status of a job's replicas.

    :param kind: of the job.
    :param job: as last seen.
    :param pods: that exist.
    :param now: the current time, for how long a replica has had its problem.
    :param known: the groups of these pods, which contain their states and roles. Default: None, they are found again.
    """

    def role_of(pod: Json) -> tuple[str, int]:
        return kind.pod_role((pod.get("metadata") or {}).get("labels") or {}) if known is None else known.role_of(pod)

    found: dict[str, list[Json]] = {}
    for pod in pods:
        state = state_of_pod(pod, kind) if known is None else known.state_of(pod)
        found.setdefault(state, []).append(pod)
    present = sum(map(len, found.values()))
    wanted = max(kind.size(job), present)
    running = len(found.pop(RUNNING, ()))
    others: list[str] = []
    states: list[tuple[str, tuple[str, ...]]] = [(RUNNING, (str(running), str(wanted)))]
    for state, replicas in sorted(found.items(), key=lambda entry: (passes_by_itself(entry[0]), entry[0])):
        if passes_by_itself(state):
            others.append(f"{len(replicas)} {state}")
            states.append((state, (str(len(replicas)),)))
        else:
            roles = sorted(map(role_of, replicas))
            names = tuple(kind.replica_name(*role) for role in roles)
            oldest = parse_timestamp(min(filter(None, map(_waiting_since, replicas)), default=None))
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


def _waiting_since(pod: Json) -> str:
    """When the scheduler last decided about the pod; empty if that is unknown, or if the pod ends or has ended."""
    status = pod.get("status") or {}
    if status.get("phase") in (SUCCEEDED, FAILED) or (pod.get("metadata") or {}).get("deletionTimestamp"):
        return ""
    scheduled: Json = next((c for c in status.get("conditions") or () if c.get("type") == "PodScheduled"), {})
    return str(scheduled.get("lastTransitionTime") or "")
