"""The reaper releases only jobs that no process follows."""

from __future__ import annotations

import functools

import pytest

from airflow_provider_ktrain.core.identity.names import (
    FINISH_ANNOTATION,
    SUSPENDED_ANNOTATION,
    Owner,
    TaskKey,
)
from airflow_provider_ktrain.core.identity.reaping import is_kept, judge
from tests.factories import owned_job

OWNER = Owner(TaskKey("prod", "dag", "train", "run-1"), 1, "ti-1")
ENDED_STATES = ["success", "failed", "upstream_failed", "skipped", "removed", "absent"]
ACTIVE_STATES = [
    "none", "running", "deferred", "queued", "scheduled", "restarting", "up_for_retry", "up_for_reschedule",
    "awaiting_input", "unknown (no answer)", "a state of a later Airflow",
]  # fmt: skip


job = functools.partial(owned_job, OWNER)


@pytest.mark.parametrize("state", ENDED_STATES)
def test_a_job_is_orphaned_if_its_task_has_ended(state: str) -> None:
    verdict = judge(job(), "prod", state, held=2)
    assert verdict.orphan
    assert f"its task is {state}" in verdict.reason
    assert judge(job(), "prod", state, held=0).orphan, "unfinished: its operator may start pods again"


@pytest.mark.parametrize("state", ACTIVE_STATES)
@pytest.mark.parametrize("condition", ["Running", "Failed", "Suspended"])
def test_a_job_is_not_orphaned_while_its_task_is_active(state: str, condition: str) -> None:
    assert not judge(job(condition), "prod", state, held=2).orphan


@pytest.mark.parametrize("owner", [None, Owner(TaskKey("staging", "dag", "train", "run-1"), 1, "ti-1")])
def test_jobs_of_other_deployments_are_never_orphaned(owner: Owner | None) -> None:
    assert not judge(owned_job(owner), "prod", "failed", held=2).orphan


def test_a_job_that_is_being_deleted_is_not_orphaned() -> None:
    assert not judge(job(deletionTimestamp="2026-11-21T10:00:00Z"), "prod", "failed", held=2).orphan


@pytest.mark.parametrize(
    ("condition", "held", "orphan"), [("Succeeded", 0, False), ("Failed", 0, False), ("Failed", 1, True)]
)
def test_kept_job_is_orphaned_only_if_it_holds_gpus(condition: str, held: int, orphan: bool) -> None:
    assert judge(job(condition), "prod", "failed", held).orphan is orphan


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize(
    ("condition", "action", "goes"),
    [
        ("Succeeded", "delete_job", True),
        ("Failed", "delete_job", True),
        ("Succeeded", "delete_succeeded_job", True),
        ("Failed", "delete_succeeded_job", False),
        ("Succeeded", "keep_job", False),
    ],
)
def test_an_ended_job_that_was_not_deleted_is_orphaned(condition: str, action: str, goes: bool, held: int) -> None:
    """The task was marked, or its worker was lost, between the trigger's event and the deletion of the job."""
    ended = job(condition, annotations={FINISH_ANNOTATION: action})
    assert is_kept(ended) is not goes
    for state in ENDED_STATES:
        assert judge(ended, "prod", state, held).orphan is (goes or held > 0)
    for state in ACTIVE_STATES:
        assert not judge(ended, "prod", state, held).orphan


@pytest.mark.parametrize(("held", "orphan"), [(0, False), (1, True)])
def test_a_job_suspended_by_a_release_is_orphaned_only_if_it_holds_gpus(held: int, orphan: bool) -> None:
    kept = job("Suspended", annotations={SUSPENDED_ANNOTATION: "ti-1"})
    assert judge(kept, "prod", "failed", held).orphan is orphan
