"""How many replicas run, and what the others wait for: `3/4 Running · Worker 2 ImagePullBackOff 26 s`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.pods.pod_state import RUNNING, SUCCEEDED, passes_by_itself
from airflow_provider_ktrain.core.text.output import listed
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp

MAX_NAMED_REPLICAS = 3  #: How many replicas with the same problem are named.


@dataclass(frozen=True)
class ReplicaStatus:
    """The replicas at one moment.

    :param states: the parts of the line without times: two equal ones need one line.
    """

    states: tuple[str, ...]
    line: str
    all_run: bool


def replica_status(kind: Kind, job: Json, pods: PodGroups, now: datetime) -> ReplicaStatus:
    """The status of a job's replicas."""
    found: dict[str, list[Json]] = {}
    for uid, pod in pods.pods.items():
        found.setdefault(pods.shown[uid], []).append(pod)
    present = len(pods.pods)
    wanted = max(kind.size(job), present)
    running = len(found.pop(RUNNING, ()))
    parts = [(f"{running}/{wanted} Running", "")]  # each with the time for which its pods have waited
    for state, replicas in sorted(found.items(), key=lambda entry: (passes_by_itself(entry[0]), entry[0])):
        if passes_by_itself(state):
            parts.append((f"{len(replicas)} {state}", ""))
        else:
            names = [kind.replica_name(*role) for role in sorted(map(kind.role_of, replicas))]
            oldest = parse_timestamp(min(filter(None, map(_waiting_since, replicas)), default=None))
            waited = "" if oldest is None else f" {_age(max((now - oldest).total_seconds(), 0))}"
            parts.append((f"{listed(names, MAX_NAMED_REPLICAS)} {state}", waited))
    if wanted > present:
        parts.append((f"{wanted - present} not created", ""))
    done = running + len(found.get(SUCCEEDED, ()))
    line = " · ".join(text + waited for text, waited in parts)
    return ReplicaStatus(tuple(text for text, _ in parts), line, done == wanted > 0)


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _waiting_since(pod: Json) -> str:
    """Since when a container that has run waits, or when the scheduler last decided about the pod.

    Empty if that is unknown, or if the pod ends or has ended.
    """
    if silent := objects.silent_since(pod):
        return silent
    if objects.has_ended(pod) or objects.is_being_deleted(pod):
        return ""
    waiting = (c.get("lastState") or {} for c in objects.containers(pod) if objects.state_of(c, "waiting"))
    if ended := max((str((last.get("terminated") or {}).get("finishedAt") or "") for last in waiting), default=""):
        return ended
    return str(objects.scheduling(pod).get("lastTransitionTime") or "")
