"""How a queue handles a job: recorded Workloads, and messages of Kueue that no recording contains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.state.queue.kueue_messages import QueuePhase
from airflow_provider_ktrain.core.state.queue.kueue_status import (
    FAILS_AFTER_SECONDS,
    Eviction,
    Queues,
    QueueStatus,
    equality_key,
    queue_status,
    runs_elsewhere,
    workload_of,
)
from tests.kueue.recording import changes_in

RECORDINGS = Path(__file__).parents[1] / "kueue/recordings"
PREFIX = "couldn't assign flavors to pod set worker: "
UNUSED = "insufficient unused quota for nvidia.com/gpu in flavor {}, 4 more needed"
BYPASSED = "Bypassed scheduling evaluation because an equivalent workload recently failed"
ABOVE = (
    "insufficient quota for nvidia.com/gpu in flavor {}, previously considered podsets requests (0) + "
    "current podset request (24) > maximum capacity (16)"
)


def workload(*conditions: dict[str, str], **rest: Any) -> dict[str, Any]:
    spec = {"queueName": "team-a", "active": rest.pop("active", True)}
    status = {"conditions": [{"lastTransitionTime": "2026-11-22T02:00:00Z", **c} for c in conditions], **rest}
    return {"metadata": {"name": "w", "creationTimestamp": "2026-11-22T01:00:00Z"}, "spec": spec, "status": status}


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def pending(message: str, reason: str = "Pending") -> dict[str, str]:
    return condition("QuotaReserved", "False", reason, message)


def recorded(name: str, job: str) -> list[QueueStatus]:
    """The states of a recorded job's Workload, without repetitions, with what all Workloads and queues showed then."""
    found: list[QueueStatus] = []
    known: dict[str, dict[str, dict[str, Any]]] = {"workloads": {}, "localqueues": {}, "clusterqueues": {}}
    for change in changes_in(RECORDINGS / name / "events.jsonl"):
        obj = change["object"]
        objects = known.setdefault(change["watch"], {})
        objects[obj["metadata"]["name"]] = obj
        ours = next((w for n, w in known["workloads"].items() if n.partition("-")[2].rpartition("-")[0] == job), None)
        if ours is not None:
            equals = [w for w in known["workloads"].values() if equality_key(w) == equality_key(ours)]
            local = known["localqueues"].get(ours["spec"]["queueName"])
            cluster = known["clusterqueues"].get(local["spec"]["clusterQueue"]) if local else None
            status = queue_status(ours, equals, Queues(local, cluster))
            if not found or status.line != found[-1].line:
                found.append(status)
        if change["type"] == "DELETED":
            del objects[obj["metadata"]["name"]]
    return found


