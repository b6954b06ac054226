"""What following logs may use of a process: so many streams at once, and the event loop in slices.

A triggerer follows the containers of a thousand jobs in one loop: beyond the budget streams take turns, and no stream
holds the loop longer than a slice, however fast its container writes and however slow the logger is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from weakref import WeakKeyDictionary


class Slot:
    """The right to one stream. Who may have to give it up early says how by `on_revoke`."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.revoked = False
        self._end: Callable[[], None] | None = None

    def on_revoke(self, end: Callable[[], None] | None) -> None:
        """What ends the stream early; None: it ends soon anyway."""
        self._end = end
        if self.revoked and end is not None:
            end()

    def _revoke(self) -> None:
        self.revoked = True
        if self._end is not None:
            self._end()


class StreamBudget:
    """At most `streams` log streams at a time; while others wait, the longest held are given up after `turn` seconds.

    :param streams: connections for logs; the kubelets and the API server feel each of them.
    :param turn: seconds.
    """

    def __init__(self, streams: int = 300, turn: float = 5.0) -> None:
        self.streams = streams
        self.turn = turn
        self.gate = asyncio.Lock()  #: held for a slice by the one stream that hands lines on
        self._held: dict[Slot, None] = {}  # oldest first
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Wait for a slot, in order of asking, and hold it."""
        slot = await self._acquire()
        try:
            yield slot
        finally:
            self._held.pop(slot)
            self._grant()

    async def _acquire(self) -> Slot:
        if not self._waiting and len(self._held) < self.streams:
            return self._hold()
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted and cancelled at once
                self._held.pop(future.result())
                self._grant()
            raise

    def _hold(self) -> Slot:
        slot = Slot(asyncio.get_running_loop().time())
        self._held[slot] = None
        return slot

    def _grant(self) -> None:
        while self._waiting and len(self._held) < self.streams:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._hold())
        self._arm()

    def _arm(self) -> None:
        """Look again when the turn of the longest held slot is over."""
        if self._timer is not None or not self._waiting:
            return
        oldest = next((slot for slot in self._held if not slot.revoked), None)
        if oldest is None:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(oldest.since + self.turn, loop.time()), self._take_back, context=Context())

    def _take_back(self) -> None:
        self._timer = None
        over = asyncio.get_running_loop().time() - self.turn
        wanted = sum(not future.done() for future in self._waiting)
        wanted -= sum(slot.revoked for slot in self._held)
        for slot in [s for s in self._held if not s.revoked and s.since <= over][: max(wanted, 0)]:
            slot._revoke()
        self._arm()


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, StreamBudget] = WeakKeyDictionary()


def process_budget() -> StreamBudget:
    """The budget of the running loop: a triggerer has one loop, and so has a worker."""
    return _budgets.setdefault(asyncio.get_running_loop(), StreamBudget())
