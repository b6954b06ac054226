"""A diagnosis that raises an error keeps no job from its end: what is certain without it is the cause."""

from __future__ import annotations

import asyncio
import time

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.options import Options
from tests.engine.staged import KINDS, Staged, staged

pytestmark = pytest.mark.timed


async def cause_of(training: Staged, options: Options) -> dict[str, object]:
    """The cause, with an object that no diagnosis can read: a node whose conditions are no list."""
    training.api.put("nodes", {"metadata": {"name": "node-1"}, "status": {"conditions": 1}})
    outcome = await asyncio.wait_for(training.follow(options), 120)
    assert "The diagnosis has failed. Please report this." in str(training.log)
    assert not outcome.succeeded
    assert outcome.cause is not None
    return dict(outcome.cause)


async def test_failed_job_has_an_unknown_cause() -> None:
    async with staged(KINDS[0]) as training:
        training.pod(0, "Failed")
        training.ended("Failed")
        cause = await cause_of(training, Options(drain_timeout=0.5))
        assert cause["category"] == "unknown"
        assert "is Failed; the cause is unknown because the diagnosis has failed (TypeError)" in str(cause["summary"])


@pytest.mark.parametrize(
    ("category", "limits", "deadline"),
    [("infrastructure", Limits(startup=30.0), None), ("timeout", Limits(), 1.0)],
    ids=["startup_timeout", "execution_timeout"],
)
async def test_passed_limit_keeps_its_category(category: str, limits: Limits, deadline: float | None) -> None:
    """So a `retry_policy` that never retries a TrainingTimeoutError is obeyed."""
    async with staged(KINDS[0]) as training:
        training.condition("Created")
        training.pod(0, "Pending", since=40.0)
        training.pod(1, "Failed")
        ends = None if deadline is None else time.time() + deadline
        cause = await cause_of(training, Options(limits=limits, deadline=ends, drain_timeout=0.5))
        assert cause["category"] == category