LINES = {
    ("70-kueue-pytorchjob", "second"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q70.",
        "Admitted by ClusterQueue q70 with flavor q70.",
        "The queue has released the job's quota.",
    ],
    ("70b-kueue-hold", "train"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: ClusterQueue q70b is inactive: it is stopped, or not completely set up. "
        "An administrator must correct this.",
        "Queued in LocalQueue queue: ClusterQueue q70b is stopped. An administrator must correct this.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Admitted by ClusterQueue q70b with flavor q70b.",
        "The job lost its quota and will be queued again: the ClusterQueue is stopped.",
        "Queued in LocalQueue queue: the ClusterQueue is stopped. An administrator must correct this.",
        "Queued in LocalQueue queue: ClusterQueue q70b is stopped. An administrator must correct this.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Admitted by ClusterQueue q70b with flavor q70b.",
        "The queue has released the job's quota.",
    ],
    ("70c-kueue-queue-missing", "lost"): [
        "Queued in LocalQueue lost: Kueue has not looked at the job yet.",
        "Queued in LocalQueue lost: ClusterQueue nosuch-70c doesn't exist. An administrator must correct this.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Admitted by ClusterQueue q70c with flavor q70c.",
        "The queue has released the job's quota.",
    ],
    ("72b-kueue-trainjob-preemption", "low"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Admitted by ClusterQueue q72b with flavor q72b.",
        "The job lost its quota and will be queued again: preempted: a job with a higher priority in the ClusterQueue "
        "needs the quota.",
        "Queued in LocalQueue queue: preempted: a job with a higher priority in the ClusterQueue needs the quota.",
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q72b.",
        "The queue has released the job's quota.",
    ],
    ("72b-kueue-trainjob-preemption", "high"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q72b; 1 job will be preempted for it.",
        "Admitted by ClusterQueue q72b with flavor q72b.",
        "The queue has released the job's quota.",
    ],
    ("74c-kueue-workload-inactive", "train"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Admitted by ClusterQueue q74c with flavor q74c.",
        "The job is paused: somebody set spec.active of its Workload to false. "
        "It continues when the Workload is active again.",
        "Queued in LocalQueue queue: its Workload was deactivated.",
        "Admitted by ClusterQueue q74c with flavor q74c.",
        "The queue has released the job's quota.",
    ],
    ("76-kueue-granular-no-matching-flavor-pytorchjob", "train"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: no flavor of its ClusterQueue suits it: untolerated taint {gpu a100 NoSchedule "
        "<nil>} in flavor q76. An administrator must correct this.",
        "Admitted by ClusterQueue q76 with flavor q76.",
        "The queue has released the job's quota.",
    ],
    ("77-kueue-granular-misconfigured-pytorchjob", "train"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: ClusterQueue q77 is inactive: it is stopped, or not completely set up. "
        "An administrator must correct this.",
        "Queued in LocalQueue queue: ClusterQueue q77 is inactive: references missing ResourceFlavor(s): q77. "
        "An administrator must correct this.",
        "Admitted by ClusterQueue q77 with flavor q77.",
        "The queue has released the job's quota.",
    ],
    ("77-kueue-granular-misconfigured-pytorchjob", "missing"): [
        "Queued in LocalQueue nowhere: Kueue has not looked at the job yet.",
        "Queued in LocalQueue nowhere: LocalQueue nowhere doesn't exist. An administrator must correct this.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Admitted by ClusterQueue q77 with flavor q77.",
        "The queue has released the job's quota.",
    ],
    ("80t-kueue-granular-hold-trainjob", "later"): [  # for 0.3 s its message is `ClusterQueue  doesn't exist`
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: LocalQueue queue is stopped. An administrator must correct this.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q80t.",
        "Admitted by ClusterQueue q80t with flavor q80t.",
        "The queue has released the job's quota.",
    ],
    ("82-kueue-granular-admission-check-rejected-pytorchjob", "train"): [
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",
        "Queued in LocalQueue queue: has quota and waits for admission checks.",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82.",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82 (no nodes yet).",
        "The job lost its quota and will be queued again: admission check budget-82 asks to try again later: "
        "no nodes yet.",
        "Queued in LocalQueue queue: admission check budget-82 asks to try again later: no nodes yet.",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82 (Reset to Pending after "
        "eviction. Previously: Retry).",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82 (budget is spent).",
        "Kueue gave up on the job: admission check budget-82 rejected it: budget is spent.",
        "The queue has released the job's quota.",
    ],
    ("83-kueue-granular-equal-jobs-pytorchjob", "third"): [
        "Queued in LocalQueue queue: waits behind equal jobs: needs 200m cpu more in flavor q83.",
        "Queued in LocalQueue queue: waits behind equal jobs.",
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q83.",
        "Admitted by ClusterQueue q83 with flavor q83.",
        "The queue has released the job's quota.",
    ],
    ("84-kueue-equal-jobs-pytorchjob", "third"): [
        "Queued in LocalQueue queue: waits behind equal jobs: needs 200m cpu more in flavor q84.",
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",  # the second one is admitted
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q84.",
        "Admitted by ClusterQueue q84 with flavor q84.",
        "The queue has released the job's quota.",
    ],
    ("84b-kueue-local-queue-held-pytorchjob", "third"): [  # `LocalQueue queue is inactive` stays for 16 s too long
        "Queued in LocalQueue queue: waits behind equal jobs: needs 200m cpu more in flavor q84b.",
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",  # the second one has lost its verdict
        "Queued in LocalQueue queue: LocalQueue queue is stopped. An administrator must correct this.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Queued in LocalQueue queue: waits behind equal jobs: needs 200m cpu more in flavor q84b.",
        "Queued in LocalQueue queue: Kueue has not looked at the job since LocalQueue queue became active.",
        "Queued in LocalQueue queue: needs 200m cpu more in flavor q84b.",
        "Admitted by ClusterQueue q84b with flavor q84b.",
        "The queue has released the job's quota.",
    ],
    ("84-kueue-equal-jobs-pytorchjob", "big-too"): [
        "Queued in LocalQueue queue: waits behind equal jobs: requests more than the whole quota (800m + 800m cpu of "
        "at most 1 in flavor q84): it can never run here.",
        "Queued in LocalQueue queue: Kueue has not looked at the job yet.",  # `big` is deleted
        "Queued in LocalQueue queue: requests more than the whole quota (800m + 800m cpu of at most 1 in flavor q84): "
        "it can never run here.",
    ],
}


@pytest.mark.parametrize(("name", "job"), LINES)
def test_lines_about_recorded_workloads(name: str, job: str) -> None:
    assert [status.line for status in recorded(name, job)] == LINES[name, job]


def test_preemption_is_counted_and_explained() -> None:
    preempted = next(s for s in recorded("72b-kueue-trainjob-preemption", "low") if s.phase is QueuePhase.EVICTING)
    assert (preempted.evictions, preempted.preemptions) == (1, 1)
    why = "preempted: a job with a higher priority in the ClusterQueue needs the quota"
    assert preempted.last_eviction == Eviction("Preempted", why, "2026-11-22T02:04:13Z")
    assert preempted.last_eviction.preempted


@pytest.mark.parametrize(
    "name", ["82-kueue-granular-admission-check-rejected-pytorchjob", "85-kueue-admission-check-pytorchjob"]
)
def test_a_check_that_evicts_a_job_before_its_admission_takes_nothing_from_it(name: str) -> None:
    states = recorded(name, "train")
    assert {(s.evictions, s.preemptions, s.last_eviction) for s in states} == {(0, 0, None)}
    given_up = next(s for s in states if s.phase is QueuePhase.GIVEN_UP)
    assert given_up.message == 'AdmissionCheck in Rejected state: "{}" (budget is spent)'.format(
        "budget-82" if name.startswith("82") else "budget-85"
    )


def test_a_check_that_ends_an_admission_counts_as_an_eviction() -> None:
    evicted = condition("Evicted", "True", "AdmissionCheck", 'Evicted due to AdmissionCheck in Retry state: "a" (gone)')
    reserved, admitted = condition("QuotaReserved", "True", "QuotaReserved"), condition("Admitted", "True", "Admitted")
    status = queue_status(workload(reserved, admitted, evicted))
    assert (status.phase, status.evictions) == (QueuePhase.EVICTING, 1)
    assert status.last_eviction is not None
    assert status.last_eviction.why == "admission check a asks to try again later: gone"


def test_a_check_before_the_admission_does_not_disarm_never_fits() -> None:
    past = condition(
        "Evicted", "False", "QuotaReserved", 'Previously: Evicted due to AdmissionCheck in Retry state: "a"'
    )
    stats = {"schedulingStats": {"evictions": [{"reason": "AdmissionCheck", "count": 1, "underlyingCause": ""}]}}
    for rest in ({}, stats):
        status = queue_status(workload(pending(PREFIX + ABOVE.format("a100")), past, **rest))
        assert status.phase is QueuePhase.NEVER_FITS


def test_evictions_stay_counted_when_the_job_is_admitted_again() -> None:
    admitted = [s for s in recorded("74c-kueue-workload-inactive", "train") if s.phase is QueuePhase.ADMITTED]
    assert [(s.evictions, s.preemptions) for s in admitted] == [(0, 0), (1, 0)]
    assert admitted[-1].last_eviction is None


@pytest.mark.parametrize(
    ("message", "phase"),
    [
        (ABOVE.format("a100"), QueuePhase.NEVER_FITS),
        (f"{ABOVE.format('a100')}, {ABOVE.format('h100')}", QueuePhase.NEVER_FITS),
        (
            "insufficient quota for nvidia.com/gpu in flavor a100, request > maximum capacity (24 > 16)",
            QueuePhase.NEVER_FITS,
        ),
        (f"{ABOVE.format('a100')}, {UNUSED.format('h100')}", QueuePhase.WAITING),
        (f"{ABOVE.format('a100')}, untolerated taint {{gpu h100 NoSchedule <nil>}} in flavor h100", QueuePhase.WAITING),
        (f"{ABOVE.format('a100')}, flavor h100 doesn't match node affinity", QueuePhase.WAITING),
        (UNUSED.format("a100"), QueuePhase.WAITING),
        ("something that Kueue says in the year 2030", QueuePhase.WAITING),
    ],
)
def test_a_job_never_fits_only_if_no_flavor_can_hold_it(message: str, phase: QueuePhase) -> None:
    status = queue_status(workload(pending(PREFIX + message)))
    assert status.phase is phase
    assert (FAILS_AFTER_SECONDS.get(status.phase) == 600) is (phase is QueuePhase.NEVER_FITS)


@pytest.mark.parametrize(
    ("conditions", "status", "phase"),
    [
        ([("Evicted", "False", "QuotaReserved")], {}, QueuePhase.WAITING),
        ([("Admitted", "False", "NoReservation")], {"accumulatedPastExecutionTimeSeconds": 60}, QueuePhase.WAITING),
        ([], {"schedulingStats": {"evictions": [{"reason": "Preempted", "count": 1}]}}, QueuePhase.WAITING),
        # with the feature gate UnadmittedWorkloadsExplicitStatus, Kueue shows this before the first admission
        ([("Admitted", "False", "NoReservation")], {}, QueuePhase.NEVER_FITS),
    ],
)
def test_a_job_that_was_admitted_once_may_fit_again(
    conditions: list[tuple[str, str, str]], status: dict[str, Any], phase: QueuePhase
) -> None:
    earlier = [condition(*one) for one in conditions]
    found = queue_status(workload(pending(PREFIX + ABOVE.format("a100")), *earlier, **status))
    assert found.phase is phase


def test_reason_exceeds_max_quota_alone_is_no_evidence() -> None:
    """Newer releases give it if one resource of one pod set exceeds the quota."""
    short = f"{PREFIX}insufficient quota for cpu in flavor a100"
    assert queue_status(workload(pending(short, "ExceedsMaxQuota"))).phase is QueuePhase.NEVER_FITS
    for message in ("too large", f"{ABOVE.format('a100')}, flavor h100 doesn't match node affinity"):
        status = queue_status(workload(pending(PREFIX + message, "ExceedsMaxQuota")))
        assert status.phase is QueuePhase.WAITING, message
    assert queue_status(workload(pending(short))).phase is QueuePhase.WAITING


TAINT = "untolerated taint {gpu a100 NoSchedule <nil>} in flavor q76"
UNSUITED = f"no flavor of its ClusterQueue suits it: {TAINT}"


@pytest.mark.parametrize(
    ("reason", "message", "phase", "why"),
    [
        ("NoMatchingFlavor", PREFIX + TAINT, QueuePhase.MISCONFIGURED, UNSUITED),
        ("Pending", PREFIX + TAINT, QueuePhase.MISCONFIGURED, UNSUITED),
        ("Misconfigured", "invalid namespace selector: x", QueuePhase.MISCONFIGURED, "invalid namespace selector: x"),
        (
            "Suspended", "ClusterQueue q is inactive", QueuePhase.MISCONFIGURED,
            "ClusterQueue q is inactive: it is stopped, or not completely set up",
        ),
        ("PendingEvaluation", "Workload is pending", QueuePhase.PENDING, "Kueue has not looked at the job yet"),
        ("Misconfigured", "ClusterQueue  doesn't exist", QueuePhase.PENDING, "Kueue has not looked at the job yet"),
        ("WaitingForQuota", BYPASSED, QueuePhase.WAITING, "waits behind equal jobs"),
        (
            "ExceedsMaxQuota", BYPASSED, QueuePhase.NEVER_FITS,
            "waits behind equal jobs: requests more than the whole quota, as they do",
        ),
    ],
)  # fmt: skip
def test_reasons_decide_before_messages(reason: str, message: str, phase: QueuePhase, why: str) -> None:
    status = queue_status(workload(pending(message, reason)))
    assert (status.phase, status.why) == (phase, why)


def test_a_pod_set_that_never_fits_holds_the_whole_job_back() -> None:
    """`big` of recordings 83 and 84: the Master alone would fit, while another job uses the quota."""
    master = "couldn't assign flavors to pod set master: " + UNUSED.format("a100")
    status = queue_status(workload(pending(f"{master}; {PREFIX}{ABOVE.format('a100')}")))
    assert status.phase is QueuePhase.NEVER_FITS
    assert "4 nvidia.com/gpu more" not in status.why


def test_the_newest_verdict_on_an_equal_job_counts() -> None:
    ours = workload()
    at = "2026-11-22T0{}:00:00Z".format
    never = workload({**pending(PREFIX + ABOVE.format("a100")), "lastTransitionTime": at(3)})
    waits = workload({**pending(PREFIX + UNUSED.format("a100")), "lastTransitionTime": at(4)})
    for number, other in enumerate((never, waits)):
        other["metadata"]["uid"] = f"u-{number}"
    assert queue_status(ours, [never]).phase is QueuePhase.NEVER_FITS
    assert (
        queue_status(ours, [never, waits]).why == "waits behind equal jobs: needs 4 nvidia.com/gpu more in flavor a100"
    )
    was_admitted = {**ours, "status": {"accumulatedPastExecutionTimeSeconds": 60}}
    assert queue_status(was_admitted, [never]).phase is QueuePhase.WAITING


def test_equal_jobs_have_the_same_queue_and_pod_sets() -> None:
    def of(queue: str = "a", count: int = 1, gpus: str = "1", command: str = "x") -> str:
        container = {"name": "main", "command": [command], "resources": {"requests": {"nvidia.com/gpu": gpus}}}
        pod_sets = [{"name": "worker", "count": count, "template": {"spec": {"containers": [container]}}}]
        return equality_key({"spec": {"queueName": queue, "podSets": pod_sets}})

    assert of() == of(command="y")
    assert len({of(), of(queue="b"), of(count=2), of(gpus="2")}) == 4


def test_line_names_missing_and_excessive_quota() -> None:
    either = queue_status(workload(pending(f"{PREFIX}{UNUSED.format('a100')}, {UNUSED.format('h100')}")))
    assert either.line == (
        "Queued in LocalQueue team-a: needs 4 nvidia.com/gpu more in flavor a100 "
        "or 4 nvidia.com/gpu more in flavor h100."
    )
    never = queue_status(workload(pending(PREFIX + ABOVE.format("a100"))))
    assert never.line == (
        "Queued in LocalQueue team-a: requests more than the whole quota (24 nvidia.com/gpu of at most 16 in flavor "
        "a100): it can never run here."
    )


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("LocalQueue team-a doesn't exist", "LocalQueue team-a doesn't exist"),
        ("LocalQueue team-a is inactive", "LocalQueue team-a is inactive: it is stopped, or not completely set up"),
        ("LocalQueue team-a is terminating or missing", "LocalQueue team-a is terminating or missing"),
        ("ClusterQueue gpus not found", "ClusterQueue gpus not found"),
        ("Workload namespace doesn't match ClusterQueue selector", "its ClusterQueue admits no jobs of this namespace"),
        (
            f"{PREFIX}resource nvidia.com/gpu unavailable in ClusterQueue",
            "its ClusterQueue has no quota for nvidia.com/gpu",
        ),
    ],
)
def test_a_missing_or_stopped_queue_waits_for_an_administrator(message: str, why: str) -> None:
    status = queue_status(workload(pending(message, "Inadmissible")))
    assert (status.phase, status.why, FAILS_AFTER_SECONDS.get(status.phase)) == (QueuePhase.MISCONFIGURED, why, None)


