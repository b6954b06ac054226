"""The status of a training that waits in a queue, for the training page."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from airflow_provider_ktrain.engine.api.client import Api
from tests.engine.tasks import Sink, Task, follow, until

from .workloads import write_workload

pytestmark = pytest.mark.virtual_time
PENDING = {
    "type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor f, 2 more needed",
}  # fmt: skip


class Statuses(Sink):
    """Keeps each status that is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.offered: list[dict[str, Any]] = []

    def offer(self, build: Any, *, urgent: bool) -> None:
        self.offered.append(build()())

    async def queue_is(self, reason: str) -> bool:
        return bool(self.offered) and self.offered[-1]["queue"] == reason


async def test_status_is_offered_again_when_the_reason_in_the_queue_changes(api: Api, task: Task) -> None:
    ref, sink = (await task.submit(queue="team-a")).ref, Statuses()
    following = asyncio.create_task(follow(ref, api, log=task.log, status_sink=sink))
    try:
        await until(lambda: sink.queue_is(""))
        await write_workload(api, await task.job() or {}, [PENDING])
        await until(lambda: sink.queue_is(f"Pending: {PENDING['message']}"))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    assert {status["phase"] for status in sink.offered} == {"Queued"}
