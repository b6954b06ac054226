"""Reads from Kueue's Workload what the queue does with a job. Kueue's reasons and messages are passed on word for word.

Sources: recordings 70 to 85b (Kueue 0.18.5), and Kueue's code where no recording has it: pkg/workload (evictions),
apis/kueue (reasons of conditions).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.state.accelerators import Amounts
from airflow_provider_ktrain.core.state.pods.devices import requested_by_all
from airflow_provider_ktrain.core.state.pods.objects import condition_of, created, has_condition
from airflow_provider_ktrain.core.text.output import with_short_first_line

Workload = Mapping[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
PREEMPTED = "Preempted"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"  #: Value of `managedBy` of a job that runs in another cluster.
_CHECKS = "AdmissionCheck"
_POD_TIMEOUTS = "RequeuingLimitExceeded"
#: Why Kueue itself deactivates a Workload: the reason of DeactivationTarget, and the end of that of Evicted:
#: DeactivatedDueToAdmissionCheck; in older releases InactiveWorkloadAdmissionCheck.
_DEACTIVATIONS = (_CHECKS, "MaximumExecutionTimeExceeded", _POD_TIMEOUTS)
_BY_KUEUE = re.compile(rf"(?:Deactivated|InactiveWorkload)(?:DueTo)?(?:{'|'.join(_DEACTIVATIONS)})")
_EXCEEDS_QUOTA = "ExceedsMaxQuota"  #: Reason of QuotaReserved; since 0.20, and in 0.18 with a feature gate.


class QueuePhase(enum.StrEnum):
    """What the queue does with a job."""

    QUEUED = "queued"
    NEVER_FITS = "never fits"  #: Requests more than the whole quota by Kueue's reason, and was never admitted.
    CHECKING = "checking"  #: The job has quota, and waits for admission checks.
    ADMITTED = "admitted"
    EVICTED = "evicted"  #: Lost its admission: its pods are being deleted, then it is queued again.
    PAUSED = "paused"  #: Somebody has paused the job: it waits until the Workload is active again.
    GIVEN_UP = "given up"  #: Deactivated by Kueue itself: it doesn't come back without help.
    FINISHED = "finished"


#: Phases in which no job comes to run, unless the quota is raised or the Workload is activated within this time.
FAILS_AFTER_SECONDS = {QueuePhase.NEVER_FITS: 600.0, QueuePhase.GIVEN_UP: 60.0}


@dataclass(frozen=True)
class Eviction:
    """The last time that a job lost its admission.

    :param reason: of Kueue's condition, for example Preempted.
    :param why: the reason and Kueue's message.
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

    :param why: why the job isn't admitted, with Kueue's reason and message; "" if it gives none.
    :param admission: the ClusterQueue that has admitted the job, with flavors, and with pods if only some are admitted.
    :param evictions: how often it lost its admission, preemptions included, as counted by Kueue.
    :param last_eviction: the last time that it lost its admission; None if it never did, or is admitted again.
    :param pods_were_late: whether Kueue gave up on the job because its pods were not ready in time.
    :param place: the job's place in its ClusterQueue, from 1; None if it isn't known or has none.
    """

    phase: QueuePhase
    why: str = ""
    queue: str = ""
    admission: str = ""
    evictions: int = 0
    preemptions: int = 0
    last_eviction: Eviction | None = None
    pods_were_late: bool = False
    place: int | None = None

    @property
    def reason(self) -> str:
        """Why the job isn't admitted, and its place in the queue."""
        return " ".join(filter(None, (self.why, f"(place {self.place} in the queue)" if self.place else "")))

    @property
    def line(self) -> str:
        """One sentence for the log."""
        line = _LINES[self.phase].format(queue=self.queue, why=self.reason, admission=self.admission)
        return with_short_first_line(line.removesuffix(": "))


_LINES = {
    **dict.fromkeys(
        (QueuePhase.QUEUED, QueuePhase.NEVER_FITS, QueuePhase.CHECKING), "Queued in LocalQueue {queue}: {why}"
    ),
    QueuePhase.ADMITTED: "Admitted by ClusterQueue {admission}.",
    QueuePhase.EVICTED: "The job lost its quota and will be queued again: {why}",
    QueuePhase.PAUSED: "The job is paused: {why}. It continues when the Workload is active again.",
    QueuePhase.GIVEN_UP: "{why}",
    QueuePhase.FINISHED: "The queue has released the job's quota.",
}


def queue_status(workload: Workload) -> QueueStatus:
    """What the queue does with the job of a Workload."""
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    evictions, preemptions = _eviction_counts(status)
    eviction = _last_eviction(workload)
    phase, why = _phase(workload)
    return QueueStatus(
        phase=phase,
        why=why,
        queue=str(spec.get("queueName") or ""),
        admission=_admission(spec, status.get("admission") or {}),
        evictions=max(evictions, int(eviction is not None)),
        preemptions=max(preemptions, int(eviction is not None and eviction.preempted)),
        last_eviction=eviction,
        pods_were_late=phase is QueuePhase.GIVEN_UP
        and str(_deactivation(workload).get("reason")).endswith(_POD_TIMEOUTS),
    )


def workload_of(workloads: Iterable[Workload], uid: str) -> Workload | None:
    """The Workload of a job: the newest that the job owns as its controller; None if there is none.

    A Workload that has not finished comes first: Kueue replaces the Workload of an elastic job that grows.
    """

    def is_owned(workload: Workload) -> bool:
        owners = workload["metadata"].get("ownerReferences") or ()
        return any(owner.get("uid") == uid and owner.get("controller") for owner in owners)

    def age(workload: Workload) -> tuple[bool, str]:
        return not has_condition(workload, "Finished"), created(workload)

    return max(filter(is_owned, workloads), key=age, default=None)


