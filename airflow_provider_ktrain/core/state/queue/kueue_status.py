"""Derives from Kueue's Workload what the queue does with a job, in plain words.

Sources: recordings 70 to 85b (Kueue 0.18.5), and Kueue's code where no recording has it: pkg/workload (evictions),
apis/kueue (reasons of conditions). The reasons and messages about quota are explained in `kueue_messages`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_provider_ktrain.core.state.accelerators import Amounts
from airflow_provider_ktrain.core.state.pods.devices import requested_by_all
from airflow_provider_ktrain.core.state.pods.objects import condition_of, created, has_condition, metadata_of
from airflow_provider_ktrain.core.state.queue.kueue_messages import QueuePhase, blocking_queue, explain, is_bypassed
from airflow_provider_ktrain.core.text.output import with_short_first_line

Workload = Mapping[str, Any]

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
PREEMPTED = "Preempted"
_CHECKS = "AdmissionCheck"
_POD_TIMEOUTS = "RequeuingLimitExceeded"
DEACTIVATED = "Deactivated"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"  #: value of `managedBy` of a job that runs in another cluster
#: why Kueue itself deactivates a Workload: the end of the reason of its condition Evicted, and what it means
DEACTIVATIONS_BY_KUEUE = {
    _CHECKS: "Kueue gave up on the job: an admission check rejected it",
    "MaximumExecutionTimeExceeded": "Kueue ended the job: it exceeded its maximum execution time",
    _POD_TIMEOUTS: "Kueue gave up on the job: its pods were not ready in time too often",
}
#: DeactivatedDueToAdmissionCheck; in older releases InactiveWorkloadAdmissionCheck
_BY_KUEUE = re.compile(rf"(?:Deactivated|InactiveWorkload)(?:DueTo)?(?P<cause>{'|'.join(DEACTIVATIONS_BY_KUEUE)})")
#: a check and its message, in a message of Kueue
_CHECK = re.compile(r'AdmissionCheck in (?P<state>\w+) state: "(?P<name>[^"]+)"(?: \((?P<message>.*)\))?')
#: reasons of the condition Evicted; for other reasons Kueue's message is shown
EVICTIONS = {
    _CHECKS: "an admission check failed",
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
#: what of a pod decides which flavors suit it, beside its requests
_POD_SHAPE = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "overhead", "resourceClaims")


#: phases in which no job comes to run, unless the quota is raised or the Workload is activated within this time
FAILS_AFTER_SECONDS = {QueuePhase.NEVER_FITS: 600.0, QueuePhase.GIVEN_UP: 60.0}


@dataclass(frozen=True)
class Eviction:
    """The last time that a job lost its admission.

    :param reason: of Kueue's condition, for example Preempted.
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

    :param why: why the job isn't admitted, in plain words without a full stop; "" if there is nothing to say.
    :param admission: the ClusterQueue that has admitted the job, with flavors, and with pods if only some are admitted.
    :param evictions: how often it lost its admission, preemptions included, as counted by Kueue.
    :param last_eviction: the last time that it lost its admission; None if it never did, or is admitted again.
    :param message: Kueue's own text about a Workload that it deactivated; "" in other phases.
    :param place: the job's place in its ClusterQueue, from 1; None if it isn't known or has none.
    """

    phase: QueuePhase
    why: str = ""
    queue: str = ""
    admission: str = ""
    evictions: int = 0
    preemptions: int = 0
    last_eviction: Eviction | None = None
    message: str = ""
    place: int | None = None

    @property
    def pods_were_late(self) -> bool:
        """Whether Kueue gave up on the job because its pods were not ready in time."""
        return self.phase is QueuePhase.GIVEN_UP and self.why == DEACTIVATIONS_BY_KUEUE[_POD_TIMEOUTS]

    @property
    def reason(self) -> str:
        """Why the job isn't admitted, and its place in the queue."""
        return f"{self.why} (place {self.place} in the queue)" if self.why and self.place else self.why

    @property
    def line(self) -> str:
        """One sentence for the log."""
        text = _LINES[self.phase].format(queue=self.queue, why=self.reason, admission=self.admission)
        return with_short_first_line(text[:1].upper() + text[1:])