@pytest.mark.parametrize("prefix", ["DeactivatedDueTo", "InactiveWorkload"])
@pytest.mark.parametrize("cause", ["RequeuingLimitExceeded", "MaximumExecutionTimeExceeded", "AdmissionCheck"])
def test_job_that_kueue_gave_up_on_fails_after_a_minute(cause: str, prefix: str) -> None:
    message = 'The workload is deactivated due to AdmissionCheck in Rejected state: "budget"'
    evicted = condition("Evicted", "True", prefix + cause, message)
    status = queue_status(workload(pending(message), evicted, active=False))
    assert (status.phase, FAILS_AFTER_SECONDS.get(status.phase), status.message) == (QueuePhase.GIVEN_UP, 60, message)
    assert status.line.startswith("Kueue ")


def test_a_deactivation_by_kueue_is_recognised_before_the_eviction() -> None:
    target = condition(
        "DeactivationTarget", "True", "RequeuingLimitExceeded", "exceeding the maximum number of retries"
    )
    reserved, admitted = condition("QuotaReserved", "True", "QuotaReserved"), condition("Admitted", "True", "Admitted")
    assert queue_status(workload(reserved, admitted, target)).phase is QueuePhase.ADMITTED
    assert queue_status(workload(reserved, admitted, target, active=False)).phase is QueuePhase.GIVEN_UP


