"""The rules by which a training's life ends."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.end_rules import CONDITIONS, RULES, Rule, Task, decide, deletes, task_of
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.state.status import Seen
from tests.core.end_properties import PROPERTIES, SCENARIOS, Scenario, situations


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    assert scenario.holds(RULES)


def test_properties_hold_in_every_situation() -> None:
    for situation in situations():
        rule = decide(situation)
        failing = [prop.__name__ for prop in PROPERTIES if not prop(situation, rule)]
        assert not failing, f"{rule.name} in {situation}"


@pytest.mark.parametrize("removed", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_needed(removed: Rule) -> None:
    """A scenario notices that the rule is missing. scripts/mutations.py removes each rule and runs all tests."""
    rest = [rule for rule in RULES if rule is not removed]
    if removed is RULES[-1]:
        assert all(getattr(removed, name) is None for name in CONDITIONS)
    else:
        assert any(not scenario.holds(rest) for scenario in SCENARIOS)


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("action", "deleted"),
    [
        (OnFinishAction.DELETE_JOB, set(Seen) - {Seen.NOTHING, Seen.GONE}),
        (OnFinishAction.DELETE_SUCCEEDED_JOB, {Seen.RUNNING, Seen.PRIMARY_ENDED, Seen.SUCCEEDED}),
        (OnFinishAction.KEEP_JOB, set()),
    ],
)
def test_only_keep_job_keeps_an_unfinished_job(action: OnFinishAction, deleted: set[Seen]) -> None:
    assert {seen for seen in Seen if seen not in (Seen.NOTHING, Seen.GONE) and deletes(action, seen)} == deleted


@pytest.mark.parametrize(
    ("state", "task"),
    [
        ("failed", Task.OVER), ("success", Task.OVER), ("skipped", Task.OVER), ("absent", Task.OVER),
        ("none", Task.CLEARED), ("restarting", Task.CLEARED), ("running", Task.RUNNING), ("queued", Task.CHANGING),
        ("scheduled", Task.CHANGING), ("deferred", Task.ELSEWHERE), ("up_for_retry", Task.ELSEWHERE),
        ("of a later Airflow", Task.ELSEWHERE), ("", Task.UNKNOWN),
    ],
)  # fmt: skip
def test_state_of_the_task(state: str, task: Task) -> None:
    assert task_of(state) is task
