"""Derives from Kueue's Workload what the queue does with a job, in plain words.

Sources: recordings 70 to 74e (Kueue 0.18.5), and Kueue's code where no recording has it: pkg/workload (evictions),
apis/kueue (reasons of conditions). The messages about quota are explained in `kueue_messages`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.objects import condition_of, created, has_condition
from airflow_provider_ktrain.core.state.gpus import pod_gpus
from airflow_provider_ktrain.core.state.kueue_messages import QueuePhase, explain
from airflow_provider_ktrain.core.text import with_short_first_line

Workload = Mapping[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
PREEMPTED = "Preempted"
DEACTIVATED = "Deactivated"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"  #: value of `managedBy` of a job that runs in another cluster
#: why Kueue itself deactivates a Workload: the end of the reason of its condition Evicted, and what it means
DEACTIVATIONS_BY_KUEUE = {
    "AdmissionCheck": "Kueue gave up on the job: an admission check rejected it",
    "MaximumExecutionTimeExceeded": "Kueue ended the job: it exceeded its maximum execution time",
    "RequeuingLimitExceeded": "Kueue gave up on the job: its pods were not ready in time too often",
}
#: DeactivatedDueToAdmissionCheck; in older releases InactiveWorkloadAdmissionCheck
_BY_KUEUE = re.compile(rf"(?:Deactivated|InactiveWorkload)(?:DueTo)?(?P<cause>{'|'.join(DEACTIVATIONS_BY_KUEUE)})")
#: reasons of the condition Evicted; for other reasons Kueue's message is shown
EVICTIONS = {
    "AdmissionCheck": "an admission check failed",
    "ClusterQueueStopped": "the ClusterQueue is stopped",
    "LocalQueueStopped": "the LocalQueue is stopped",
    "NodeFailures": "a node failed",
    "PodsReadyTimeout": "its pods were not ready in time",
    DEACTIVATED: "its Workload was deactivated",
    "InactiveWorkload": "its Workload was deactivated",
}
#: reasons of the condition Preempted
PREEMPTIONS = {
    "InClusterQueue": "a job with a higher priority in the ClusterQueue needs the quota",
    "InCohort": "another ClusterQueue of the cohort needs the quota",
    "InCohortFairSharing": "another ClusterQueue of the cohort gets its fair share",
    "InCohortReclaimWhileBorrowing": "another ClusterQueue of the cohort reclaims its quota",
    "InCohortReclamation": "another ClusterQueue of the cohort reclaims its quota",
}

_STOPPED = ("ClusterQueueStopped", "LocalQueueStopped")  # reasons of the condition Evicted


#: phases in which no job comes to run, unless the quota is raised or the Workload is activated within this time
FAILS_AFTER_SECONDS = {QueuePhase.NEVER_FITS: 600.0, QueuePhase.GIVEN_UP: 60.0}


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
    :param admission: the ClusterQueue that has admitted the job, with flavors, and with pods if only some are admitted.
    :param evictions: how often it lost its admission, preemptions included, as counted by Kueue.
    :param preemptions: how often because another job took the quota.
    :param last_eviction: the last time that it lost its admission; None if it never did, or is admitted again.
    :param message: Kueue's own text about a Workload that it deactivated; "" in other phases.
    """

    phase: QueuePhase
    why: str = ""
    queue: str = ""
    admission: str = ""
    evictions: int = 0
    preemptions: int = 0
    last_eviction: Eviction | None = None
    message: str = ""

    @property
    def line(self) -> str:
        """One sentence for the log."""
        text = _LINES[self.phase].format(queue=self.queue, why=self.why, admission=self.admission)
        return with_short_first_line(text[:1].upper() + text[1:])


