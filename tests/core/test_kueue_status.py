"""What a queue does with a job, by recorded Workloads: its phase, and Kueue's reason and message word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.state.queue.kueue_status import (
    FAILS_AFTER_SECONDS,
    QueuePhase,
    QueueStatus,
    queue_status,
    runs_elsewhere,
    workload_of,
)
from tests.kueue.recording import changes_in

RECORDINGS = Path(__file__).parents[1] / "kueue/recordings"
TOO_LARGE = "couldn't assign flavors to pod set worker: insufficient quota for nvidia.com/gpu in flavor a100"
RESERVED = {"type": "QuotaReserved", "status": "True", "reason": "QuotaReserved"}
ADMITTED = {"type": "Admitted", "status": "True", "reason": "Admitted"}


def workload(*conditions: dict[str, str], **rest: Any) -> dict[str, Any]:
    spec = {"queueName": "team-a", "active": rest.pop("active", True)}
    status = {"conditions": [{"lastTransitionTime": "2026-11-22T02:00:00Z", **c} for c in conditions], **rest}
    return {"metadata": {"name": "w", "creationTimestamp": "2026-11-22T01:00:00Z"}, "spec": spec, "status": status}


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": type_, "status": status, "reason": reason, "message": message}


def pending(message: str, reason: str = "Pending") -> dict[str, str]:
    return condition("QuotaReserved", "False", reason, message)


def recorded(name: str, job: str) -> list[QueueStatus]:
    """The states of a recorded job's Workload, without repetitions."""
    found: list[QueueStatus] = []
    for change in changes_in(RECORDINGS / name / "events.jsonl"):
        obj = change["object"]
        if change["watch"] == "workloads" and obj["metadata"]["name"].partition("-")[2].rpartition("-")[0] == job:
            status = queue_status(obj)
            if not found or status.line != found[-1].line:
                found.append(status)
    return found


EXCEEDS = (
    "couldn't assign flavors to pod set worker: insufficient quota for cpu in flavor q83, previously considered "
    "podsets requests (800m) + current podset request (800m) > maximum capacity (1)"
)
LINES = {
    ("70b-kueue-hold", "train"): [
        "Queued in LocalQueue queue",
        "Queued in LocalQueue queue: Inadmissible: ClusterQueue q70b is inactive",
        "Admitted by ClusterQueue q70b with flavor q70b.",
        "The job lost its quota and will be queued again: ClusterQueueStopped: The ClusterQueue is stopped",
        "Queued in LocalQueue queue: Pending: The ClusterQueue is stopped",
        "Queued in LocalQueue queue: Inadmissible: ClusterQueue q70b is inactive",
        "Admitted by ClusterQueue q70b with flavor q70b.",
        "The queue has released the job's quota.",
    ],
    ("72b-kueue-trainjob-preemption", "high"): [
        "Queued in LocalQueue queue",
        "Queued in LocalQueue queue: Pending: couldn't assign flavors to pod set node: insufficient unused quota for "
        "cpu in flavor q72b, 200m more needed. Pending the preemption of 1 workload(s)",
        "Admitted by ClusterQueue q72b with flavor q72b.",
        "The queue has released the job's quota.",
    ],
    ("74c-kueue-workload-inactive", "train"): [
        "Queued in LocalQueue queue",
        "Admitted by ClusterQueue q74c with flavor q74c.",
        "The job is paused: somebody set spec.active of its Workload to false. "
        "It continues when the Workload is active again.",
        "Queued in LocalQueue queue: Pending: The workload is deactivated",
        "Admitted by ClusterQueue q74c with flavor q74c.",
        "The queue has released the job's quota.",
    ],
    ("82-kueue-granular-admission-check-rejected-pytorchjob", "train"): [
        "Queued in LocalQueue queue",
        "Queued in LocalQueue queue: has quota and waits for admission checks",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82: no nodes yet",
        "The job lost its quota and will be queued again: AdmissionCheck: Evicted due to AdmissionCheck in Retry "
        'state: "budget-82" (no nodes yet)',
        "Queued in LocalQueue queue: PendingEvaluation: Evicted due to AdmissionCheck in Retry state: "
        '"budget-82" (no nodes yet)',
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82: Reset to Pending after "
        "eviction. Previously: Retry",
        "Queued in LocalQueue queue: has quota and waits for admission checks: budget-82: budget is spent",
        'Kueue gave up on the job: AdmissionCheck: AdmissionCheck in Rejected state: "budget-82" (budget is spent)',
        "Kueue gave up on the job: DeactivatedDueToAdmissionCheck: The workload is deactivated due to AdmissionCheck "
        'in Rejected state: "budget-82" (budget is spent)',
        "The queue has released the job's quota.",
    ],
    ("83-kueue-granular-equal-jobs-pytorchjob", "third"): [
        "Queued in LocalQueue queue",
        "Queued in LocalQueue queue: WaitingForQuota: Bypassed scheduling evaluation because an equivalent workload "
        "recently failed",
        "Queued in LocalQueue queue: WaitingForQuota: couldn't assign flavors to pod set worker: insufficient unused "
        "quota for cpu in flavor q83, 200m more needed",
        "Admitted by ClusterQueue q83 with flavor q83.",
        "The queue has released the job's quota.",
    ],
}


