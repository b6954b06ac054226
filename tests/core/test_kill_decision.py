"""The state of a task in Airflow determines what a kill does with the task's job."""

from __future__ import annotations

import pytest
from airflow.sdk import TaskInstanceState

from airflow_provider_ktrain.core.kill_decision import (
    ABSENT,
    NONE,
    UNKNOWN,
    KillAction,
    action_for_trigger,
    decision_for_worker,
)

RELEASED = {"failed", "success", "skipped", "upstream_failed", "removed", NONE, ABSENT}
ASKED_AGAIN = {"scheduled", "queued", UNKNOWN}
STATES = [*(str(state.value) for state in TaskInstanceState), NONE, ABSENT, UNKNOWN, "of a later Airflow"]


@pytest.mark.parametrize("state", STATES)
def test_action_of_a_killed_trigger(state: str) -> None:
    expected = (
        KillAction.RELEASE if state in RELEASED else KillAction.ASK_AGAIN if state in ASKED_AGAIN else KillAction.KEEP
    )
    assert action_for_trigger(state) is expected


@pytest.mark.parametrize("retry_left", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_action_of_a_stopped_worker(state: str, retry_left: bool) -> None:
    """A cleared task is restarting. If a task is running or its state is unknown, the job is kept only for a retry."""
    if state in RELEASED | {"restarting"}:
        expected = KillAction.RELEASE
    elif state in ("running", UNKNOWN):
        expected = KillAction.KEEP if retry_left else KillAction.RELEASE
    else:
        expected = KillAction.KEEP
    decision = decision_for_worker(state, retry_left)
    assert decision.action is expected
    assert decision.keep is (expected is KillAction.KEEP)
    assert ("kept" in decision.reason) is decision.keep
    assert len(decision.reason) < 200
