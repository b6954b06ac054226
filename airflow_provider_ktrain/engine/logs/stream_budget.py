"""Limits how many log streams a process opens.

A triggerer may follow the containers of a thousand jobs in one event loop. If there are more containers than the budget
has streams, they take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from weakref import WeakKeyDictionary

STREAMS = 300  #: Connections for logs; each is a load on a kubelet and on the API server.
TURN_SECONDS = 5.0  #: How long a stream may last while others wait.


class Slot:
    """The right to one stream.

    Its turn begins when the response does, with `on_revoke`: a turn that a slow request used up would read nothing.
    Without `on_revoke`, the slot isn't taken back, because its holder ends soon anyway.
    """

    def __init__(self, on_begin: Callable[[], None]) -> None:
        self.since = math.inf  #: When its turn began, by the loop's time.
        self.revoked = False
        self._on_begin = on_begin
        self._end: Callable[[], None] = lambda: None

    def on_revoke(self, end: Callable[[], None]) -> None:
        """Begin the turn, and set the function that ends the stream early."""
        self.since, self._end = asyncio.get_running_loop().time(), end
        self._on_begin()

    def _revoke(self) -> None:
        self.revoked = True
        self._end()


class StreamBudget:
    """Allows STREAMS log streams at a time. While others wait, the oldest streams end after TURN_SECONDS."""

    def __init__(self) -> None:
        self._held: dict[Slot, None] = {}  # first granted first
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_crowded(self) -> bool:
        """Whether streams wait for their turn."""
        return bool(self._waiting)

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Wait for a slot, first come first served, and hold it."""
        slot = await self._acquire()
        try:
            yield slot
        finally:
            self._held.pop(slot)
            self._grant()

    async def _acquire(self) -> Slot:
        if not self._waiting and len(self._held) < STREAMS:
            return self._hold()
        future: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._arm()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted and canceled at once
                self._held.pop(future.result())
                self._grant()
            raise

    def _hold(self) -> Slot:
        slot = Slot(self._arm)
        self._held[slot] = None
        return slot

    def _grant(self) -> None:
        while self._waiting and len(self._held) < STREAMS:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._hold())
        self._arm()

    def _arm(self) -> None:
        """Schedule `_take_back` for the end of the oldest slot's turn."""
        if self._timer is not None or not self._waiting:
            return
        oldest = min((slot.since for slot in self._held if not slot.revoked), default=math.inf)
        if oldest == math.inf:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(oldest + TURN_SECONDS, loop.time()), self._take_back, context=Context())

    def _take_back(self) -> None:
        self._timer = None
        over = asyncio.get_running_loop().time() - TURN_SECONDS
        missing = sum(not future.done() for future in self._waiting)
        missing -= sum(slot.revoked for slot in self._held)
        for slot in [s for s in self._held if not s.revoked and s.since <= over][: max(missing, 0)]:
            slot._revoke()
        self._arm()


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, StreamBudget] = WeakKeyDictionary()


def process_budget() -> StreamBudget:
    """The budget of the running event loop, of which a triggerer and a worker have one each."""
    return _budgets.setdefault(asyncio.get_running_loop(), StreamBudget())
