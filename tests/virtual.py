"""An event loop that owns its time: it advances to the next timer while nothing else can happen.

A server and its clients run in one such loop, over plain HTTP to 127.0.0.1: what one side has written can be read by
the other at once, so a poll that finds nothing means that all of them wait for a timer. Subprocesses, and threads that
aren't announced by `thread_works` or `run_in_executor`, are invisible to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START = 1_000.0  #: Seconds of the loop at its beginning: not 0, which code may take for "never".
EPOCH = 1_796_119_200.0  #: Epoch seconds at START: 2026-12-01 10:00 UTC, later than all recordings.
LONGEST_SECONDS = 100_000.0  #: Longest virtual time of a test.
STUCK_SECONDS = 20.0  #: How long nothing can happen, in real time, before a test counts as stuck.
BUSY_SECONDS = 240.0  #: How long the loop may be busy, in real time, while its own time doesn't advance.


class Stuck(BaseException):
    """The test would wait for ever, or its time runs away."""


def passes(seconds: float) -> None:
    """Let time pass within a callback of the running loop, as one that blocks the loop does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.advance(seconds)


class _Selector(selectors.DefaultSelector):
    """Polls. Where it would wait, the loop advances time."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.check_progress()
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        return self.loop.wait(super().select, timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    """The event loop.

    :param now: seconds at its beginning. Default: START.
    """

    def __init__(self, now: float = START) -> None:
        selector = _Selector()
        selector.loop = self
        self._now, self._origin, self._threads = now, EPOCH - START, 0
        self.ahead = 0.0  #: Seconds by which the clock of this host is ahead of those of other hosts.
        self._conditions: dict[asyncio.Future[None], Callable[[], object]] = {}
        self._seen = now, time.monotonic()
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now

    def epoch(self) -> float:
        """The time of day, which `engine.timing` asks for."""
        return self._origin + self._now + self.ahead

    def set_epoch(self, seconds: float) -> None:
        """Move the time of day, as NTP does."""
        self._origin = seconds - self._now - self.ahead

    def advance(self, seconds: float) -> None:
        """Let time pass within a callback, as one that blocks the loop does."""
        self._now += seconds

    def check_progress(self) -> None:
        """Raise Stuck in a test that repeats something for ever, without a pause."""
        real = time.monotonic()
        seen, since = self._seen
        if seen != self._now:
            self._seen = self._now, real
        elif real - since > BUSY_SECONDS:
            tasks = "\n".join(map(repr, asyncio.all_tasks(self)))
            raise Stuck(f"the loop is busy, and its time has not advanced for {BUSY_SECONDS:.0f} s:\n{tasks}")

    def thread_works(self) -> Callable[[], object]:
        """A thread works for this loop until it calls what this returns: time stands still meanwhile."""
        self._threads += 1

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed before
                self.call_soon_threadsafe(self._thread_ended)

        return tell

    def _thread_ended(self, _: object = None) -> None:
        self._threads -= 1

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    def when(self, condition: Callable[[], object]) -> asyncio.Future[None]:
        """Done as soon as the condition is true. It is looked at whenever nothing else can happen at this time."""
        future: asyncio.Future[None] = self.create_future()
        self._conditions[future] = condition
        future.add_done_callback(self._conditions.pop)
        return future

    def _wake_waiting(self) -> bool:
        """Wake those whose condition is true; returns whether there are such."""
        found = False
        for future, condition in self._conditions.items():
            try:
                if future.done() or not condition():
                    continue
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)
            found = True
        return found

    def wait(self, select: Callable[[float | None], list[Any]], timeout: float | None) -> list[Any]:
        """Advance to the next timer, unless a thread works or there is no timer: then really wait for what happens."""
        if self._wake_waiting():
            return []
        if self._threads <= 0 and timeout is not None:
            if self._now - START > LONGEST_SECONDS:
                raise Stuck(f"{LONGEST_SECONDS:.0f} s of the loop's time have passed")
            scheduled: Any = self._scheduled  # type: ignore[attr-defined]
            self._now = max(self._now, scheduled[0].when() if scheduled else self._now + timeout)
            return []
        if ready := select(STUCK_SECONDS):
            return ready
        working = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
        raise Stuck(f"nothing has happened for {STUCK_SECONDS:.0f} s; {self._threads} threads work: {working}")