@dataclass(frozen=True)
class Queues:
    """The queues of a job, as read from the API server; {} if one doesn't exist, None if it isn't known."""

    local: Workload | None = None
    cluster: Workload | None = None


_LINES = {
    **dict.fromkeys(
        (QueuePhase.PENDING, QueuePhase.WAITING, QueuePhase.NEVER_FITS, QueuePhase.CHECKING),
        "Queued in LocalQueue {queue}: {why}.",
    ),
    QueuePhase.MISCONFIGURED: "Queued in LocalQueue {queue}: {why}. An administrator must correct this.",
    QueuePhase.ADMITTED: "Admitted by ClusterQueue {admission}.",
    QueuePhase.EVICTING: "The job lost its quota and will be queued again: {why}.",
    QueuePhase.DEACTIVATED: "The job is paused: {why}. It continues when the Workload is active again.",
    QueuePhase.GIVEN_UP: "{why}.",
    QueuePhase.FINISHED: "The queue has released the job's quota.",
}


def queue_status(workload: Workload, equals: Iterable[Workload] = (), queues: Queues | None = None) -> QueueStatus:
    """What the queue does with the job of a Workload.

    :param equals: Workloads with the same `equality_key`. Since 0.18, Kueue evaluates only one of equal jobs, and the
        others show no condition, or an old one, until something changes in the queue (83 to 84b). Default: none.
    :param queues: of the job: the message about a queue that isn't stopped any more may stay (84b). Default: unknown.
    """
    spec, status = workload.get("spec") or {}, workload.get("status") or {}
    evictions, preemptions = _eviction_counts(status)
    eviction = _last_eviction(workload)
    phase, why = _phase(workload, equals, queues or Queues())
    return QueueStatus(
        phase=phase,
        why=why,
        queue=str(spec.get("queueName") or ""),
        admission=_admission(spec, status.get("admission") or {}),
        evictions=max(evictions, int(eviction is not None)),
        preemptions=max(preemptions, int(eviction is not None and eviction.preempted)),
        last_eviction=eviction,
        message=_announced(workload)[1] if phase is QueuePhase.GIVEN_UP else "",
    )


