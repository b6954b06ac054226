"""Threads: one for the event loop of a worker, and others for blocking calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_SECONDS = 1.0  #: until a signal is noticed that another thread than the main one has received


class LoopThread:
    """An event loop in a thread of its own. The main thread waits for what runs there.

    Airflow's signal handlers raise exceptions (`execution_timeout`, apache/airflow#73395), at any line of the main
    thread. So they appear in `run`, and end no task or callback of the loop. `run` uses no lock that they could leave
    locked.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._running: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._serve, name="ktrain-loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())

    def run(self, work: Awaitable[T]) -> T:
        """Wait for `work`. What an exception has interrupted before is canceled first."""
        ended: queue.SimpleQueue[asyncio.Task[T]] = queue.SimpleQueue()

        async def main() -> T:
            interrupted, self._running = self._running, asyncio.current_task()
            if interrupted is not None and not interrupted.done():
                interrupted.cancel()
                await asyncio.wait([interrupted])
            return await work

        self._loop.call_soon_threadsafe(lambda: self._loop.create_task(main()).add_done_callback(ended.put))
        while not self._loop.is_closed():
            try:
                task = ended.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            return task.result()
        raise RuntimeError("the event loop has ended")

    def close(self) -> None:
        """Cancel what is left, and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


def in_thread(ask: Callable[[], T]) -> asyncio.Future[T]:
    """Run `ask` in a daemon thread of its own. The loop waits for threads of its own executor when it closes, and
    another call that blocks can occupy them.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def answered() -> None:
        try:
            answer.set_result(ask())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=answered, name="ktrain-call", daemon=True).start()
    return asyncio.wrap_future(answer)