def test_deactivated_workload_waits_without_limit() -> None:
    evicted = condition("Evicted", "True", "Deactivated", "The workload is deactivated")
    for status in (queue_status(workload(active=False)), queue_status(workload(evicted, active=False))):
        assert (status.phase, FAILS_AFTER_SECONDS.get(status.phase)) == (QueuePhase.DEACTIVATED, None)


def test_an_old_reason_of_a_workload_that_is_active_again_is_ignored() -> None:
    evicted = condition("Evicted", "True", "DeactivatedDueToRequeuingLimitExceeded", "The workload is deactivated")
    assert queue_status(workload(pending("x"), evicted)).phase is QueuePhase.WAITING


MESSAGES = [
    # (reason, Kueue's message, what the log says)
    (
        "Pending", f"{PREFIX}{UNUSED.format('a100')}. Pending the preemption of 2 workload(s)",
        "needs 4 nvidia.com/gpu more in flavor a100; 2 jobs will be preempted for it",
    ),
    (
        "Pending",
        "couldn't assign flavors to pod set master: insufficient unused quota for cpu in flavor cpus, 2 more needed; "
        "couldn't assign flavors to pod set worker: insufficient unused quota for nvidia.com/gpu in flavor a100, "
        "8 more needed, insufficient unused quota for nvidia.com/gpu in flavor h100, 4 more needed",
        "needs 2 cpu more in flavor cpus and 8 nvidia.com/gpu more in flavor a100 or 4 nvidia.com/gpu more in flavor "
        "h100",
    ),
    (
        "Pending",
        f"{PREFIX}insufficient unused quota for cpu in flavor a100, 2 more needed, "
        "insufficient unused quota for memory in flavor a100, 2Gi more needed",
        "needs 2 cpu and 2Gi memory more in flavor a100",
    ),
    (
        "Pending",
        f"{PREFIX}insufficient unused quota for cpu in flavor cpus, 2 more needed, "
        "insufficient unused quota for nvidia.com/gpu in flavor a100, 1 more needed",
        "needs 2 cpu more in flavor cpus and 1 nvidia.com/gpu more in flavor a100",
    ),
    (  # amounts contain those of the pod sets before: recording 84 of two pods that need 2 together
        "Pending",
        "couldn't assign flavors to pod set master: insufficient unused quota for cpu in flavor cpus, 500m more needed"
        "; "
        "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor cpus, 2 more needed, "
        "insufficient unused quota for memory in flavor cpus, 900Mi more needed",
        "needs 2 cpu and 900Mi memory more in flavor cpus",
    ),
    (
        "WaitingForPodsReady", "Waiting for all admitted workloads to be in PodsReady condition",
        "waiting for all admitted workloads to be in PodsReady condition",
    ),
    ("TopologyPlacementFailed", "topology \"racks\" allows to fit only 1 out of 3 pod(s)",
     "topology \"racks\" allows to fit only 1 out of 3 pod(s)"),
    ("WaitingForTheMoon", "The moon is not up", "the moon is not up (WaitingForTheMoon)"),
    (
        "Pending", f"{PREFIX}insufficient unused quota in cohort for cpu in flavor default, 3 more needed",
        "needs 3 cpu more in flavor default",
    ),
    (
        "Pending", f"{PREFIX}borrowing limit for nvidia.com/gpu in flavor a100 exceeded",
        "borrowing limit for nvidia.com/gpu in flavor a100 exceeded",
    ),
    (
        "Pending", f"{PREFIX}Flavor \"rtx4000\" supports only TopologyAwareScheduling, {ABOVE.format('any')}",
        "flavor \"rtx4000\" supports only TopologyAwareScheduling, " + ABOVE.format("any"),
    ),
    (
        "Pending", f"{PREFIX}topology \"racks\" allows to fit only 1 out of 3 pod(s)",
        "topology \"racks\" allows to fit only 1 out of 3 pod(s)",
    ),
    (
        "Pending", "Workload no longer fits after processing another workload",
        "workload no longer fits after processing another workload",
    ),
    (
        "Waiting", "Waiting for all admitted workloads to be in PodsReady condition",
        "waiting for all admitted workloads to be in PodsReady condition",
    ),
    ("PreemptionGated", "", "PreemptionGated"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "message", "why"), MESSAGES)
