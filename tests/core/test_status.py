"""The phase depends on the set of conditions, not on their order."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.state.status import Phase, phase_of

TYPES = ("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Complete")
SEQUENCES: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "recordings" / "conditions.json").read_text()
)


def job(conditions: list[tuple[str, str]], *, started: bool = False, suspend: bool = False) -> dict[str, Any]:
    status: dict[str, Any] = {"conditions": [{"type": type_, "status": status} for type_, status in conditions]}
    if started:
        status["startTime"] = "2026-11-21T10:00:00Z"
    return {"spec": {"runPolicy": {"suspend": suspend}}, "status": status}


def recorded(state: dict[str, Any]) -> dict[str, Any]:
    return job(
        [(c[0], c[1]) for c in state["conditions"]],
        started=state.get("started", False),
        suspend=state.get("suspend", False),
    )


condition = st.tuples(st.sampled_from(TYPES), st.sampled_from(["True", "False", "Unknown"]))
conditions = st.lists(condition, unique_by=lambda c: c[0])


@given(conditions, st.booleans(), st.booleans(), st.randoms())
def test_the_order_of_conditions_does_not_matter(
    conditions: list[tuple[str, str]], started: bool, suspend: bool, random: Any
) -> None:
    shuffled = list(conditions)
    random.shuffle(shuffled)
    assert phase_of(job(shuffled, started=started, suspend=suspend)) is phase_of(
        job(conditions, started=started, suspend=suspend)
    )


@given(conditions, st.booleans(), st.booleans())
def test_terminal_conditions_win(conditions: list[tuple[str, str]], started: bool, suspend: bool) -> None:
    true = {type_ for type_, status in conditions if status == "True"}
    phase = phase_of(job(conditions, started=started, suspend=suspend))
    assert phase.ended == bool(true & {"Succeeded", "Complete", "Failed"})
    assert (phase is Phase.SUCCEEDED) == bool(true & {"Succeeded", "Complete"})


EXPECTED = {
    "01-pt-success/train": "Pending Pending Running Succeeded",
    "05-pt-never-fail/fails": "Pending Pending Running Failed",
    "09-pt-exitcode-130/exitcode": "Pending Pending Running Restarting Running Succeeded",
    "13b-pt-activedeadline-quiet/deadline": "Pending Pending Running",
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_recorded_jobs_stay_terminal(name: str) -> None:
    phases = [phase_of(recorded(state)) for state in SEQUENCES[name]]
    ends = [i for i, phase in enumerate(phases) if phase.ended]
    assert len({phases[i] for i in ends}) <= 1
    assert ends == list(range(len(phases)))[len(phases) - len(ends) :]  # a finished job stays finished
    if name in EXPECTED:
        assert " ".join(phases) == EXPECTED[name]
    for state in SEQUENCES[name]:
        for order in permutations(state["conditions"]):
            assert phase_of(recorded(state | {"conditions": list(order)})) is phase_of(recorded(state))


def test_running_false_after_succeeded_is_ignored() -> None:
    assert phase_of(job([("Created", "True"), ("Succeeded", "True"), ("Running", "False")])) is Phase.SUCCEEDED


def test_a_suspended_job_is_queued_until_it_has_started() -> None:
    assert phase_of(job([], suspend=True)) is Phase.QUEUED
    assert phase_of(job([("Created", "True"), ("Suspended", "True")], suspend=True)) is Phase.QUEUED
    assert phase_of(job([("Suspended", "True"), ("Running", "False")], started=True, suspend=True)) is Phase.SUSPENDED
    assert phase_of(job([("Created", "True"), ("Suspended", "False")], started=True)) is Phase.PENDING
    assert phase_of({"spec": {"suspend": True}}) is Phase.QUEUED  # a batch Job


def test_pods_distinguish_pending_from_starting() -> None:
    placed: dict[str, Any] = {"spec": {"nodeName": "n"}}
    waiting: dict[str, Any] = {"spec": {}}
    assert phase_of(job([("Created", "True")]), []) is Phase.PENDING
    assert phase_of(job([("Created", "True")]), [placed, waiting]) is Phase.PENDING
    assert phase_of(job([("Created", "True")]), [placed, placed]) is Phase.STARTING
    assert phase_of(job([("Running", "True")]), [waiting]) is Phase.RUNNING


def test_a_missing_job_is_gone() -> None:
    assert phase_of(ABSENT) is Phase.GONE
    assert Phase.GONE.ended


@pytest.mark.parametrize("status", [None, {}, {"conditions": None}, {"conditions": ["odd", {}, {"type": "Running"}]}])
def test_malformed_statuses_have_no_true_condition(status: Any) -> None:
    assert true_conditions({"status": status}) == {}
    assert phase_of({"status": status}) is Phase.PENDING
