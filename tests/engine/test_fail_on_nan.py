"""`fail_on_nan`: a training whose metrics stay NaN or infinite is released, and one that recovers isn't."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import precise_stamp
from tests.engine.staged import Staged, of_each_kind, staged

pytestmark = pytest.mark.virtual_time

LOSS = Options(fail_on_nan=("loss",))
READ_AGAIN = "/log.*tailLines=100000"  # the request before the release


def report(step: int, loss: str = "NaN", name: str = "loss") -> str:
    return f'KTRAIN_METRIC {{"step": {step}, "{name}": {loss}}}'


def diverges(step: int = 120) -> Iterable[str]:
    return itertools.chain([report(step - 1, "0.5")], map(report, itertools.count(step)))


def summary_of(outcome: Outcome) -> str:
    assert outcome.cause is not None
    assert outcome.cause["category"] == "user code"
    return str(outcome.cause["summary"])


async def goes_on(training: Staged, *lines: str, options: Options = LOSS) -> None:
    """The training prints these lines, and is followed on."""
    training.start()
    training.prints(lines, every=1.0)
    await training.hand_over(60, options)
    assert training.exists


@of_each_kind
@pytest.mark.parametrize("watched", [("loss",), True])
async def test_third_report_of_nan_in_a_row_releases_the_job(kind: Kind, watched: bool | tuple[str, ...]) -> None:
    async with staged(kind) as training:
        training.start()
        training.prints(diverges(), every=10.0)
        replica = kind.replica_name(training.role, 0)
        outcome = await training.follow(Options(fail_on_nan=watched))
        assert training.decided_after == 30.0
        expected = f"{replica} reported loss 3 times in a row as NaN or infinity, since step 120 (fail_on_nan)"
        assert summary_of(outcome) == expected
        assert outcome.released
        assert not training.exists


async def test_infinity_counts_and_reports_need_no_step() -> None:
    async with staged() as training:
        training.start()
        training.prints(['KTRAIN_METRIC {"loss": Infinity}'] * 2 + ['KTRAIN_METRIC {"loss": -1e999}'], every=1.0)
        assert "3 times in a row as NaN or infinity (fail_on_nan)" in summary_of(await training.follow(LOSS))


async def test_finite_value_in_between_begins_anew() -> None:
    async with staged() as training:
        await goes_on(training, *map(report, range(1, 9), ["NaN", "NaN", "0.5"] * 3))


async def test_other_metrics_are_not_watched() -> None:
    async with staged() as training:
        await goes_on(training, *(report(step, name="grad_norm") for step in range(9)))


async def test_the_default_is_off() -> None:
    async with staged() as training:
        await goes_on(training, *map(report, range(9)), options=Options())


async def test_reports_of_different_metrics_don_t_add_up() -> None:
    async with staged() as training:
        lines = [report(step, name=f"loss{step % 4}") for step in range(8)]
        await goes_on(training, *lines, options=Options(fail_on_nan=True))


async def test_reports_of_different_replicas_don_t_add_up() -> None:
    async with staged(roles=("Master", "Worker")) as training:
        training.start()
        for role in training.roles:
            training.prints([report(1), report(2)], every=1.0, role=role)
        await training.hand_over(30, Options(logs="all", fail_on_nan=True))
        assert training.exists


async def test_reports_of_different_runs_of_a_container_don_t_add_up() -> None:
    async with staged() as training:
        training.start(report(1), report(2))
        training.after(5.0, lambda: training.pod(restarts=1, since=0.0))
        training.after(6.0, lambda: training.prints([report(1), report(2)], every=1.0))
        await training.hand_over(60, LOSS)
        assert training.exists


async def test_later_finite_value_in_the_log_keeps_the_job() -> None:
    """The stream has not delivered it yet."""
    async with staged() as training:
        training.start(report(1), report(2))

        def diverge_and_recover() -> None:
            training.line(report(3))
            training.api.log(training.pod_name()).store(precise_stamp(-0.001), report(4, "0.5"))

        training.after(5.0, diverge_and_recover)
        await training.hand_over(60, LOSS)
        assert training.exists


async def test_log_that_can_t_be_read_again_keeps_the_job() -> None:
    async with staged() as training:
        training.start(*map(report, range(3)))
        training.api.fail("GET", READ_AGAIN, 403, math.inf)
        training.after(60.0, training.api.clear_failures)
        outcome = await training.follow(LOSS)
        assert 60 <= training.decided_after < 70
        assert "since step 0" in summary_of(outcome)
        (warning,) = [line for line in training.log.messages if "has reported NaN or infinity" in line]
        assert "It is not released, because its log can't be read again." in warning


async def test_end_of_the_program_counts_before_the_limit() -> None:
    async with staged() as training:
        training.start()
        training.api.fail("GET", READ_AGAIN, 503, math.inf)
        training.prints(diverges(), every=1.0)
        training.after(20.0, training.end)
        assert (await training.follow(LOSS)).succeeded


async def test_reports_before_a_handover_count() -> None:
    async with staged() as training:
        training.start(report(7, "0.5"), report(8), report(9))
        handover = await training.hand_over(5, LOSS)
        training.after(5.0, training.line, report(10))
        outcome = await training.follow(LOSS, handover)
        assert "since step 8" in summary_of(outcome)


async def test_first_report_after_a_handover_alone_is_not_enough() -> None:
    async with staged() as training:
        training.start(report(7, "0.5"), report(8))
        handover = await training.hand_over(5, LOSS)
        training.after(5.0, training.line, report(9))
        handover = await training.hand_over(20, LOSS, handover)
        training.after(5.0, training.line, report(10))
        assert "since step 8" in summary_of(await training.follow(LOSS, handover))