def test_each_message_of_the_scheduler_in_plain_words(reason: str, message: str, why: str) -> None:
    status = queue_status(workload(pending(message, reason)))
    assert (status.phase, status.why) == (QueuePhase.WAITING, why)
    assert len(status.line.partition("\n")[0]) <= 200


EVICTED = [
    # (reason of Evicted, reason of Preempted, Kueue's message, phase, what the log says)
    (
        "Preempted", "InCohortReclamation",
        "Preempted to accommodate a workload (UID: 1, JobUID: 2) due to reclamation within the cohort; "
        "preemptor path: /all/b; preemptee path: /all/a", QueuePhase.WAITING,
        "preempted: another ClusterQueue of the cohort reclaims its quota",
    ),
    (
        "Preempted", "InCohortFairSharing", "Preempted to accommodate a workload", QueuePhase.WAITING,
        "preempted: another ClusterQueue of the cohort gets its fair share",
    ),
    (
        "Preempted", "InCohortReclaimWhileBorrowing", "Preempted to accommodate a workload", QueuePhase.WAITING,
        "preempted: another ClusterQueue of the cohort reclaims its quota",
    ),
    (
        "Preempted", "InCohort", "Preempted to accommodate a workload", QueuePhase.WAITING,
        "preempted: another ClusterQueue of the cohort needs the quota",
    ),
    ("Preempted", "", "Preempted", QueuePhase.WAITING, "preempted: another job needs the quota"),
    ("AdmissionCheck", "", "At least one admission check is false", QueuePhase.WAITING, "an admission check failed"),
    ("NodeFailures", "", "Workload was evicted", QueuePhase.WAITING, "a node failed"),
    ("LocalQueueStopped", "", "The LocalQueue is stopped", QueuePhase.MISCONFIGURED, "the LocalQueue is stopped"),
    ("SomethingNew", "", "The quota moved", QueuePhase.WAITING, "The quota moved"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "preempted", "message", "phase", "why"), EVICTED)