@pytest.mark.parametrize(("name", "job"), LINES)
def test_lines_about_recorded_workloads(name: str, job: str) -> None:
    assert [status.line for status in recorded(name, job)] == LINES[name, job]


def test_a_long_message_is_shown_whole_below_a_short_line() -> None:
    short, _, whole = recorded("83-kueue-granular-equal-jobs-pytorchjob", "big-too")[-1].line.partition("\n")
    assert len(short) <= 200
    assert whole == f"Queued in LocalQueue queue: ExceedsMaxQuota: {EXCEEDS}"


def test_preemption_is_counted_and_reported_as_kueue_says_it() -> None:
    preempted = next(s for s in recorded("72b-kueue-trainjob-preemption", "low") if s.phase is QueuePhase.EVICTED)
    assert (preempted.evictions, preempted.preemptions) == (1, 1)
    last = preempted.last_eviction
    assert last is not None
    assert (last.reason, last.at, last.preempted) == ("Preempted", "2026-11-22T02:04:13Z", True)
    assert last.why == (
        "Preempted: Preempted to accommodate a workload (UID: 54a9d08a-73f1-43c0-aa21-1c5cb9f63b0c, JobUID: "
        "97db36ff-fd1d-4944-a89c-534aeabc56c4) due to prioritization in the ClusterQueue; preemptor path: /q72b; "
        "preemptee path: /q72b"
    )


@pytest.mark.parametrize(
    "name", ["82-kueue-granular-admission-check-rejected-pytorchjob", "85-kueue-admission-check-pytorchjob"]
)
def test_a_check_that_evicts_a_job_before_its_admission_takes_nothing_from_it(name: str) -> None:
    states = recorded(name, "train")
    assert {(s.evictions, s.preemptions, s.last_eviction) for s in states} == {(0, 0, None)}
    assert any(s.phase is QueuePhase.GIVEN_UP for s in states)


def test_a_check_that_ends_an_admission_counts_as_an_eviction() -> None:
    status = queue_status(workload(RESERVED, ADMITTED, condition("Evicted", "True", "AdmissionCheck", "gone")))
    assert (status.phase, status.evictions) == (QueuePhase.EVICTED, 1)
    assert status.last_eviction is not None
    assert status.last_eviction.why == "AdmissionCheck: gone"


def test_evictions_stay_counted_when_the_job_is_admitted_again() -> None:
    admitted = [s for s in recorded("74c-kueue-workload-inactive", "train") if s.phase is QueuePhase.ADMITTED]
    assert [(s.evictions, s.preemptions) for s in admitted] == [(0, 0), (1, 0)]
    assert admitted[-1].last_eviction is None


