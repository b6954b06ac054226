"""What is logged about a job while it waits for its pods."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.engine.follow.options import Options
from tests.engine.staged import staged


@pytest.mark.virtual_time
async def test_each_newest_warning_about_a_pending_job_is_logged_once() -> None:
    async with staged() as training:
        training.condition("Created")
        pod = training.pod(0, "Pending", node="")

        def warns(message: str, since: float) -> None:
            training.event("FailedScheduling", message, about=pod, since=since)

        warns("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.", 30)
        following = asyncio.ensure_future(training.follow(Options()))
        await asyncio.sleep(600)
        warns("0/5 nodes are available: 5 Insufficient nvidia.com/gpu.", 0)
        await asyncio.sleep(600)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    newest = [line.splitlines()[1] for line in training.log.messages if "is still Pending. " in line]
    assert [line.partition(": ")[2] for line in newest] == [
        f"FailedScheduling: 0/{nodes} nodes are available: {nodes} Insufficient nvidia.com/gpu." for nodes in (4, 5)
    ]
