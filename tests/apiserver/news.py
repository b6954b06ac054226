"""A wait for news, in any event loop."""

from __future__ import annotations

import asyncio
import math


class News:
    """Wakes all that wait. Unlike an `asyncio.Event`, it can be used in one event loop after the other."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def tell(self) -> None:
        """Wake them. May be called in any thread."""
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            loop = future.get_loop()
            if loop is asyncio._get_running_loop():
                _wake(future)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_wake, future)

    async def wait(self, until: float = math.inf) -> None:
        """Wait for the next news, at most until this time of the loop.

        What the caller waits for can't happen between its look and this wait, because both run in one step of the loop.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        timer = None if until == math.inf else loop.call_at(until, _wake, future)
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)
            if timer is not None:
                timer.cancel()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
