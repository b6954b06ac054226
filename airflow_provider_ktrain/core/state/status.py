"""Derives a job's phase from its conditions. Their order never matters: operators remove and append conditions.

Recorded on a real cluster: if a launcher ends before the workers run, `Running=False` comes *after* `Succeeded`;
Running and Restarting replace each other; concurrent reconciles can write both Succeeded and Failed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow_provider_ktrain.core.absent import Absent
from airflow_provider_ktrain.core.kinds import KINDS, Kind
from airflow_provider_ktrain.core.kinds.conditions import incomplete_annotation, true_conditions
from airflow_provider_ktrain.core.state.pods.exit_code import find_ended_primary
from airflow_provider_ktrain.core.state.pods.objects import node_of


class Phase(enum.StrEnum):
    """The phase of a job."""

    QUEUED = "Queued"  #: Suspended, for example by a queue, and never started.
    PENDING = "Pending"  #: Created; has no pods yet, or a pod waits for a node.
    STARTING = "Starting"  #: All pods have nodes: images are pulled, init containers run.
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"  #: Suspended after it had started.
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GONE = "Gone"  #: The job does not exist, or no longer.

    @property
    def ended(self) -> bool:
        """Whether the job's state is final, or the job no longer exists."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)


class Seen(enum.StrEnum):
    """What a read of job and pods shows. A job that is being deleted is running until a read shows its end."""

    NOTHING = "not read"
    RUNNING = "running"
    PRIMARY_ENDED = "its primary container has ended"
    SUCCEEDED = "succeeded"
    INCOMPLETE = "succeeded after a pod was stopped from outside"
    FAILED = "failed"
    GONE = "gone"


def phase_of(
    job: Mapping[str, Any] | Absent, pods: Iterable[Mapping[str, Any]] = (), *, earlier: Phase | None = None
) -> Phase:
    """The phase of a job.

    Succeeded and Failed win over all other conditions. If both are true, the job succeeded: its primary has finished.

    :param job: the job, or that it doesn't exist.
    :param pods: its pods, which distinguish Pending from Starting, and show whether a TrainJob runs. Default: none.
    :param earlier: the phase in which the job was last seen. A job whose operator does not report phases shows neither
        that it ran before nor, once its JobSet has come back, that it failed (recording 60b). Default: not known.
    """
    if isinstance(job, Absent):
        return Phase.GONE
    kind, true = _kind_of(job), true_conditions(job)
    if "Succeeded" in true or "Complete" in true:
        return Phase.SUCCEEDED
    if kind.runs_on(job):
        return Phase.RUNNING
    if "Failed" in true or (earlier is Phase.FAILED and not kind.behavior.reports_phases):
        return Phase.FAILED
    if "Suspended" in true or wants_suspension(job):
        started = (job.get("status") or {}).get("startTime") or (
            earlier in _STARTED and not kind.behavior.reports_phases
        )
        return Phase.SUSPENDED if started else Phase.QUEUED
    if "Restarting" in true:
        return Phase.RESTARTING
    known = list(pods)
    if "Running" in true or kind.is_running(job, known):
        return Phase.RUNNING
    if not kind.behavior.reports_phases and (earlier in _RAN or kind.is_restarting(known)):
        return Phase.RESTARTING
    if known and all(map(node_of, known)):
        return Phase.STARTING
    return Phase.PENDING


_RAN = (Phase.RUNNING, Phase.RESTARTING)
_STARTED = (Phase.STARTING, *_RAN, Phase.SUSPENDED)
#: The condition that a job has in a phase, if it isn't the phase's name.
CONDITION_OF_PHASE = {Phase.QUEUED: "Suspended", Phase.PENDING: "Created", Phase.STARTING: "Created"}


def runs_on(job: Mapping[str, Any]) -> bool:
    """Whether the job still trains although it has the condition Failed: see `Kind.runs_on`."""
    return _kind_of(job).runs_on(job)


def shown_conditions(job: Mapping[str, Any], phase: Phase) -> set[str]:
    """The types of the job's true conditions, and of those that a kind without them would have in this phase."""
    shown = set(true_conditions(job))
    if _kind_of(job).behavior.reports_phases or phase is Phase.GONE:
        return shown
    return shown | {"Created", CONDITION_OF_PHASE.get(phase, str(phase))}


def _kind_of(job: Mapping[str, Any]) -> Kind:
    """The job's kind; any kind whose operator reports phases for a job that names none."""
    return KINDS.get(str(job.get("kind"))) or next(kind for kind in KINDS.values() if kind.behavior.reports_phases)


def wants_suspension(job: Mapping[str, Any]) -> bool:
    """Whether the job's spec requests suspension: in runPolicy, or in spec itself as in a batch Job."""
    spec = job.get("spec") or {}
    return bool((spec.get("runPolicy") or {}).get("suspend") or spec.get("suspend"))


def seen_in(job: Mapping[str, Any] | Absent, pods: Sequence[Mapping[str, Any]]) -> Seen:
    """What a read of the job and its pods shows, as the rules of `core/end_rules.py` know it.

    :param job: as it was read.
    """
    if isinstance(job, Absent):
        return Seen.GONE
    phase = phase_of(job, pods)
    if phase.ended:
        if phase is Phase.SUCCEEDED:
            return Seen.INCOMPLETE if incomplete_annotation(job) else Seen.SUCCEEDED
        return Seen.FAILED
    return Seen.RUNNING if find_ended_primary(_kind_of(job), job, pods) is None else Seen.PRIMARY_ENDED
