"""How a queue handles a job: recorded Workloads, and messages of Kueue that no recording contains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.state.kueue_status import Eviction, QueuePhase, QueueStatus, queue_status, workload_of

RECORDINGS = Path(__file__).parents[1] / "kueue/recordings"
PREFIX = "couldn't assign flavors to pod set worker: "
UNUSED = "insufficient unused quota for nvidia.com/gpu in flavor {}, 4 more needed"
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
    """The states of a recorded job's Workload, without repetitions."""
    found: list[QueueStatus] = []
    for line in (RECORDINGS / name / "events.jsonl").read_text().splitlines():
        change = json.loads(line)
        if change["watch"] == "workloads" and f"-{job}-" in change["object"]["metadata"]["name"]:
            status = queue_status(change["object"])
            if not found or status.line != found[-1].line:
                found.append(status)
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
        "Admitted by ClusterQueue q70b with flavor q70b.",
        "The job lost its quota and will be queued again: the ClusterQueue is stopped.",
        "Queued in LocalQueue queue: the ClusterQueue is stopped. An administrator must correct this.",
        "Queued in LocalQueue queue: ClusterQueue q70b is inactive: it is stopped, or not completely set up. "
        "An administrator must correct this.",
        "Admitted by ClusterQueue q70b with flavor q70b.",
        "The queue has released the job's quota.",
    ],
    ("70c-kueue-queue-missing", "lost"): [
        "Queued in LocalQueue lost: Kueue has not looked at the job yet.",
        "Queued in LocalQueue lost: ClusterQueue nosuch-70c doesn't exist. An administrator must correct this.",
        "Queued in LocalQueue queue: ClusterQueue nosuch-70c doesn't exist. An administrator must correct this.",
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
}


@pytest.mark.parametrize(("name", "job"), LINES)
def test_lines_about_recorded_workloads(name: str, job: str) -> None:
    assert [status.line for status in recorded(name, job)] == LINES[name, job]


def test_preemption_is_counted_and_explained() -> None:
    preempted = next(s for s in recorded("72b-kueue-trainjob-preemption", "low") if s.phase is QueuePhase.EVICTING)
    assert (preempted.evictions, preempted.preemptions, preempted.ever_admitted) == (1, 1, True)
    why = "preempted: a job with a higher priority in the ClusterQueue needs the quota"
    assert preempted.last_eviction == Eviction("Preempted", why, "2026-11-22T02:04:13Z")
    assert preempted.last_eviction.preempted


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
def test_a_job_never_fits_only_if_every_flavor_says_so(message: str, phase: QueuePhase) -> None:
    status = queue_status(workload(pending(PREFIX + message)))
    assert status.phase is phase
    assert (status.fails_after_seconds == 600) is (phase is QueuePhase.NEVER_FITS)


def test_a_job_that_was_admitted_once_may_fit_again() -> None:
    lost = condition("Admitted", "False", "NoReservation", "The workload has no reservation")
    assert queue_status(workload(pending(PREFIX + ABOVE.format("a100")), lost)).phase is QueuePhase.WAITING


def test_newer_releases_give_the_reason_exceeds_max_quota() -> None:
    assert queue_status(workload(pending("too large", "ExceedsMaxQuota"))).phase is QueuePhase.NEVER_FITS
    waits = queue_status(workload(pending(PREFIX + UNUSED.format("a100"), "ExceedsMaxQuota")))
    assert waits.phase is QueuePhase.WAITING


def test_line_names_missing_and_excessive_quota() -> None:
    either = queue_status(workload(pending(f"{PREFIX}{UNUSED.format('a100')}, {UNUSED.format('h100')}")))
    assert either.line == (
        "Queued in LocalQueue team-a: needs 4 nvidia.com/gpu more in flavor a100 "
        "or 4 nvidia.com/gpu more in flavor h100."
    )
    never = queue_status(workload(pending(PREFIX + ABOVE.format("a100"))))
    assert never.line == (
        "Queued in LocalQueue team-a: asks for more than the whole quota (24 nvidia.com/gpu of at most 16 in flavor "
        "a100): it can never run here."
    )


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("LocalQueue team-a doesn't exist", "LocalQueue team-a doesn't exist"),
        ("ClusterQueue  doesn't exist", "its ClusterQueue doesn't exist"),
        ("LocalQueue team-a is inactive", "LocalQueue team-a is inactive: it is stopped, or not completely set up"),
    ],
)
def test_a_missing_or_stopped_queue_waits_for_an_administrator(message: str, why: str) -> None:
    status = queue_status(workload(pending(message, "Inadmissible")))
    assert (status.phase, status.why, status.fails_after_seconds) == (QueuePhase.MISCONFIGURED, why, None)


@pytest.mark.parametrize("cause", ["RequeuingLimitExceeded", "MaximumExecutionTimeExceeded", "AdmissionCheck"])
def test_job_that_kueue_gave_up_on_fails_at_once(cause: str) -> None:
    evicted = condition("Evicted", "True", f"DeactivatedDueTo{cause}", "The workload is deactivated")
    status = queue_status(workload(pending("The workload is deactivated"), evicted, active=False))
    assert (status.phase, status.fails_after_seconds) == (QueuePhase.GIVEN_UP, 0)
    assert status.line.startswith("Kueue ")


def test_deactivated_workload_waits_without_limit() -> None:
    evicted = condition("Evicted", "True", "Deactivated", "The workload is deactivated")
    for status in (queue_status(workload(active=False)), queue_status(workload(evicted, active=False))):
        assert (status.phase, status.fails_after_seconds) == (QueuePhase.DEACTIVATED, None)


def test_an_old_reason_of_a_workload_that_is_active_again_is_ignored() -> None:
    evicted = condition("Evicted", "True", "DeactivatedDueToRequeuingLimitExceeded", "The workload is deactivated")
    assert queue_status(workload(pending("x"), evicted)).phase is QueuePhase.WAITING


def test_open_admission_checks_are_named() -> None:
    reserved = condition("QuotaReserved", "True", "QuotaReserved")
    checks = [{"name": "budget", "state": "Pending"}, {"name": "nodes", "state": "Ready"}]
    status = queue_status(workload(reserved, admissionChecks=checks))
    assert status.line == "Queued in LocalQueue team-a: has quota and waits for admission checks: budget."


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