def test_each_reason_of_an_eviction_in_plain_words(
    reason: str, preempted: str, message: str, phase: QueuePhase, why: str
) -> None:
    evicted, also = condition("Evicted", "True", reason, message), condition("Preempted", "True", preempted, message)
    reserved, admitted = condition("QuotaReserved", "True", "QuotaReserved"), condition("Admitted", "True", "Admitted")
    more = [also] if preempted else []
    evicting = queue_status(workload(reserved, admitted, evicted, *more))
    assert (evicting.phase, evicting.why) == (QueuePhase.EVICTING, why)
    assert evicting.last_eviction is not None
    assert evicting.last_eviction.preempted is (reason == "Preempted")
    queued = queue_status(workload(pending(message), evicted, *more))
    assert (queued.phase, queued.why) == (phase, why)


def test_job_that_kueue_queues_again_later_waits() -> None:
    message = "Exceeded the PodsReady timeout team/pytorchjob-train-12345"
    evicted = condition("Evicted", "True", "PodsReadyTimeout", message)
    later = condition("Requeued", "False", "PodsReadyTimeout", message)
    state = {"count": 1, "requeueAt": "2026-11-22T02:05:00Z"}
    status = queue_status(workload(pending(message), evicted, later, requeueState=state))
    assert status.why == "its pods were not ready in time. Kueue queues it again after a pause"
    again = condition("Requeued", "True", "BackoffFinished", "The workload backoff was finished")
    assert queue_status(workload(pending(message), evicted, again)).why == "its pods were not ready in time"


