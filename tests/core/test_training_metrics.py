"""Metrics that a training reports while it runs, and their limits."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.state.steps.training_metrics import (
    MAX_HANDOVER_BYTES,
    MAX_NAMES,
    MAX_POINTS,
    MAX_SERIES_BYTES,
    TAKEOVER_SECONDS,
    TrainingMetrics,
    parse_metric_line,
)


def reported(*lines: tuple[str, float, str]) -> TrainingMetrics:
    """Metrics after these lines: source, time and JSON object."""
    metrics = TrainingMetrics()
    for line in lines:
        read(metrics, line)
    return metrics


def read(metrics: TrainingMetrics, line: tuple[str, float, str]) -> None:
    source, at, text = line
    metrics.read_line(source, f"KTRAIN_METRIC {text}", at)


def continued(metrics: TrainingMetrics) -> TrainingMetrics:
    """Those of the next process, which has read the status of the one before."""
    again = TrainingMetrics(json.loads(json.dumps(metrics.handover(), allow_nan=False)))
    again.take_earlier(status(metrics))
    return again


def loss(source: str, step: int, value: float, at: float | None = None) -> tuple[str, float, str]:
    return source, float(step) if at is None else at, json.dumps({"step": step, "loss": value})


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('KTRAIN_METRIC {"step": 1, "loss": 0.5}', {"step": 1, "loss": 0.5}),
        ('epoch 3 KTRAIN_METRIC {"loss": 0.5} done', {"loss": 0.5}),
        ('KTRAIN_METRIC {"loss": "low", "ok": true, "nested": {"a": 1}, "acc": 1}', {"acc": 1}),
        ("KTRAIN_METRIC [1, 2]", {}),
        ("KTRAIN_METRIC {", {}),
        ("loss 0.5", {}),
        ('KTRAIN_METRIC {"n": ' + "9" * 400 + "}", {}),
        ("KTRAIN_METRIC " + "[" * 10000, {}),
    ],
)
def test_numbers_of_a_line(line: str, found: dict[str, float]) -> None:
    assert parse_metric_line(line) == found


def test_series_follows_the_first_replica() -> None:
    metrics = reported(loss("Master 0", 1, 2.0), loss("Worker 0", 1, 3.0), loss("Worker 0", 2, 3.0))
    assert metrics.points() == {"loss": [[1, 2.0]]}


def test_another_replica_continues_after_a_silence() -> None:
    late = 1 + TAKEOVER_SECONDS
    metrics = reported(loss("Master 0", 1, 2.0), loss("Worker 0", 2, 1.5, at=late))
    assert metrics.points() == {"loss": [[1, 2.0], [2, 1.5]]}


def test_restart_from_a_checkpoint_drops_later_points() -> None:
    metrics = reported(*(loss("Master 0", step, 1 / (step + 1)) for step in (0, 10, 20, 30)), loss("Master 0", 10, 0.7))
    assert metrics.points() == {"loss": [[0, 1.0], [10, 0.7]]}
    assert metrics.summary()["loss"] == {"last": 0.7, "step": 10, "best": 0.7, "best_step": 10}


def test_reports_without_a_step_are_numbered() -> None:
    metrics = reported(("Master 0", 1.0, '{"acc": 0.1}'), ("Master 0", 2.0, '{"acc": 0.4}'))
    assert metrics.points() == {"acc": [[1, 0.1], [2, 0.4]]}
    assert metrics.step is None


def test_nan_and_infinity_are_kept() -> None:
    metrics = reported(
        ("Master 0", 1.0, '{"step": 1, "loss": 0.5}'),
        ("Master 0", 2.0, '{"step": 2, "loss": NaN}'),
        ("Master 0", 3.0, '{"step": 3, "loss": -Infinity}'),
    )
    assert metrics.points() == {"loss": [[1, 0.5], [2, "NaN"], [3, "-Infinity"]]}
    assert metrics.summary()["loss"] == {"last": "-Infinity", "step": 3, "best": 0.5, "best_step": 1}
    assert continued(metrics).points() == metrics.points()


def test_best_is_the_lowest_loss_and_the_highest_accuracy() -> None:
    metrics = reported(
        *(("Master 0", s, f'{{"step": {s}, "loss": {v}, "acc": {v}}}') for s, v in ((1, 2), (2, 1), (3, 3)))
    )
    assert metrics.summary()["loss"]["best_step"] == 2
    assert metrics.summary()["acc"]["best_step"] == 3


def test_names_beyond_the_limit_are_omitted() -> None:
    metrics = reported(("Master 0", 1.0, json.dumps({f"m{i}": i for i in range(MAX_NAMES + 3)})))
    assert len(metrics.summary()) == MAX_NAMES
    assert set(metrics.omitted) == {f"m{i}" for i in range(MAX_NAMES, MAX_NAMES + 3)}


def test_progress_is_a_higher_step() -> None:
    metrics = reported(loss("Master 0", 5, 1.0, at=100.0), loss("Master 0", 5, 1.0, at=200.0))
    assert (metrics.step, metrics.progress_at) == (5, 100.0)
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 6}', 300.0)
    assert (metrics.step, metrics.progress_at) == (6, 300.0)


def test_restart_of_the_reporting_replica_is_progress_and_a_slow_replica_is_not() -> None:
    metrics = reported(loss("Master 0", 50, 1.0, at=100.0), loss("Worker 0", 20, 1.0, at=200.0))
    assert (metrics.step, metrics.progress_at) == (50, 100.0)
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 40, "loss": 1}', 300.0)
    assert (metrics.step, metrics.progress_at) == (40, 300.0)


def test_trainer_status_of_a_trainjob() -> None:
    metrics = TrainingMetrics()
    for percentage, value in ((10, "1.5"), (55, "0.4")):
        status = {
            "progressPercentage": percentage,
            "lastUpdatedTime": "2026-11-22T02:12:36Z",
            "metrics": [{"name": "loss", "value": value}, {"name": "note", "value": "text"}],
        }
        metrics.read_trainer_status({"status": {"trainerStatus": status}})
    assert metrics.points() == {"loss": [[10, 1.5], [55, 0.4]], "progress": [[10, 10], [55, 55]]}
    assert metrics.step == 55
    metrics.read_trainer_status({"status": {}})
    assert metrics.step == 55


numbers = st.floats() | st.integers()
reports = st.lists(
    st.tuples(
        st.sampled_from(["Master 0", "Worker 0", "Worker 1"]),
        st.floats(0, 1e6),
        st.dictionaries(st.sampled_from(["step", "loss", "acc", "ü\ud800", "x" * 100]), numbers, max_size=4),
    ),
    max_size=60,
)


@given(reports)
def test_any_reports_stay_bounded_and_survive_a_handover(lines: list[tuple[str, float, dict[str, float]]]) -> None:
    metrics = TrainingMetrics()
    for source, at, values in lines:
        metrics.read_line(source, f"KTRAIN_METRIC {json.dumps(values)}", at)
    again = continued(metrics)
    assert again.points() == metrics.points()
    for one in (again, TrainingMetrics(metrics.handover())):
        assert (one.summary(), one.step) == (metrics.summary(), metrics.step)
    for series in metrics.points().values():
        steps = [float(step) for step, _ in series]
        assert steps == sorted(steps)


def test_points_of_a_long_series_are_spread_evenly_over_its_steps() -> None:
    """Also after the series was thinned many times."""
    metrics = reported(*(loss("Master 0", step, 1.0) for step in range(20_001)))
    steps = [step for step, _ in metrics.points()["loss"]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(steps)]
    assert (steps[0], steps[-1]) == (0, 20_000)
    assert MAX_POINTS / 2 < len(steps) <= MAX_POINTS
    assert max(gaps) < 3 * 20_000 / len(steps)


def test_series_at_their_limits() -> None:
    metrics = TrainingMetrics()
    for step in range(1000):
        values = {"step": step, **{f"metric-{i}": math.sin(step * i) * 1e-5 for i in range(MAX_NAMES)}}
        metrics.read_line("Master 0", f"KTRAIN_METRIC {json.dumps(values)}", float(step))
    points = metrics.points()
    assert len(points) == MAX_NAMES
    assert len(json.dumps(points, separators=(",", ":"))) <= MAX_SERIES_BYTES
    assert len(json.dumps(metrics.handover()["series"])) < 3 * MAX_HANDOVER_BYTES
    assert all(series[0][0] == 0 and series[-1][0] == 999 for series in points.values())
    one = reported(*(loss("Master 0", step, 1.0) for step in range(5000)))
    assert MAX_POINTS * 0.8 <= len(one.points()["loss"]) <= MAX_POINTS


def status(metrics: TrainingMetrics) -> dict[str, Any]:
    return {"series": metrics.points(), "metrics": metrics.summary()}


@pytest.mark.parametrize("is_read_first", [True, False], ids=["status first", "log first"])
@pytest.mark.parametrize("has_handed_over", [True, False])
def test_points_of_a_lost_process_come_before_those_of_the_next(is_read_first: bool, has_handed_over: bool) -> None:
    """Its last status has them. The next process has the handover from before it, and reads the log from its end."""
    worker = reported(loss("Worker 0", 5, 0.9), loss("Worker 0", 10, 0.8))
    handover = worker.handover() if has_handed_over else {}
    lost = TrainingMetrics(handover)
    for one in (loss("Worker 0", 20, 0.1), loss("Worker 0", 30, 0.4)):
        read(lost, one)
    metrics = TrainingMetrics(handover)
    if is_read_first:
        metrics.take_earlier(status(lost))
    for one in (loss("Worker 0", 25, 0.3), loss("Worker 0", 40, 0.3)):
        read(metrics, one)
    if not is_read_first:
        metrics.take_earlier(status(lost))
    handed_over = [[5, 0.9], [10, 0.8]] if has_handed_over else []
    assert metrics.points() == {"loss": [*handed_over, [20, 0.1], [25, 0.3], [40, 0.3]]}
    assert metrics.summary()["loss"] == {"last": 0.3, "step": 40, "best": 0.1, "best_step": 20}


def test_points_that_a_lost_process_has_dropped_do_not_come_back() -> None:
    """It saw the training go back to a checkpoint, after a step that had been handed over."""
    handover = reported(loss("Worker 0", 40, 0.1), loss("Worker 0", 45, 0.3)).handover()
    lost, metrics = TrainingMetrics(handover), TrainingMetrics(handover)
    read(lost, loss("Worker 0", 30, 0.6))
    metrics.take_earlier(status(lost))
    assert metrics.points() == {"loss": [[30, 0.6]]}
    assert metrics.summary()["loss"] == {"last": 0.6, "step": 30, "best": 0.6, "best_step": 30}


def test_name_that_contains_a_secret_is_not_taken_from_a_status() -> None:
    """Nobody can tell which of the names it is."""
    metrics = reported(loss("Worker 0", 15, 0.7))
    metrics.take_earlier({"series": {"***_loss": [[10, 0.9]]}})
    assert metrics.points() == {"loss": [[15, 0.7]]}


def test_earlier_lines_that_are_read_late_keep_their_place() -> None:
    """After a takeover, lines since the handover are read beside the new ones."""
    handed_over = TrainingMetrics()
    for step in range(10):
        handed_over.read_line("Master 0", f'KTRAIN_METRIC {{"step": {step}, "loss": {100 - step}}}', float(step))
    metrics = continued(handed_over)
    for new, earlier in zip(range(20, 30), range(5, 15), strict=True):  # it had gone back to step 5
        metrics.read_line("Master 0", f'KTRAIN_METRIC {{"step": {new}, "loss": {100 - new}}}', float(new))
        metrics.read_line("Master 0", f'KTRAIN_METRIC {{"step": {earlier}, "loss": 50}}', earlier + 10.0, earlier=True)
    expected = [
        *([n, 100 - n] for n in range(5)),
        *([n, 50] for n in range(5, 15)),
        *([n, 100 - n] for n in range(20, 30)),
    ]
    assert metrics.points() == {"loss": expected}
    assert metrics.summary()["loss"]["last"] == 71
    assert (metrics.step, metrics.progress_at) == (29, 29.0)


def test_earlier_lines_of_steps_that_the_training_has_gone_back_from_are_left_out() -> None:
    metrics = TrainingMetrics()
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 3, "loss": 1}', 50.0)
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 2, "loss": 3}', 10.0, earlier=True)
    metrics.read_line("Master 0", 'KTRAIN_METRIC {"step": 7, "loss": 2}', 20.0, earlier=True)
    assert metrics.points() == {"loss": [[2, 3], [3, 1]]}
    assert metrics.step == 7
