"""From the set of a job's conditions to its phase. Order never matters: operators remove and append conditions.

Recorded on a real cluster: after a launcher that ended before the workers ran, `Running=False` stands *after*
`Succeeded`; Running and Restarting evict each other; Succeeded and Failed can both be written by racing reconciles.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class Phase(enum.StrEnum):
    """Where a job stands."""

    QUEUED = (
        "Queued"  #: nothing is asked of the scheduler yet: no condition, or suspended by a queue before it ever ran
    )
    PENDING = "Pending"  #: created; a pod waits for a node
    STARTING = "Starting"  #: all pods have nodes; images are pulled, init containers run
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Gone"  #: the job does not exist (any more)

    @property
    def ended(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


@dataclass(frozen=True)
class Condition:
    """One true condition of a job."""

    type: str
    reason: str = ""
    message: str = ""
    since: str = ""  #: lastTransitionTime, RFC 3339


def true_conditions(job: Mapping[str, Any]) -> dict[str, Condition]:
    """The conditions whose status is True, by type."""
    conditions: Iterable[Any] = (job.get("status") or {}).get("conditions") or ()
    return {
        str(c["type"]): Condition(
            str(c["type"]), c.get("reason") or "", c.get("message") or "", c.get("lastTransitionTime") or ""
        )
        for c in conditions
        if isinstance(c, Mapping) and c.get("type") and str(c.get("status")) == "True"
    }


def phase_of(job: Mapping[str, Any] | None, pods: Iterable[Mapping[str, Any]] = ()) -> Phase:
    """The phase of a job, given its pods (which only tell Pending from Starting).

    Terminal conditions win over all others, and Failed over Succeeded only where Succeeded is not True: once
    succeeded, the primary has done its work. Restarting is information. Suspended is a queue's business, not a failure.
    """
    if job is None:
        return Phase.GONE
    true = true_conditions(job)
    if "Succeeded" in true or "Complete" in true:
        return Phase.SUCCEEDED
    if "Failed" in true:
        return Phase.FAILED
    if "Suspended" in true or wants_suspension(job):
        return Phase.SUSPENDED if (job.get("status") or {}).get("startTime") else Phase.QUEUED
    if "Restarting" in true:
        return Phase.RESTARTING
    if "Running" in true:
        return Phase.RUNNING
    known = list(pods)
    if known and all(_scheduled(pod) for pod in known):
        return Phase.STARTING
    return Phase.PENDING


def wants_suspension(job: Mapping[str, Any]) -> bool:
    """Whether the job's spec says suspend: runPolicy's, or MPIJob v2beta1's way."""
    spec = job.get("spec") or {}
    return bool((spec.get("runPolicy") or {}).get("suspend") or spec.get("suspend"))


def _scheduled(pod: Mapping[str, Any]) -> bool:
    return bool((pod.get("spec") or {}).get("nodeName"))