def test_open_admission_checks_are_named() -> None:
    reserved = condition("QuotaReserved", "True", "QuotaReserved")
    checks = [{"name": "budget", "state": "Pending"}, {"name": "nodes", "state": "Ready"}]
    status = queue_status(workload(reserved, admissionChecks=checks))
    assert status.line == "Queued in LocalQueue team-a: has quota and waits for admission checks: budget."
    checks[0] |= {"state": "Retry", "message": "Waiting for the autoscaler."}
    status = queue_status(workload(reserved, admissionChecks=checks))
    assert status.why == "has quota and waits for admission checks: budget (Waiting for the autoscaler)"


def test_a_partial_admission_shows_how_many_pods_are_admitted() -> None:
    reserved, admitted = condition("QuotaReserved", "True", "QuotaReserved"), condition("Admitted", "True", "Admitted")
    assignments = [{"name": "worker", "flavors": {"cpu": "a100", "nvidia.com/gpu": "a100"}, "count": 2}]
    found = workload(reserved, admitted, admission={"clusterQueue": "gpus", "podSetAssignments": assignments})
    found["spec"]["podSets"] = [{"name": "worker", "count": 4, "minCount": 2}]
    assert queue_status(found).line == "Admitted by ClusterQueue gpus with flavor a100 for 2 of 4 pods."
    assignments[0]["count"] = 4
    assert queue_status(found).line == "Admitted by ClusterQueue gpus with flavor a100."