_LINES = {
    QueuePhase.WAITING: "Queued in LocalQueue {queue}: {why}.",
    QueuePhase.MISCONFIGURED: "Queued in LocalQueue {queue}: {why}. An administrator must correct this.",
    QueuePhase.NEVER_FITS: "Queued in LocalQueue {queue}: {why}.",
    QueuePhase.CHECKING: "Queued in LocalQueue {queue}: {why}.",
    QueuePhase.ADMITTED: "Admitted by ClusterQueue {admission}.",
    QueuePhase.EVICTING: "The job lost its quota and will be queued again: {why}.",
    QueuePhase.DEACTIVATED: "The job is paused: {why}. It continues when the Workload is active again.",
    QueuePhase.GIVEN_UP: "{why}.",
    QueuePhase.FINISHED: "The queue has released the job's quota.",
}


def queue_status(workload: Workload) -> QueueStatus:
    """What the queue does with the job of a Workload.

    :param workload: as read from the API server.
    """
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    evictions, preemptions = _eviction_counts(status)
    eviction = _last_eviction(workload)
    admitted_once = evictions > 0 or _was_admitted(workload)
    phase, why = _phase(workload, ever_admitted=admitted_once)
    return QueueStatus(
        phase=phase,
        why=why,
        queue=str(spec.get("queueName") or ""),
        admission=_admission(spec, status.get("admission") or {}),
        evictions=max(evictions, int(eviction is not None)),
        preemptions=max(preemptions, int(eviction is not None and eviction.preempted)),
        last_eviction=eviction,
        message=str(condition_of(workload, "Evicted").get("message") or "") if phase is QueuePhase.GIVEN_UP else "",
    )


def workload_of(workloads: Iterable[Workload], uid: str) -> Workload | None:
    """The Workload of a job: the newest that the job owns as its controller; None if there is none.

    A Workload that has not finished comes first: Kueue replaces the Workload of an elastic job that grows.

    :param workloads: of the job's namespace.
    :param uid: of the job.
    """

    def is_owned(workload: Workload) -> bool:
        owners = workload["metadata"].get("ownerReferences") or ()
        return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)

    def age(workload: Workload) -> tuple[bool, str]:
        return not has_condition(workload, "Finished"), created(workload)

    return max(filter(is_owned, workloads), key=age, default=None)


def requested_gpus(workload: Workload) -> int:
    """The GPUs that a Workload requests, as Kueue counts them: also those of the runtime of a TrainJob."""
    pod_sets = (workload.get("spec") or {}).get("podSets") or ()
    return sum(int(of.get("count") or 0) * pod_gpus((of.get("template") or {}).get("spec") or {}) for of in pod_sets)


def runs_elsewhere(job: Mapping[str, Any]) -> bool:
    """Whether MultiKueue runs the job in another cluster, by `managedBy` of its spec or its runPolicy."""
    spec = job.get("spec") or {}
    return MULTIKUEUE in (spec.get("managedBy"), (spec.get("runPolicy") or {}).get("managedBy"))


def _phase(workload: Workload, *, ever_admitted: bool) -> tuple[QueuePhase, str]:
    """Phase, and why. A Workload that was admitted once fits when the quota is as it was then."""
    evicted, quota = condition_of(workload, "Evicted"), condition_of(workload, "QuotaReserved")
    if has_condition(workload, "Finished"):
        return QueuePhase.FINISHED, ""
    if (workload.get("spec") or {}).get("active") is False:
        return _deactivated(workload)
    if has_condition(workload, "Evicted") and has_condition(workload, "QuotaReserved"):
        return QueuePhase.EVICTING, _eviction_why(workload)
    if has_condition(workload, "Admitted"):
        return QueuePhase.ADMITTED, ""
    if has_condition(workload, "QuotaReserved"):
        return QueuePhase.CHECKING, _checks(workload)
    if not quota:
        return QueuePhase.WAITING, "Kueue has not looked at the job yet"
    if has_condition(workload, "Evicted") and quota.get("message") == evicted.get("message"):
        stopped = evicted.get("reason") in _STOPPED
        phase = QueuePhase.MISCONFIGURED if stopped else QueuePhase.WAITING
        at = ((workload.get("status") or {}).get("requeueState") or {}).get("requeueAt")
        waits = at and str(condition_of(workload, "Requeued").get("status")) == "False"
        return phase, _eviction_why(workload) + (". Kueue queues it again after a pause" if waits else "")
    phase, why = explain(str(quota.get("reason") or ""), str(quota.get("message") or ""))
    if phase is QueuePhase.NEVER_FITS and ever_admitted:
        return QueuePhase.WAITING, why.removesuffix(": it can never run here")
    return phase, why