def requested_accelerators(workload: Workload) -> Amounts:
    """The accelerators that a Workload requests, as Kueue counts them: also those of the runtime of a TrainJob."""
    pod_sets = (workload.get("spec") or {}).get("podSets") or ()
    return requested_by_all(
        (int(of.get("count") or 0), (of.get("template") or {}).get("spec") or {}) for of in pod_sets
    )


def runs_elsewhere(job: Mapping[str, Any]) -> bool:
    """Whether MultiKueue runs the job in another cluster, by `managedBy` of its spec or its runPolicy."""
    spec = job.get("spec") or {}
    return MULTIKUEUE in (spec.get("managedBy"), (spec.get("runPolicy") or {}).get("managedBy"))


def _phase(workload: Workload) -> tuple[QueuePhase, str]:
    """Phase, and why."""
    if has_condition(workload, "Finished"):
        return QueuePhase.FINISHED, ""
    if (workload.get("spec") or {}).get("active") is False:
        if by_kueue := _deactivation(workload):
            return QueuePhase.GIVEN_UP, f"Kueue gave up on the job: {_said(by_kueue)}"
        return QueuePhase.PAUSED, "somebody set spec.active of its Workload to false"
    if has_condition(workload, "Evicted") and has_condition(workload, "QuotaReserved"):
        return QueuePhase.EVICTED, _said(condition_of(workload, "Evicted"))
    if has_condition(workload, "Admitted"):
        return QueuePhase.ADMITTED, ""
    if has_condition(workload, "QuotaReserved"):
        return QueuePhase.CHECKING, _checks(workload)
    quota = condition_of(workload, "QuotaReserved")
    never = quota.get("reason") == _EXCEEDS_QUOTA and not _was_admitted(workload)
    return QueuePhase.NEVER_FITS if never else QueuePhase.QUEUED, _said(quota)


def _said(condition: Mapping[str, Any], title: str = "reason") -> str:
    """Kueue's reason and message, word for word."""
    return ": ".join(str(condition[key]) for key in (title, "message") if condition.get(key))


def _was_admitted(workload: Workload) -> bool:
    """Whether the job may have been admitted before: it fits when the quota is as it was then."""
    status = workload.get("status") or {}
    return bool(_has_run(workload) or condition_of(workload, "Evicted") or status.get("schedulingStats"))


def _has_run(workload: Workload) -> bool:
    """Whether the job is admitted, or has run in an earlier admission."""
    past = (workload.get("status") or {}).get("accumulatedPastExecutionTimeSeconds")
    return has_condition(workload, "Admitted") or past is not None


def _deactivation(workload: Workload) -> Mapping[str, Any]:
    """The condition in which Kueue says why it deactivates the Workload; {} if it doesn't: somebody set `active`."""
    evicted, target = condition_of(workload, "Evicted"), condition_of(workload, "DeactivationTarget")
    if has_condition(workload, "Evicted") and _BY_KUEUE.fullmatch(str(evicted.get("reason"))):
        return evicted
    # until Kueue has evicted the job; Evicted may be an older one
    return target if has_condition(workload, "DeactivationTarget") and target.get("reason") in _DEACTIVATIONS else {}


def _checks(workload: Workload) -> str:
    """That the job waits for admission checks: for which, with their messages."""
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    waits_for = [_said(check, "name") for check in checks if check.get("state") != "Ready"]
    return f"has quota and waits for admission checks{': ' if waits_for else ''}{', '.join(waits_for)}"


def _admission(spec: Mapping[str, Any], admission: Mapping[str, Any]) -> str:
    assignments = admission.get("podSetAssignments") or ()
    flavors = ", ".join(sorted({str(flavor) for of in assignments for flavor in (of.get("flavors") or {}).values()}))
    wanted = sum(int(pod_set.get("count") or 0) for pod_set in spec.get("podSets") or ())
    admitted = sum(int(of.get("count") or 0) for of in assignments)
    some = f" for {admitted} of {wanted} pods" if 0 < admitted < wanted else ""
    return f"{admission.get('clusterQueue') or ''}{' with flavor ' if flavors else ''}{flavors}{some}"


def _eviction_counts(status: Mapping[str, Any]) -> tuple[int, int]:
    """Evictions and preemptions, as Kueue counts them (0.18; older releases don't), without those by a check.

    A check usually evicts a job that was not admitted yet. The follower counts one that was when it sees it.
    """
    stats = (status.get("schedulingStats") or {}).get("evictions") or ()
    counts = [
        (str(of.get("reason")), int(of.get("count") or 0))
        for of in stats
        if _CHECKS not in (of.get("reason"), of.get("underlyingCause"))
    ]
    return sum(count for _, count in counts), sum(count for reason, count in counts if reason == PREEMPTED)


def _last_eviction(workload: Workload) -> Eviction | None:
    evicted = condition_of(workload, "Evicted")
    reason = str(evicted.get("reason") or "")
    if not has_condition(workload, "Evicted") or (reason.endswith(_CHECKS) and not _has_run(workload)):
        return None  # the condition of a job that is admitted again has lost the reason
    return Eviction(reason, _said(evicted), str(evicted.get("lastTransitionTime") or ""))
