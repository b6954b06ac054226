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
    :param stall: seconds that the process must have stood still (stopped, suspended, starved) to count as stalled.
    :param settle: seconds that no line is handed on after a stall. Another triggerer may have taken over meanwhile, and
        nothing that a trigger can ask tells the two apart: its task is `deferred` in both. But Airflow compares the
        running triggers with the assigned ones about once a second, and cancels those that are assigned elsewhere.
    """

    def __init__(self, streams: int = 300, turn: float = 5.0, stall: float = 5.0, settle: float = 10.0) -> None:
        self.streams = streams
        self.turn = turn
        self.stall = stall
        self.settle = settle
        self._ticked: float | None = None  # when the loop last ran
        self._settled = 0.0  # when lines may be handed on again
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

    def watch_for_stalls(self) -> None:
        """Begin to note when the loop runs."""
        if self._ticked is None:
            self._ticked = asyncio.get_running_loop().time()
            self._tick()

    def _tick(self) -> None:
        self._note_stall()
        asyncio.get_running_loop().call_later(min(1.0, self.stall / 4), self._tick, context=Context())

    def _note_stall(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ticked is not None and now - self._ticked > self.stall:
            self._settled = now + self.settle
        self._ticked = now

    async def awake(self) -> None:
        """Return at once, or after a stall when Airflow has had time to cancel what another triggerer follows now."""
        self._note_stall()
        if (wait := self._settled - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)

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
