"""Which steps a new job repeats, and for how long."""

from __future__ import annotations

import json

import pytest

from airflow_provider_ktrain.core.formats import step_of_tries
from airflow_provider_ktrain.core.state.steps.reported_steps import ReportedSteps
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics


def reported(before: float | None, *steps: float) -> ReportedSteps:
    """Steps of a job that reports one each 10 s."""
    found = ReportedSteps(before)
    for number, step in enumerate(steps):
        found.record(step, 1000.0 + 10 * number)
    return found


@pytest.mark.parametrize(
    ("before", "steps", "count", "seconds"),
    [
        (100, (91, 92, 99, 100, 101, 102), 10, 30),  # it resumed after step 90
        (100, (91, 95), 5, 10),  # it failed before it had caught up
        (100, (101, 102), 0, 0),  # it resumed after the last step
        (100, (100, 200), 1, 0),  # the program reports every 100 steps
        (3, (1, 2, 3, 4), 3, 20),  # it began at the beginning
        (100, (91, 95, 91, 96, 100, 101), 10, 40),  # its pods restarted meanwhile
        (5, (4.0, 5.0), 2, 10),
    ],
)
def test_steps_up_to_the_last_one_of_earlier_tries_are_repeated(
    before: float, steps: tuple[float, ...], count: int, seconds: float
) -> None:
    found = reported(before, *steps)
    used = found.usage(gpus=2, held=1000.0)
    assert used == {"repeated_steps": count, "repeated": 2.0 * seconds}
    assert ("Repeated: steps " in found.describe(used, "GPU")) is (count > 0)


def test_message_names_the_steps() -> None:
    found = reported(1200, 1001, 1200, 1201)
    assert found.describe(found.usage(gpus=4, held=1000), "GPU") == (
        "Repeated: steps 1,001 to 1,200, which an earlier try had reached (about 40.0 GPU-seconds)."
    )


@pytest.mark.parametrize("unknown", [reported(None, 1, 2), reported(7), reported(2.5, 1, 2, 3), reported(3, 0.5, 1.0)])
def test_nothing_is_counted_without_whole_steps_of_both_tries(unknown: ReportedSteps) -> None:
    assert unknown.usage(gpus=1, held=10.0) == {}
    assert unknown.describe({}, "GPU") == ""


def test_repeated_time_is_a_part_of_what_was_held() -> None:
    assert reported(9, 1, 9).usage(gpus=8, held=25.0)["repeated"] == 25.0


def test_steps_are_counted_across_a_handover() -> None:
    metrics = TrainingMetrics({"steps": {"before": 5}})
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 4}', 1000.0)
    continued = TrainingMetrics(json.loads(json.dumps(metrics.handover())))
    continued.read_line("Master 0", 'KTRAIN_METRIC {"step": 5, "loss": 0.5}', 1010.0)
    continued.read_line("Master 0", 'KTRAIN_METRIC {"step": 6, "loss": 0.4}', 1020.0)
    assert continued.steps.usage(gpus=1, held=100.0) == {"repeated_steps": 2, "repeated": 10.0}
    assert continued.steps.highest == 6


@pytest.mark.parametrize("handed_over", [{}, {"steps": None}, {"steps": {"before": "5", "later": 1}}])
def test_handover_of_another_release_is_read(handed_over: dict[str, object]) -> None:
    assert TrainingMetrics(handed_over).steps == ReportedSteps()


def test_highest_step_of_earlier_tries() -> None:
    tries = [{"try_number": 1, "step": 900}, {"try_number": 3, "step": 100}, {"try_number": 4, "step": 95}, {}, None]
    stored = {"version": 1, "tries": [*tries, {"try_number": 5, "step": 500}, {"try_number": 2, "step": None}]}
    assert step_of_tries(stored, 3, 5) == 100, "tries before the clear and this try don't count"
    assert step_of_tries(stored, 1, 5) == 900
    assert step_of_tries(stored, 2, 3) is None
    assert step_of_tries(None, 1, 5) is None
