"""The writer of statuses: its budget, its order, and that it never disturbs a training."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_provider_ktrain.status_writer import StatusWriter, TaskKey

ONE, TWO, THREE = (TaskKey("dag", "run", task, -1) for task in ("one", "two", "three"))


class Writes:
    """What was written. `allow` lets one write after another go on."""

    def __init__(self, *, blocked: bool = False) -> None:
        self.done: list[tuple[str, Any]] = []
        self.allow = threading.Semaphore(0 if blocked else 1000)
        self.running = self.most = 0

    def __call__(self, key: TaskKey, status: Mapping[str, Any]) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.allow.acquire()
        self.running -= 1
        self.done.append((key.task_id, status["n"]))
        if status["n"] == "fails":
            raise OSError("the supervisor is gone")

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the writing thread."""
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.01)


async def test_urgent_statuses_go_first_and_the_latest_one_wins() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(writes, interval=0)
    writer.offer(ONE, lambda: {"n": 1}, urgent=False)
    await writes.wait_for(lambda: writes.running > 0)
    writer.offer(TWO, lambda: {"n": 1}, urgent=False)
    writer.offer(TWO, lambda: {"n": 2}, urgent=False)
    writer.offer(THREE, lambda: {"n": 1}, urgent=True)
    writer.offer(THREE, lambda: {"n": 2}, urgent=False)
    for _ in range(3):
        writes.allow.release()
    await writes.wait_for(lambda: len(writes.done) == 3)
    assert writes.done == [("one", 1), ("three", 2), ("two", 2)]
    assert writes.most == 1, "one write in flight"


async def test_writes_keep_their_interval() -> None:
    writes = Writes()
    writer = StatusWriter(writes, interval=3600)
    writer.offer(ONE, lambda: {"n": 1}, urgent=True)
    await writes.wait_for(lambda: len(writes.done) == 1)
    writer.offer(TWO, lambda: {"n": 1}, urgent=True)
    for _ in range(20):
        await asyncio.sleep(0)
    assert writes.done == [("one", 1)]


async def test_failed_write_is_logged_once_and_the_next_one_follows(caplog: pytest.LogCaptureFixture) -> None:
    writes = Writes()
    writer = StatusWriter(writes, interval=0)
    for number, text in enumerate(("fails", "fails", "works"), 1):
        writer.offer(ONE, functools.partial(dict, n=text), urgent=True)
        await writes.wait_for(functools.partial(lambda n: len(writes.done) == n, number))
    assert [n for _, n in writes.done] == ["fails", "fails", "works"]
    assert [r.getMessage().splitlines()[1] for r in caplog.records] == ["OSError: the supervisor is gone"]


async def test_nothing_is_written_after_the_withdrawal() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(writes, interval=0)
    writer.offer(ONE, lambda: {"n": 1}, urgent=True)
    await writes.wait_for(lambda: writes.running > 0)
    writer.offer(ONE, lambda: {"n": 2}, urgent=True)
    writer.withdraw(ONE)
    waiting = asyncio.ensure_future(writer.written(ONE))
    await asyncio.sleep(0)
    assert not waiting.done(), "a write in flight would replace the last status"
    writes.allow.release()
    await waiting
    assert writes.done == [("one", 1)]