@pytest.mark.parametrize(
    ("spec", "elsewhere"),
    [
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, True),
        ({"runPolicy": {"managedBy": "kueue.x-k8s.io/multikueue"}}, True),
        ({"managedBy": "trainer.kubeflow.org/trainjob-controller", "runPolicy": None}, False),
        (None, False),
    ],
)
def test_job_of_multikueue_is_recognized(spec: dict[str, Any] | None, elsewhere: bool) -> None:
    assert runs_elsewhere({"spec": spec}) is elsewhere


def test_the_workload_of_a_job_is_the_newest_that_it_controls() -> None:
    def owned(name: str, uid: str, created: str, *, controller: bool = True) -> dict[str, Any]:
        owner = {"uid": uid, "controller": controller}
        return {"metadata": {"name": name, "creationTimestamp": created, "ownerReferences": [owner]}}

    found = [
        owned("old", "u", "2026-11-22T01:00:00Z"), owned("new", "u", "2026-11-22T02:00:00Z"),
        owned("other", "v", "2026-11-22T03:00:00Z"), owned("loose", "u", "2026-11-22T03:00:00Z", controller=False),
    ]  # fmt: skip
    chosen = workload_of(found, "u")
    assert chosen is not None
    assert chosen["metadata"]["name"] == "new"
    assert workload_of(found, "nobody") is None


def test_an_unfinished_workload_comes_before_a_finished_one() -> None:
    """Kueue replaces the Workload of an elastic job; both may be created in the same second."""

    def slice_of(name: str, *conditions: dict[str, str]) -> dict[str, Any]:
        owner = {"uid": "u", "controller": True}
        meta = {"name": name, "creationTimestamp": "2026-11-22T01:00:00Z", "ownerReferences": [owner]}
        return {"metadata": meta, "status": {"conditions": list(conditions)}}

    old = slice_of("old", condition("Finished", "True", "WorkloadSliceReplaced"))
    for order in ([old, slice_of("new")], [slice_of("new"), old]):
        chosen = workload_of(order, "u")
        assert chosen is not None
        assert chosen["metadata"]["name"] == "new"


TOO_LARGE = (
    "couldn't assign flavors to pod set worker: insufficient quota for cpu in flavor f, previously considered podsets "
    "requests (0) + current podset request (8) > maximum capacity (4)"
)
QUOTA_IN_USE = "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor f, 4 more needed"


def equal_job(message: str = "", at: str = "10:00", *, active: bool = True) -> dict[str, Any]:
    """A Workload that was not admitted yet; all of them are equal."""
    quota = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    quota["lastTransitionTime"] = f"2026-11-24T{at}:00Z"
    pods = {"name": "worker", "count": 1, "template": {"spec": {"containers": [{"resources": {}}]}}}
    spec = {"queueName": "q", "priority": 0, "active": active, "podSets": [pods]}
    return {"spec": spec, "status": {"conditions": [quota] if message else []}}


def test_equal_job_that_waits_for_quota_refutes_an_older_verdict() -> None:
    """The time of a condition stays while only its message changes, and a job that Kueue bypasses keeps its text."""
    evaluated, stale = equal_job(QUOTA_IN_USE, "10:00"), equal_job(TOO_LARGE, "10:05")
    assert queue_status(stale, []).phase is QueuePhase.NEVER_FITS
    assert queue_status(equal_job(), [evaluated, stale]).phase is QueuePhase.WAITING
    assert queue_status(stale, [evaluated]).phase is QueuePhase.WAITING


def test_paused_workload_says_nothing_about_equal_jobs() -> None:
    assert queue_status(equal_job(), [equal_job(TOO_LARGE)]).phase is QueuePhase.NEVER_FITS
    assert queue_status(equal_job(), [equal_job(TOO_LARGE, active=False)]).phase is not QueuePhase.NEVER_FITS
