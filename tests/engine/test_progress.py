"""`progress_timeout`: a training that reports no higher step is released, and one that makes progress isn't."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterable

import pytest

from airflow_provider_ktrain.core.kinds import TRAINJOB, Kind
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import stamp
from tests.engine.staged import Staged, of_each_kind, staged

pytestmark = pytest.mark.virtual_time

BOTH = ("Master", "Worker")


def step(number: int) -> str:
    return f'KTRAIN_METRIC {{"step": {number}}}'


def repeats() -> Iterable[str]:
    """A training that hangs after one step, and still logs."""
    return itertools.repeat(step(7))


def advances(last: int = 10_000) -> Iterable[str]:
    return map(step, range(1, last + 1))


def summary_of(outcome: Outcome) -> str:
    assert outcome.cause is not None
    assert outcome.cause["category"] == "hang"
    assert outcome.released
    return str(outcome.cause["summary"])


async def test_training_that_reports_no_step_is_released() -> None:
    async with staged() as training:
        training.start("no step")
        training.prints(itertools.repeat("still no step"), every=0.3)
        outcome = await training.follow(Options(limits=Limits(progress=3)))
        assert training.decided_after == 3.0
        assert "reported no step for 3 s (progress_timeout)" in summary_of(outcome)
        assert not training.exists


@of_each_kind
@pytest.mark.parametrize(
    ("limits", "logs", "lines", "summary"),
    [
        (Limits(progress=3), "all", 1000, "reported no step higher than 7 for 3 s (progress_timeout)"),
        (Limits(progress=3), "none", 1000, "reported no step higher than 7 for 3 s (progress_timeout)"),
        (Limits(log_stall=3), "none", 1, "wrote no log line for 3 s (log_stall_timeout)"),
    ],
    ids=["progress", "progress, logs not followed", "log stall, logs not followed"],
)
async def test_training_that_hangs_is_released(kind: Kind, limits: Limits, logs: str, lines: int, summary: str) -> None:
    async with staged(kind) as training:
        training.start()
        training.prints(itertools.islice(repeats(), lines), every=0.3)
        outcome = await training.follow(Options(limits=limits, logs=logs))
        assert training.decided_after == 3.0
        assert f"{kind.name} {training.ref.name} {summary}" in summary_of(outcome)
        assert not training.exists


@of_each_kind
@pytest.mark.parametrize("remembers", [True, False], ids=["takeover", "adoption"])
async def test_training_that_made_progress_while_nobody_looked_goes_on(kind: Kind, remembers: bool) -> None:
    async with staged(kind) as training:
        training.start()
        training.prints(advances(), every=0.5)
        options = Options(limits=Limits(progress=15))
        seen = await training.hand_over(1.2, options)
        assert seen.training_metrics["step"] == 3
        await asyncio.sleep(20)
        ended = await training.hand_over(8, options, seen if remembers else None)
        assert ended.training_metrics["step"] == 59


async def test_clock_is_not_reset_by_takeovers() -> None:
    """Each process stops before the limit, counted from its own start, has passed."""
    async with staged() as training:
        training.start()
        training.prints(repeats(), every=0.3)
        options = Options(limits=Limits(progress=30))
        handover = await training.hand_over(20, options)
        outcome = await training.follow(options, handover)
        assert training.decided_after == 10.0
        assert "reported no step higher than 7 for 30 s" in summary_of(outcome)


async def test_training_with_steps_is_not_released() -> None:
    async with staged() as training:
        training.start()
        training.prints(advances(10), every=2.9)
        training.after(29.0, training.end)
        outcome = await training.follow(Options(limits=Limits(progress=3)))
        assert outcome.succeeded
        assert outcome.training_metrics == {}, "a step alone is no metric"


@of_each_kind
async def test_steps_of_replicas_that_are_not_followed_are_progress(kind: Kind) -> None:
    async with staged(kind) as training:
        training.start()
        training.prints(advances(), every=0.5)
        limits = Limits(progress=10, log_stall=10)
        ended = await training.hand_over(25, Options(limits=limits, logs="none"))
        assert ended.training_metrics["step"] > 40


async def test_steps_of_the_master_are_progress_if_only_a_worker_is_followed() -> None:
    """The Worker is silent: Megatron, for example, prints on one rank only."""
    async with staged(roles=BOTH) as training:
        training.start()
        training.prints(advances(), every=0.5)
        limits = Limits(progress=10, log_stall=10)
        await training.hand_over(25, Options(limits=limits, logs={"Worker": [0]}))


async def test_unreadable_logs_end_no_training() -> None:
    async with staged() as training:
        training.start(step(7))
        training.api.fail("GET", "/log", 403, math.inf)
        await training.hand_over(70, Options(limits=Limits(progress=2), logs="none"))
        (warning,) = [line for line in training.log.messages if "may have hung" in line]
        assert "because its latest log lines can't be read" in warning
        assert training.exists


def report(training: Staged, percentage: int) -> None:
    """The program reports to the Trainer's status server (recording 61)."""
    status = {"progressPercentage": percentage, "lastUpdatedTime": stamp()}
    training.api.change(TRAINJOB.plural, training.ref.name, lambda job: job["status"].update(trainerStatus=status))


async def test_higher_percentage_of_a_trainjob_is_progress() -> None:
    """The log isn't followed."""
    async with staged(TRAINJOB) as training:
        training.start()
        training.condition()
        for percentage in range(1, 22):
            training.after(float(percentage - 1), report, training, percentage)
        outcome = await training.follow(Options(limits=Limits(progress=8), logs="none"))
        assert training.decided_after == 28.0
        assert "reported no step higher than 21 for 8 s (progress_timeout)" in summary_of(outcome)
