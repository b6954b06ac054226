"""The writer of statuses: its budget, its order, and that it never disturbs a training."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity import TaskInstanceId
from airflow_provider_ktrain.status_writer import WORKER, StatusWriter, TaskStatusSink

ONE, TWO, THREE = (TaskInstanceId("dag", "run", task, -1) for task in ("one", "two", "three"))


class Writes:
    """What was written. `allow` lets one write after another go on."""

    def __init__(self, *, blocked: bool = False) -> None:
        self.done: list[tuple[str, Any]] = []
        self.began: list[float] = []  # by `time.monotonic`
        self.allow = threading.Semaphore(0 if blocked else 1000)
        self.running = self.most = 0

    def offer(self, writer: StatusWriter, key: TaskInstanceId, n: Any, *, urgent: bool) -> None:
        writer.offer(key, lambda: lambda: {"n": n}, functools.partial(self.write, key), urgent=urgent)

    def write(self, key: TaskInstanceId, status: Mapping[str, Any]) -> None:
        self.began.append(time.monotonic())
        self.running += 1
        self.most = max(self.most, self.running)
        self.allow.acquire()
        self.running -= 1
        self.done.append((key.task_id, status["n"]))
        if status["n"] == "fails":
            raise OSError("the supervisor is gone")

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the writing thread."""
        async with asyncio.timeout(240):
            while not condition():  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.01)


async def test_urgent_statuses_go_first_and_the_latest_one_wins() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0)
    writes.offer(writer, ONE, 1, urgent=False)
    await writes.wait_for(lambda: writes.running > 0)
    writes.offer(writer, TWO, 1, urgent=False)
    writes.offer(writer, TWO, 2, urgent=False)
    writes.offer(writer, THREE, 1, urgent=True)
    writes.offer(writer, THREE, 2, urgent=False)
    for _ in range(3):
        writes.allow.release()
    await writes.wait_for(lambda: len(writes.done) == 3)
    assert writes.done == [("one", 1), ("three", 2), ("two", 2)]
    assert writes.most == 1, "one write in flight"


async def test_writes_keep_their_interval() -> None:
    writer, built, offered = StatusWriter(interval=0.3), list[float](), time.monotonic()

    def build() -> Callable[[], dict[str, Any]]:
        built.append(time.monotonic())
        return dict

    for key in (ONE, TWO):
        writer.offer(key, build, lambda status: None, urgent=True)
    await Writes().wait_for(lambda: len(built) == 2)
    assert built[1] - offered >= 0.29  # a timer may be a little early


async def test_failed_write_is_logged_once_and_the_next_one_follows(caplog: pytest.LogCaptureFixture) -> None:
    writes = Writes()
    writer = StatusWriter(interval=0)
    for number, text in enumerate(("fails", "fails", "works"), 1):
        writes.offer(writer, ONE, text, urgent=True)
        await writes.wait_for(functools.partial(lambda n: len(writes.done) == n, number))
    assert [n for _, n in writes.done] == ["fails", "fails", "works"]
    assert [r.getMessage().splitlines()[1] for r in caplog.records] == ["the supervisor is gone"]


async def test_slow_write_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0, slow_after=0.05)
    for number in (1, 2):
        writes.offer(writer, ONE, number, urgent=True)
        await writes.wait_for(lambda: writes.running > 0)
        await writes.wait_for(lambda: bool(caplog.records))
        writes.allow.release()
        await writes.wait_for(functools.partial(lambda n: len(writes.done) == n, number))
    assert ["takes over" in record.getMessage() for record in caplog.records] == [True]


async def test_no_write_begins_while_a_kill_waits_for_the_state_of_its_task() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0)
    writes.offer(writer, ONE, 1, urgent=True)
    await writes.wait_for(lambda: writes.running > 0)
    writes.offer(writer, TWO, 1, urgent=True)
    with writer.question(), writer.question():
        writes.allow.release(10)
        await writer.written(ONE)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(writes.began) == 1
    await writes.wait_for(lambda: writes.done == [("one", 1), ("two", 1)])


async def test_nothing_is_written_after_the_withdrawal() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0)
    writes.offer(writer, ONE, 1, urgent=True)
    await writes.wait_for(lambda: writes.running > 0)
    writes.offer(writer, ONE, 2, urgent=True)
    writer.withdraw(ONE)
    waiting = asyncio.ensure_future(writer.written(ONE))
    await asyncio.sleep(0)
    assert not waiting.done(), "a write in flight would replace the last status"
    writes.allow.release()
    await waiting
    assert writes.done == [("one", 1)]


async def test_worker_does_not_wait_for_a_write_in_flight() -> None:
    """A worker that waits would not react to a kill."""
    started, allow = threading.Event(), threading.Event()

    class Ti:
        dag_id, run_id, task_id, map_index, try_number = "dag", "run", "task", -1, 1

        def xcom_push(self, key: str, value: Any) -> None:
            started.set()
            allow.wait(60)

    sink = TaskStatusSink(Ti(), WORKER)
    sink.offer(lambda: lambda: {"n": 1}, urgent=True)
    await Writes().wait_for(started.is_set)
    leaving = asyncio.ensure_future(sink.__aexit__(None))
    for _ in range(5):
        await asyncio.sleep(0)
    assert leaving.done()
    allow.set()


def test_task_instance_that_cannot_be_identified_has_no_sink() -> None:
    assert TaskStatusSink.of(None, WORKER) is None
