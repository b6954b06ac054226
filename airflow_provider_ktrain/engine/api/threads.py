"""Threads: one for the event loop of a worker, and others for blocking calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.engine import timing

T = TypeVar("T")
LOOK_SECONDS = 1.0  #: How long it takes until a signal is noticed that another thread than the main one has received.


class _Loop:
    """One event loop and the thread in which it runs."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.closing = asyncio.Event()
        self.running: asyncio.Task[Any] | None = None
        self._release_time: Callable[[], object] = lambda: None
        self.thread = threading.Thread(target=self._serve, name="ktrain-loop", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            waiting = runner.get_loop().create_task(self._wait())
            while not waiting.done():
                with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task, which keeps it as its result
                    self.loop.run_until_complete(waiting)

    async def _wait(self) -> None:
        self._hold_time()
        await self.closing.wait()
        self._release_time()

    def _hold_time(self) -> None:
        """The main thread works, and doesn't wait for the loop: a test's time stands still."""
        self._release_time = timing.thread_works()

    async def carry_out(self, work: Awaitable[T]) -> T:
        """Run `work`, after what an exception has interrupted before was canceled."""
        interrupted, self.running = self.running, asyncio.current_task()
        if interrupted is not None and not interrupted.done():
            interrupted.cancel()
            await asyncio.wait([interrupted])
        self._release_time()
        try:
            return await work
        finally:
            self._hold_time()


class LoopThread:
    """An event loop in a thread of its own, and its clock. The main thread waits for what runs there.

    Airflow's signal handlers raise exceptions (`execution_timeout`, apache/airflow#73395), at any line of the main
    thread. So they appear in `run`, and end no task or callback of the loop. `run` uses no lock that they could leave
    locked. The thread is started when it is first used, and another one when it is used after `close`.
    """

    def __init__(self) -> None:
        self._open: _Loop | None = None

    def _opened(self) -> _Loop:
        if self._open is None:
            self._open = _Loop()
        return self._open

    @property
    def is_open(self) -> bool:
        """Whether the thread was started, and not closed since."""
        return self._open is not None

    def now(self) -> float:
        """Seconds of the loop, for durations in the main thread."""
        return self._opened().loop.time()

    def epoch(self) -> float:
        """Seconds since the epoch."""
        return timing.epoch_of(self._opened().loop)

    def run(self, work: Awaitable[T]) -> T:
        """Wait for `work`. What an exception has interrupted before is canceled first."""
        opened, ended = self._opened(), queue.SimpleQueue[asyncio.Task[T]]()
        loop = opened.loop
        loop.call_soon_threadsafe(lambda: loop.create_task(opened.carry_out(work)).add_done_callback(ended.put))
        while not loop.is_closed():
            try:
                task = ended.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            return task.result()
        raise RuntimeError("the event loop has ended")

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        opened, self._open = self._open, None  # first: an exception may interrupt this
        if opened is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                opened.loop.call_soon_threadsafe(opened.closing.set)
            opened.thread.join()


def in_thread(ask: Callable[[], T]) -> asyncio.Future[T]:
    """Run `ask` in a daemon thread of its own. The loop waits for threads of its own executor when it closes, and
    another call that blocks can occupy them.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()
    waiting, ended = asyncio.wrap_future(answer), timing.thread_works()

    def answered() -> None:
        try:
            answer.set_result(ask())
        except Exception as e:
            answer.set_exception(e)
        except BaseException as e:  # such as sys.exit, which would end the event loop
            answer.set_exception(KtrainError(f"a call has ended its thread: {e!r}"))
        finally:
            ended()

    threading.Thread(target=answered, name="ktrain-call", daemon=True).start()
    return waiting