@pytest.mark.parametrize(
    ("reason", "phase"),
    [
        *((reason, QueuePhase.QUEUED) for reason in (
            "Pending", "Waiting", "Inadmissible", "PendingEvaluation", "WaitingForQuota", "NoMatchingFlavor",
            "TopologyPlacementFailed", "Misconfigured", "Suspended", "SomethingNew",
        )),
        ("ExceedsMaxQuota", QueuePhase.NEVER_FITS),
    ],
)  # fmt: skip
def test_a_job_never_fits_only_if_the_reason_says_so(reason: str, phase: QueuePhase) -> None:
    status = queue_status(workload(pending(TOO_LARGE, reason)))
    assert (status.phase, status.why) == (phase, f"{reason}: {TOO_LARGE}")
    assert (FAILS_AFTER_SECONDS.get(status.phase) == 600) is (phase is QueuePhase.NEVER_FITS)


@pytest.mark.parametrize(
    ("conditions", "status", "phase"),
    [
        ([("Evicted", "False", "QuotaReserved")], {}, QueuePhase.QUEUED),
        ([("Admitted", "False", "NoReservation")], {"accumulatedPastExecutionTimeSeconds": 0}, QueuePhase.QUEUED),
        ([], {"schedulingStats": {"evictions": [{"reason": "Preempted", "count": 1}]}}, QueuePhase.QUEUED),
        # with the feature gate UnadmittedWorkloadsExplicitStatus, Kueue shows this before the first admission
        ([("Admitted", "False", "NoReservation")], {}, QueuePhase.NEVER_FITS),
    ],
)
def test_a_job_that_may_have_been_admitted_may_fit_again(
    conditions: list[tuple[str, str, str]], status: dict[str, Any], phase: QueuePhase
) -> None:
    earlier = [condition(*one) for one in conditions]
    found = queue_status(workload(pending(TOO_LARGE, "ExceedsMaxQuota"), *earlier, **status))
    assert found.phase is phase


@pytest.mark.parametrize("prefix", ["DeactivatedDueTo", "InactiveWorkload"])
@pytest.mark.parametrize("cause", ["RequeuingLimitExceeded", "MaximumExecutionTimeExceeded", "AdmissionCheck"])
def test_job_that_kueue_gave_up_on_fails_after_a_minute(cause: str, prefix: str) -> None:
    message = 'The workload is deactivated due to AdmissionCheck in Rejected state: "budget"'
    evicted = condition("Evicted", "True", prefix + cause, message)
    status = queue_status(workload(pending(message), evicted, active=False))
    assert (status.phase, FAILS_AFTER_SECONDS.get(status.phase)) == (QueuePhase.GIVEN_UP, 60)
    assert status.line == f"Kueue gave up on the job: {prefix}{cause}: {message}"
    assert status.pods_were_late is (cause == "RequeuingLimitExceeded")


def test_a_deactivation_by_kueue_is_recognised_before_the_eviction() -> None:
    target = condition(
        "DeactivationTarget", "True", "RequeuingLimitExceeded", "exceeding the maximum number of retries"
    )
    assert queue_status(workload(RESERVED, ADMITTED, target)).phase is QueuePhase.ADMITTED
    status = queue_status(workload(RESERVED, ADMITTED, target, active=False))
    assert (status.phase, status.pods_were_late) == (QueuePhase.GIVEN_UP, True)


def test_deactivated_workload_waits_without_limit() -> None:
    evicted = condition("Evicted", "True", "Deactivated", "The workload is deactivated")
    for status in (queue_status(workload(active=False)), queue_status(workload(evicted, active=False))):
        assert (status.phase, FAILS_AFTER_SECONDS.get(status.phase)) == (QueuePhase.PAUSED, None)


def test_an_old_reason_of_a_workload_that_is_active_again_is_ignored() -> None:
    evicted = condition("Evicted", "True", "DeactivatedDueToRequeuingLimitExceeded", "The workload is deactivated")
    assert queue_status(workload(pending("x"), evicted)).phase is QueuePhase.QUEUED


def test_a_partial_admission_shows_how_many_pods_are_admitted() -> None:
    assignments = [{"name": "worker", "flavors": {"cpu": "a100", "nvidia.com/gpu": "a100"}, "count": 2}]
    found = workload(RESERVED, ADMITTED, admission={"clusterQueue": "gpus", "podSetAssignments": assignments})
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
