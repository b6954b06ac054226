"""A job that has ended before it is followed: its logs, its result and its cause are found nevertheless."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import stamp
from tests.engine.staged import Staged, staged

pytestmark = pytest.mark.virtual_time


def ended(training: Staged, code: int, *lines: str, message: str = "") -> None:
    """The job and its pod have ended. Lists of pods arrive after those of jobs."""
    state = {"exitCode": code, "message": message, "startedAt": stamp(30), "finishedAt": stamp()}
    training.pod(0, "Failed" if code else "Succeeded", state={"terminated": state})
    training.ended("Failed" if code else "Succeeded")
    for line in lines:
        training.line(line)
    training.api.slow(r"before GET [^?]*/pods\?", 1.0)


async def test_cause_of_a_job_that_has_failed_before() -> None:
    async with staged() as training:
        ended(training, 3, "no data")
        outcome = await training.follow(Options())
    assert outcome.cause
    assert outcome.cause["summary"] == "Worker 0 failed with exit code 3. Last log line: no data"
    assert "[Worker 0] no data" in training.log.messages


@pytest.mark.parametrize(
    ("lines", "message", "result", "error"),
    [
        (['KTRAIN_RESULT {"accuracy": 0.97}'], "", {"accuracy": 0.97}, ""),
        (['epoch 1...KTRAIN_RESULT {"loss": 1}'], "", {"loss": 1}, ""),
        (["+ echo 'KTRAIN_RESULT {\"loss\": 1}'", 'KTRAIN_RESULT {"loss": 1}'], "", {"loss": 1}, ""),
        (['KTRAIN_RESULT {"loss": 1}', 'KTRAIN_RESULT {"loss": 0.5}'], "", {"loss": 0.5}, ""),
        ([], '{"from": "message"}', {"from": "message"}, ""),
        (["KTRAIN_RESULT {broken"], "", None, "the line with KTRAIN_RESULT is not valid JSON"),
        ([f"KTRAIN_RESULT {[*range(20000)]}"], "", None, "more than 49,152 bytes. Store the result elsewhere"),
        (["done"], "", None, ""),
    ],
    ids=["a line", "after other text", "after a trace", "the last one", "message", "broken", "too long", "none"],
)
async def test_result_of_a_job_that_has_succeeded_before(
    lines: list[str], message: str, result: Any, error: str
) -> None:
    async with staged() as training:
        ended(training, 0, *lines, message=message)
        outcome = await training.follow(Options())
    assert outcome.succeeded
    assert outcome.result == result
    assert error in outcome.result_error
    assert bool(error) == bool(outcome.result_error)