def _was_admitted(workload: Workload) -> bool:
    """Whether the job is or was admitted. Newer releases show Admitted False, NoReservation from the beginning."""
    if condition_of(workload, "Evicted") or (workload.get("status") or {}).get("accumulatedPastExecutionTimeSeconds"):
        return True
    admitted = condition_of(workload, "Admitted")
    return has_condition(workload, "Admitted") or admitted.get("reason") not in (None, "NoReservation")


def _deactivated(workload: Workload) -> tuple[QueuePhase, str]:
    """Who made the Workload inactive: Kueue announces and explains it by conditions; everybody else sets `active`."""
    reason = condition_of(workload, "Evicted").get("reason") if has_condition(workload, "Evicted") else ""
    found = _BY_KUEUE.fullmatch(str(reason))
    cause = found["cause"] if found else ""
    if not cause and has_condition(workload, "DeactivationTarget"):  # until Kueue has evicted the job
        cause = str(condition_of(workload, "DeactivationTarget").get("reason"))
    if cause in DEACTIVATIONS_BY_KUEUE:
        return QueuePhase.GIVEN_UP, DEACTIVATIONS_BY_KUEUE[cause]
    return QueuePhase.DEACTIVATED, "somebody set spec.active of its Workload to false"


def _checks(workload: Workload) -> str:
    """That the job waits for admission checks: for which, with their messages."""
    waits_for = []
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        if check.get("state") != "Ready":
            message = str(check.get("message") or "").strip().rstrip(".")
            waits_for.append(f"{check.get('name')} ({message})" if message else str(check.get("name")))
    return f"has quota and waits for admission checks{': ' if waits_for else ''}{', '.join(waits_for)}"


def _admission(spec: Mapping[str, Any], admission: Mapping[str, Any]) -> str:
    assignments = admission.get("podSetAssignments") or ()
    flavors = ", ".join(sorted({str(flavor) for of in assignments for flavor in (of.get("flavors") or {}).values()}))
    wanted = sum(int(pod_set.get("count") or 0) for pod_set in spec.get("podSets") or ())
    admitted = sum(int(of.get("count") or 0) for of in assignments)
    some = f" for {admitted} of {wanted} pods" if 0 < admitted < wanted else ""
    return f"{admission.get('clusterQueue') or ''}{' with flavor ' if flavors else ''}{flavors}{some}"


def _eviction_counts(status: Mapping[str, Any]) -> tuple[int, int]:
    """Evictions and preemptions, as Kueue counts them (0.18; older releases don't)."""
    stats = (status.get("schedulingStats") or {}).get("evictions") or ()
    counts = [(str(of.get("reason")), int(of.get("count") or 0)) for of in stats]
    return sum(count for _, count in counts), sum(count for reason, count in counts if reason == PREEMPTED)


def _last_eviction(workload: Workload) -> Eviction | None:
    if not has_condition(workload, "Evicted"):
        return None  # the condition of a job that is admitted again has lost the reason
    evicted = condition_of(workload, "Evicted")
    at = str(evicted.get("lastTransitionTime") or "")
    return Eviction(str(evicted.get("reason") or ""), _eviction_why(workload), at)


def _eviction_why(workload: Workload) -> str:
    evicted = condition_of(workload, "Evicted")
    reason, message = str(evicted.get("reason") or ""), str(evicted.get("message") or "")
    if reason == PREEMPTED:
        cause = condition_of(workload, "Preempted").get("reason")
        return f"preempted: {PREEMPTIONS.get(str(cause), 'another job needs the quota')}"
    if by_kueue := _BY_KUEUE.fullmatch(reason):
        return DEACTIVATIONS_BY_KUEUE[by_kueue["cause"]]
    return EVICTIONS.get(reason) or message or reason