def equality_key(workload: Workload) -> str:
    """The same text for Workloads that Kueue counts as equal: by LocalQueue, priority and pod sets.

    Kueue's own comparison is computeSchedulingHash in pkg/workload. A watch here has no tolerations and no affinity.
    """
    spec = workload.get("spec") or {}
    pod_sets = [
        {**{key: of.get(key) for key in ("name", "count", "minCount", "topologyRequest")},
         **{key: value for key, value in ((of.get("template") or {}).get("spec") or {}).items() if key in _POD_SHAPE},
         **{key: [c.get("resources") for c in ((of.get("template") or {}).get("spec") or {}).get(key) or ()]
            for key in ("initContainers", "containers")}}
        for of in spec.get("podSets") or ()
    ]  # fmt: skip
    text = json.dumps([spec.get("queueName"), spec.get("priority"), pod_sets], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def names_queue(workload: Workload) -> bool:
    """Whether the Workload says that one of its queues is missing or stopped."""
    return blocking_queue(str(condition_of(workload, "QuotaReserved").get("message") or "")) is not None


def verdict(workload: Workload) -> tuple[QueuePhase, str] | None:
    """The phase and its reason that Kueue has found for this Workload itself; None if it has not evaluated it yet."""
    quota, evicted = condition_of(workload, "QuotaReserved"), condition_of(workload, "Evicted")
    message = str(quota.get("message") or "")
    if str(quota.get("status")) != "False" or message == evicted.get("message") or has_condition(workload, "Finished"):
        return None
    if is_bypassed(message) or names_queue(workload):
        return None
    phase, why = explain(str(quota.get("reason") or ""), message)
    return None if phase is QueuePhase.PENDING else _if_never_admitted(workload, phase, why)


def _if_never_admitted(workload: Workload, phase: QueuePhase, why: str) -> tuple[QueuePhase, str]:
    """A Workload that was admitted once fits when the quota is as it was then."""
    if phase is QueuePhase.NEVER_FITS and _was_admitted(workload):
        return QueuePhase.WAITING, why.removesuffix(": it can never run here")
    return phase, why


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


def _phase(workload: Workload, equals: Iterable[Workload], queues: Queues) -> tuple[QueuePhase, str]:
    """Phase, and why."""
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
    if has_condition(workload, "Evicted") and quota.get("message") == evicted.get("message"):
        stopped = evicted.get("reason") in _STOPPED
        phase = QueuePhase.MISCONFIGURED if stopped else QueuePhase.WAITING
        at = ((workload.get("status") or {}).get("requeueState") or {}).get("requeueAt")
        waits = at and str(condition_of(workload, "Requeued").get("status")) == "False"
        return phase, _eviction_why(workload) + (". Kueue queues it again after a pause" if waits else "")
    # a paused Workload keeps the text of its last evaluation
    equals = [of for of in equals if (of.get("spec") or {}).get("active") is not False]
    found = verdict(workload) or _without_verdict(workload, quota, equals, queues)
    if found[0] is QueuePhase.NEVER_FITS and any(map(_may_fit, equals)):
        return QueuePhase.WAITING, "waits behind equal jobs"  # its own text, or that of an equal one, is old
    return found


def _may_fit(workload: Workload) -> bool:
    """Whether Kueue has found that a Workload fits the whole quota. Times don't show which of two texts is newer:
    lastTransitionTime stays while only the message changes (recording 83).
    """
    found = verdict(workload)
    unfinished = not has_condition(workload, "Finished")
    return unfinished and (has_condition(workload, "QuotaReserved") or bool(found and found[0] is QueuePhase.WAITING))


def _without_verdict(
    workload: Workload, quota: Mapping[str, Any], equals: Iterable[Workload], queues: Queues
) -> tuple[QueuePhase, str]:
    """Phase of a Workload that Kueue has not evaluated: its queue is missing or stopped, or an equal one was."""
    message = str(quota.get("message") or "")
    phase, why = explain(str(quota.get("reason") or ""), message)
    if (blocking := blocking_queue(message)) is not None:
        phase, why = _blocked(str((workload.get("spec") or {}).get("queueName")), blocking, why, queues)
    if phase is QueuePhase.MISCONFIGURED and not is_bypassed(message):
        return phase, why
    verdicts = [(str(condition_of(of, "QuotaReserved").get("lastTransitionTime")), verdict(of)) for of in equals]
    newest = max(((at, found) for at, found in verdicts if found is not None), default=None)
    if newest is not None:
        phase, why = newest[1]
    elif not is_bypassed(message):
        return phase, why
    phase, why = _if_never_admitted(workload, phase, why)
    return phase, f"waits behind equal jobs{': ' if why else ''}{why}"


def _blocked(queue: str, named: str, why: str, queues: Queues) -> tuple[QueuePhase, str]:
    """Phase of a Workload whose queue is missing or stopped, by its message and by what the queues say.

    :param queue: the job's LocalQueue.
    :param named: the queue in the message. It is empty while Kueue takes up a queue again (80t, 84b).
    """
    local, cluster = condition_of(queues.local or {}, "Active"), condition_of(queues.cluster or {}, "Active")
    if not local and not named:
        return QueuePhase.PENDING, "Kueue has not looked at the job yet"
    if local.get("reason") == "Stopped":
        return QueuePhase.MISCONFIGURED, f"LocalQueue {queue} is stopped"
    if "True" in (str(local.get("status")), str(cluster.get("status"))):
        # the message of a bypassed job stays until something changes in the queue (84b)
        return QueuePhase.PENDING, f"Kueue has not looked at the job since LocalQueue {queue} became active"
    if cluster:
        says = str(cluster.get("message") or "").rpartition("Can't admit new workloads: ")[2].rstrip(".")
        says = says if says.startswith("is ") else f"is inactive: {says or cluster.get('reason')}"
        return QueuePhase.MISCONFIGURED, f"ClusterQueue {metadata_of(queues.cluster or {}).get('name')} {says}"
    unknown = "is inactive" in why and queues.cluster is None
    why = why if named else f"the ClusterQueue of LocalQueue {queue} doesn't exist"
    return QueuePhase.MISCONFIGURED, why + (": it is stopped, or not completely set up" if unknown else "")


def _was_admitted(workload: Workload) -> bool:
    """Whether the job is or was admitted. An admission check may evict a job that has only quota (82, 85)."""
    if _has_run(workload):
        return True
    stats = ((workload.get("status") or {}).get("schedulingStats") or {}).get("evictions")
    if stats:
        return _eviction_counts(workload["status"])[0] > 0
    evicted = condition_of(workload, "Evicted")
    return bool(evicted) and not _by_check(evicted)


def _has_run(workload: Workload) -> bool:
    """Whether the job is admitted, or has run in an earlier admission."""
    past = (workload.get("status") or {}).get("accumulatedPastExecutionTimeSeconds")
    return has_condition(workload, "Admitted") or past is not None


def _by_check(evicted: Mapping[str, Any]) -> bool:
    return str(evicted.get("reason")).endswith("AdmissionCheck") or bool(_CHECK.search(str(evicted.get("message"))))


def _deactivated(workload: Workload) -> tuple[QueuePhase, str]:
    """Who made the Workload inactive: Kueue announces and explains it by conditions; everybody else sets `active`."""
    cause, message = _announced(workload)
    if cause in DEACTIVATIONS_BY_KUEUE:
        return QueuePhase.GIVEN_UP, _why_given_up(cause, message)
    return QueuePhase.DEACTIVATED, "somebody set spec.active of its Workload to false"


def _announced(workload: Workload) -> tuple[str, str]:
    """Why Kueue deactivates the Workload, and its message; the reason is "" if it doesn't."""
    evicted, target = condition_of(workload, "Evicted"), condition_of(workload, "DeactivationTarget")
    found = _BY_KUEUE.fullmatch(str(evicted.get("reason"))) if has_condition(workload, "Evicted") else None
    if found:
        return found["cause"], str(evicted.get("message") or "")
    if has_condition(workload, "DeactivationTarget"):  # until Kueue has evicted the job; Evicted may be an older one
        return str(target.get("reason")), str(target.get("message") or "")
    return "", ""


def _why_given_up(cause: str, message: str) -> str:
    """Why Kueue gave up on the job; of an admission check which one rejected it, and its reason."""
    check = _CHECK.search(message) if cause == _CHECKS else None
    if check is None:
        return DEACTIVATIONS_BY_KUEUE[cause]
    return f"Kueue gave up on the job: admission check {check['name']} rejected it{_said(check)}"


def _said(check: re.Match[str]) -> str:
    return f": {check['message']}" if check["message"] else ""


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
    if not has_condition(workload, "Evicted") or (_by_check(evicted) and not _has_run(workload)):
        return None  # the condition of a job that is admitted again has lost the reason
    at = str(evicted.get("lastTransitionTime") or "")
    return Eviction(str(evicted.get("reason") or ""), _eviction_why(workload), at)


def _eviction_why(workload: Workload) -> str:
    evicted = condition_of(workload, "Evicted")
    reason, message = str(evicted.get("reason") or ""), str(evicted.get("message") or "")
    if reason == PREEMPTED:
        cause = condition_of(workload, "Preempted").get("reason")
        return f"preempted: {PREEMPTIONS.get(str(cause), 'another job needs the quota')}"
    if by_kueue := _BY_KUEUE.fullmatch(reason):
        return _why_given_up(by_kueue["cause"], message)
    if check := _CHECK.search(message):
        return f"admission check {check['name']} asks to try again later{_said(check)}"
    return EVICTIONS.get(reason) or message or reason
