"""Derives from Kueue's Workload what the queue does with a job, in plain words.

Sources: recordings 70 to 74e (Kueue 0.18.5), and the messages in Kueue's sources where no recording has them:
pkg/scheduler/flavorassigner (quota), pkg/workload (evictions), apis/kueue/v1beta2 (reasons of conditions).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.text import counted

Workload = Mapping[str, Any]

PREEMPTED = "Preempted"
DEACTIVATED = "Deactivated"
#: why Kueue itself deactivates a Workload: the reason of its condition Evicted, and what it means
DEACTIVATIONS_BY_KUEUE = {
    "DeactivatedDueToRequeuingLimitExceeded": "Kueue gave up on the job: its pods were not ready in time too often",
    "DeactivatedDueToMaximumExecutionTimeExceeded": "Kueue ended the job: it exceeded its maximum execution time",
    "DeactivatedDueToAdmissionCheck": "Kueue gave up on the job: an admission check rejected it",
}
#: reasons of the condition Evicted; for other reasons Kueue's message is shown
EVICTIONS = {
    "AdmissionCheck": "an admission check failed",
    "ClusterQueueStopped": "the ClusterQueue is stopped",
    "LocalQueueStopped": "the LocalQueue is stopped",
    "NodeFailures": "a node failed",
    "PodsReadyTimeout": "its pods were not ready in time",
    DEACTIVATED: "its Workload was deactivated",
}
#: reasons of the condition Preempted
PREEMPTIONS = {
    "InClusterQueue": "a job with a higher priority in the ClusterQueue needs the quota",
    "InCohortFairSharing": "another ClusterQueue of the cohort gets its fair share",
    "InCohortReclaimWhileBorrowing": "another ClusterQueue of the cohort reclaims its quota",
    "InCohortReclamation": "another ClusterQueue of the cohort reclaims its quota",
}

_POD_SET = re.compile(r"couldn't assign flavors to pod set [^:\s]+: ")
_UNUSED = re.compile(
    r"insufficient unused quota for (?P<resource>\S+) in flavor (?P<flavor>[^\s,]+), (?P<more>\S+) more needed"
)
_ABOVE_MAXIMUM = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^\s,]+), "
    r"(?:previously considered podsets requests \((?P<before>[^)]*)\) \+ current podset request \((?P<request>[^)]*)\)"
    r" > maximum capacity \((?P<capacity>[^)]*)\)"
    r"|request > maximum capacity \((?P<old_request>\S+) > (?P<old_capacity>\S+)\))"
)
_PREEMPTING = re.compile(r"\.? ?Pending the preemption of (?P<count>\d+) workload\(s\)")
_EXCEEDS = "ExceedsMaxQuota"  # the reason of QuotaReserved in newer releases
_INACTIVE = re.compile(r"(?P<what>ClusterQueue|LocalQueue) (?P<name>\S+) is inactive")
_MISSING = re.compile(r"(?P<what>ClusterQueue|LocalQueue) (?P<name>\S*) ?doesn't exist")


_STOPPED = ("ClusterQueueStopped", "LocalQueueStopped")  # reasons of the condition Evicted


class QueuePhase(enum.StrEnum):
    """What the queue does with a job."""

    WAITING = "waiting"  #: for quota, or for Kueue to look at the job
    MISCONFIGURED = "misconfigured"  #: its queue is missing or stopped: waits until an administrator changes that
    NEVER_FITS = "never fits"  #: asks for more than the whole quota of every flavor, and was never admitted
    CHECKING = "checking"  #: has quota, and waits for admission checks
    ADMITTED = "admitted"
    EVICTING = "evicting"  #: lost its admission: its pods are being deleted, then it is queued again
    DEACTIVATED = "deactivated"  #: by somebody: waits until the Workload is active again
    GIVEN_UP = "given up"  #: deactivated by Kueue itself: it doesn't come back without help
    FINISHED = "finished"


#: phases in which no job comes to run. Quotas may be raised within a while; what Kueue gave up on doesn't change
FAILS_AFTER_SECONDS = {QueuePhase.NEVER_FITS: 600.0, QueuePhase.GIVEN_UP: 0.0}


@dataclass(frozen=True)
class Eviction:
    """The last time that a job lost its admission.

    :param reason: of Kueue's condition, for example Preempted.
    :param why: in plain words.
    :param at: when, RFC 3339. Reason and time together identify an eviction.
    """

    reason: str
    why: str
    at: str

    @property
    def preempted(self) -> bool:
        """Whether another job took the quota."""
        return self.reason == PREEMPTED


@dataclass(frozen=True)
class QueueStatus:
    """What the queue does with a job.

    :param phase: what it does.
    :param why: why the job isn't admitted, in plain words without a full stop; "" if there is nothing to say.
    :param queue: the LocalQueue that the job names.
    :param cluster_queue: the ClusterQueue that has admitted the job; "" if none has.
    :param flavors: of the admission, in alphabetical order.
    :param ever_admitted: whether the job was admitted at least once.
    :param evictions: how often it lost its admission, preemptions included, as counted by Kueue.
    :param preemptions: how often because another job took the quota.
    :param last_eviction: the last time that it lost its admission; None if it never did, or is admitted again.
    :param since: when the present state began, RFC 3339; "" if unknown.
    """

    phase: QueuePhase
    why: str = ""
    queue: str = ""
    cluster_queue: str = ""
    flavors: tuple[str, ...] = ()
    ever_admitted: bool = False
    evictions: int = 0
    preemptions: int = 0
    last_eviction: Eviction | None = None
    since: str = ""

    @property
    def line(self) -> str:
        """One sentence for the log."""
        text = _LINES[self.phase].format(queue=self.queue, why=self.why, admission=self._admission)
        return text[:1].upper() + text[1:]

    @property
    def fails_after_seconds(self) -> float | None:
        """How long the queue may stay in this phase before the task fails, retryable; None for as long as it takes."""
        return FAILS_AFTER_SECONDS.get(self.phase)

    @property
    def _admission(self) -> str:
        flavors = f" with flavor {', '.join(self.flavors)}" if self.flavors else ""
        return f"ClusterQueue {self.cluster_queue}{flavors}"


_LINES = {
    QueuePhase.WAITING: "Queued in LocalQueue {queue}: {why}.",
    QueuePhase.MISCONFIGURED: "Queued in LocalQueue {queue}: {why}. An administrator must correct this.",
    QueuePhase.NEVER_FITS: "Queued in LocalQueue {queue}: {why}.",
    QueuePhase.CHECKING: "Queued in LocalQueue {queue}: {why}.",
    QueuePhase.ADMITTED: "Admitted by {admission}.",
    QueuePhase.EVICTING: "The job lost its quota and will be queued again: {why}.",
    QueuePhase.DEACTIVATED: "The job is paused: {why}. It continues when the Workload is active again.",
    QueuePhase.GIVEN_UP: "{why}.",
    QueuePhase.FINISHED: "The queue has released the job's quota.",
}


def queue_status(workload: Workload) -> QueueStatus:
    """What the queue does with the job of a Workload.

    :param workload: as read from the API server.
    """
    conditions = _conditions(workload)
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    admission = status.get("admission") or {}
    evictions, preemptions = _eviction_counts(status)
    eviction = _last_eviction(conditions)
    admitted_once = "Admitted" in conditions or evictions > 0
    phase, why, since = _phase(workload, conditions, ever_admitted=admitted_once)
    return QueueStatus(
        phase=phase,
        why=why,
        queue=str(spec.get("queueName") or ""),
        cluster_queue=str(admission.get("clusterQueue") or ""),
        flavors=_flavors(admission),
        ever_admitted=admitted_once,
        evictions=max(evictions, int(eviction is not None)),
        preemptions=max(preemptions, int(eviction is not None and eviction.preempted)),
        last_eviction=eviction,
        since=since,
    )


def workload_of(workloads: Iterable[Workload], uid: str) -> Workload | None:
    """The Workload of a job: the newest that the job owns as its controller; None if there is none.

    :param workloads: of the job's namespace.
    :param uid: of the job.
    """
    owned = [w for w in workloads if any(_controls(owner, uid) for owner in w["metadata"].get("ownerReferences") or ())]
    return max(owned, key=lambda w: str(w["metadata"].get("creationTimestamp", "")), default=None)


def _controls(owner: Mapping[str, Any], uid: str) -> bool:
    return owner.get("uid") == uid and bool(owner.get("controller"))


def _conditions(workload: Workload) -> dict[str, Mapping[str, Any]]:
    found = (workload.get("status") or {}).get("conditions") or ()
    return {str(c["type"]): c for c in found if isinstance(c, Mapping) and c.get("type")}


def _is_true(conditions: Mapping[str, Mapping[str, Any]], type_: str) -> bool:
    return str(conditions.get(type_, {}).get("status")) == "True"


def _phase(
    workload: Workload, conditions: Mapping[str, Mapping[str, Any]], *, ever_admitted: bool
) -> tuple[QueuePhase, str, str]:
    """Phase, why, and since when."""
    evicted, quota = conditions.get("Evicted", {}), conditions.get("QuotaReserved", {})
    if _is_true(conditions, "Finished"):
        return QueuePhase.FINISHED, "", _since(conditions["Finished"])
    if (workload.get("spec") or {}).get("active") is False:
        return _deactivated(evicted)
    if _is_true(conditions, "Evicted") and _is_true(conditions, "QuotaReserved"):
        return QueuePhase.EVICTING, _eviction_why(conditions), _since(evicted)
    if _is_true(conditions, "Admitted"):
        return QueuePhase.ADMITTED, "", _since(conditions["Admitted"])
    if _is_true(conditions, "QuotaReserved"):
        return QueuePhase.CHECKING, _checks(workload), _since(quota)
    if not quota:
        created = str(workload["metadata"].get("creationTimestamp", ""))
        return QueuePhase.WAITING, "Kueue has not looked at the job yet", created
    if _is_true(conditions, "Evicted") and quota.get("message") == evicted.get("message"):
        stopped = evicted.get("reason") in _STOPPED
        phase = QueuePhase.MISCONFIGURED if stopped else QueuePhase.WAITING
        return phase, _eviction_why(conditions), _since(quota)
    return *_waiting(str(quota.get("reason") or ""), str(quota.get("message") or ""), ever_admitted), _since(quota)


def _since(condition: Mapping[str, Any]) -> str:
    return str(condition.get("lastTransitionTime") or "")


def _deactivated(evicted: Mapping[str, Any]) -> tuple[QueuePhase, str, str]:
    """Who made the Workload inactive: Kueue says so by the reason; everybody else just sets `active`."""
    reason = str(evicted.get("reason") or "") if str(evicted.get("status")) == "True" else ""
    if reason in DEACTIVATIONS_BY_KUEUE:
        return QueuePhase.GIVEN_UP, DEACTIVATIONS_BY_KUEUE[reason], _since(evicted)
    return QueuePhase.DEACTIVATED, "somebody set spec.active of its Workload to false", _since(evicted)


def _waiting(reason: str, message: str, ever_admitted: bool) -> tuple[QueuePhase, str]:
    """Why a Workload has no quota."""
    if found := _INACTIVE.search(message):
        why = f"{found['what']} {found['name']} is inactive: it is stopped, or not completely set up"
        return QueuePhase.MISCONFIGURED, why
    if found := _MISSING.search(message):
        named = f"{found['what']} {found['name']}" if found["name"] else f"its {found['what']}"
        return QueuePhase.MISCONFIGURED, f"{named} doesn't exist"
    above = list(_ABOVE_MAXIMUM.finditer(message))
    if _never_fits(reason, message, above) and not ever_admitted:
        return QueuePhase.NEVER_FITS, _above_maximum(above)
    needed = [f"{f['more']} {f['resource']} more in flavor {f['flavor']}" for f in _UNUSED.finditer(message)]
    if needed:
        preempting = _PREEMPTING.search(message)
        jobs = counted(int(preempting["count"]), "job") if preempting else ""
        return QueuePhase.WAITING, f"needs {' or '.join(needed)}" + (
            f"; {jobs} will be preempted for it" if jobs else ""
        )
    return QueuePhase.WAITING, message or reason or "it waits for quota"


def _never_fits(reason: str, message: str, above: list[re.Match[str]]) -> bool:
    """Whether no flavor that Kueue names can ever take the job. Any other word about a flavor means that it waits."""
    if _UNUSED.search(message):
        return False
    rest = _PREEMPTING.sub("", _ABOVE_MAXIMUM.sub("", _POD_SET.sub("", message)))
    return (bool(above) and not rest.strip(" ,;.")) or (reason == _EXCEEDS and not above)


def _above_maximum(above: list[re.Match[str]]) -> str:
    """How much is asked for, and how much there is at most."""
    limits = []
    for found in above:
        before = found["before"] or "0"
        request = found["request"] or found["old_request"]
        asked = request if before == "0" else f"{before} + {request}"
        capacity = found["capacity"] or found["old_capacity"]
        limits.append(f"{asked} {found['resource']} of at most {capacity} in flavor {found['flavor']}")
    details = f" ({'; '.join(limits)})" if limits else ""
    return f"asks for more than the whole quota{details}: it can never run here"


def _checks(workload: Workload) -> str:
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    open_checks = [str(check.get("name")) for check in checks if check.get("state") != "Ready"]
    named = f": {', '.join(open_checks)}" if open_checks else ""
    return f"has quota and waits for admission checks{named}"


def _flavors(admission: Mapping[str, Any]) -> tuple[str, ...]:
    assignments = admission.get("podSetAssignments") or ()
    return tuple(sorted({str(f) for assignment in assignments for f in (assignment.get("flavors") or {}).values()}))


def _eviction_counts(status: Mapping[str, Any]) -> tuple[int, int]:
    """Evictions and preemptions, as Kueue counts them (0.18; older releases don't)."""
    stats = (status.get("schedulingStats") or {}).get("evictions") or ()
    counts = [(str(of.get("reason")), int(of.get("count") or 0)) for of in stats]
    return sum(count for _, count in counts), sum(count for reason, count in counts if reason == PREEMPTED)


def _last_eviction(conditions: Mapping[str, Mapping[str, Any]]) -> Eviction | None:
    evicted = conditions.get("Evicted", {})
    if str(evicted.get("status")) != "True":
        return None  # the condition of a job that is admitted again has lost the reason
    return Eviction(str(evicted.get("reason") or ""), _eviction_why(conditions), _since(evicted))


def _eviction_why(conditions: Mapping[str, Mapping[str, Any]]) -> str:
    evicted = conditions["Evicted"]
    reason, message = str(evicted.get("reason") or ""), str(evicted.get("message") or "")
    if reason == PREEMPTED:
        cause = str(conditions.get("Preempted", {}).get("reason") or "")
        return f"preempted: {PREEMPTIONS.get(cause, 'another job needs the quota')}"
    return DEACTIVATIONS_BY_KUEUE.get(reason) or EVICTIONS.get(reason) or message or reason
