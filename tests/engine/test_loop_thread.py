"""The event loop of a worker: what a signal handler raises appears in the thread that waits for it."""

from __future__ import annotations

import asyncio
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from airflow_provider_ktrain.engine.api.threads import LoopThread


class Terminated(BaseException): ...


@pytest.fixture
def handled() -> Iterator[threading.Event]:
    """Set when the signal handler raises."""
    event = threading.Event()

    def on_signal(*_: object) -> None:
        event.set()
        raise Terminated

    before = signal.signal(signal.SIGUSR1, on_signal)
    yield event
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    opened = LoopThread()
    yield opened
    opened.close()


def terminate(handled: threading.Event) -> None:
    """Send the signal, in the thread of the loop, and wait until it was handled."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    assert handled.wait(60)


async def forever() -> None:
    await asyncio.Event().wait()


def test_exception_of_a_signal_handler_does_not_end_a_task(loop: LoopThread, handled: threading.Event) -> None:
    async def step() -> str:
        terminate(handled)
        return "done"

    async def begin() -> None:
        tasks.append(asyncio.create_task(step()))
        await forever()

    async def result() -> str:
        return await tasks[0]

    tasks: list[asyncio.Task[str]] = []
    with pytest.raises(Terminated):
        loop.run(begin())
    assert loop.run(result()) == "done"


def test_exception_of_a_signal_handler_does_not_end_a_callback(loop: LoopThread, handled: threading.Event) -> None:
    ended = asyncio.Event()

    def call() -> None:
        terminate(handled)
        ended.set()

    async def begin() -> None:
        asyncio.get_running_loop().call_soon(call)
        await forever()

    async def wait() -> None:
        await asyncio.wait_for(ended.wait(), 60)

    with pytest.raises(Terminated):
        loop.run(begin())
    loop.run(wait())


def test_interrupted_work_is_canceled_before_the_next_work_begins(loop: LoopThread, handled: threading.Event) -> None:
    events: list[str] = []

    async def interrupted() -> None:
        try:
            asyncio.get_running_loop().call_soon(terminate, handled)
            await forever()
        finally:
            await asyncio.sleep(0)
            events.append("canceled")

    async def after() -> None:
        events.append("begun")

    with pytest.raises(Terminated):
        loop.run(interrupted())
    loop.run(after())
    assert events == ["canceled", "begun"]


@pytest.mark.parametrize("error", [ValueError, queue.Empty])
def test_work_has_the_context_of_its_caller_and_raises_its_error_there(
    loop: LoopThread, error: type[Exception]
) -> None:
    name = ContextVar("name", default="")

    async def fail() -> None:
        assert name.get() == "of the caller"
        raise error("of the work")

    name.set("of the caller")
    with pytest.raises(error, match="of the work"):
        loop.run(fail())


def test_a_callback_that_exits_does_not_end_the_loop() -> None:
    async def end() -> str:
        asyncio.get_running_loop().call_soon(sys.exit)
        await asyncio.sleep(0)
        return "went on"

    opened = LoopThread()
    assert [opened.run(end()), opened.run(end())] == ["went on"] * 2
    opened.close()
