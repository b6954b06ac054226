"""Wakes a coroutine that waits for any of several things, without a task and an asyncio.Event for each of them.

A triggerer waits for a thousand jobs, and each job for changes of several watches and for a request to stop.
"""

from __future__ import annotations

import asyncio
import contextlib


class Wakeup:
    """Something to wait for. Any number of sources may set it; one coroutine waits at a time."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the coroutine that waits, or the next one that will."""
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until this is set, and unset it; returns whether it was set within `timeout` seconds."""
        if not self._set:
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, _finish, waiter)
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
                if timer is not None:
                    timer.cancel()
        was, self._set = self._set, False
        return was


def _finish(waiter: asyncio.Future[None]) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # it was set or canceled in the same step of the loop
        waiter.set_result(None)


class StopSignal:
    """A request to end early. A signal handler may set it: it does nothing but set a flag and wake the event loop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._waiting: tuple[asyncio.AbstractEventLoop, Wakeup] | None = None

    def request(self, reason: str) -> None:
        """Request the end. The reason is a clause for the log."""
        self.reason = reason
        if self._waiting is not None:
            loop, wakeup = self._waiting
            with contextlib.suppress(RuntimeError):  # the loop, in another thread, is closed
                loop.call_soon_threadsafe(wakeup.set)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the end is requested, for at most `timeout` seconds; returns whether it is."""
        wakeup = Wakeup()
        self._waiting = asyncio.get_running_loop(), wakeup
        if self.reason is None:
            await wakeup.wait(timeout)
        return self.reason is not None
