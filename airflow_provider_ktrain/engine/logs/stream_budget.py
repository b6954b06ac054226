"""Limits what following logs may use of a process: a number of streams, and short slices of the event loop.

A triggerer may follow the containers of a thousand jobs in one event loop. If there are more containers than the budget
has streams, they take turns. No stream occupies the loop for longer than a slice, even if its container writes fast or
the logger is slow.

Stalls: a triggerer whose process is stalled (suspended, or without CPU) misses heartbeats, and Airflow assigns its
triggers to another triggerer, which logs the same lines. When the process resumes, it can't detect this. So after a
stall, `awake` holds back all lines for some seconds, in which Airflow cancels the triggers that were reassigned.

Unread lines: a triggerer's supervisor reads the lines of all its triggers from a socket, and it is slower than several
hundred containers may be. A write to a full socket would block the loop, and with it all events and kills. So lines are
held back while much is unread; meanwhile, they stay on the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from weakref import WeakKeyDictionary

MAX_UNREAD_BYTES = 100_000  #: in the socket to the supervisor; Linux makes it full at about twice that
UNREAD_INTERVAL = 0.005  #: seconds until the unread bytes are counted again


class Slot:
    """The right to one stream.

    Its turn begins when the response does, with `on_revoke`: a turn that a slow request used up would read nothing.
    Without `on_revoke`, the slot isn't taken back, because its holder ends soon anyway.
    """

    def __init__(self, on_begin: Callable[[], None]) -> None:
        self.since = math.inf  #: when its turn began, by the loop's time
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
    """Allows `streams` log streams at a time. While others wait, the oldest streams end after `turn` seconds.

    :param streams: connections for logs; each is a load on a kubelet and on the API server. Default: 300.
    :param turn: seconds that a stream may last while others wait. Default: 5.
    :param stall: seconds without a turn of the event loop that count as a stall. Default: 5.
    :param settle: seconds after a stall in which no line is logged. A trigger can't find out whether it was reassigned:
        its task is `deferred` in both cases. But about once a second, a triggerer compares its running triggers with
        the assigned ones, and cancels the others. Default: 10.
    """

    def __init__(self, streams: int = 300, turn: float = 5.0, stall: float = 5.0, settle: float = 10.0) -> None:
        self.streams = streams
        self.turn = turn
        self.stall = stall
        self.settle = settle
        self.unread_log: Callable[[], int] = lambda: 0  #: bytes that this process has logged and nobody has read yet
        self._ticked: float | None = None  # when the loop last ran
        self._settled = 0.0  # when lines may be logged again
        self.gate = asyncio.Lock()  #: held during a slice by the one stream that logs lines
        self._held: dict[Slot, None] = {}  # first granted first
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_crowded(self) -> bool:
        """Whether streams wait for their turn."""
        return bool(self._waiting)

    @property
    def holds_lines_back(self) -> bool:
        """Whether no line may be logged at present: after a stall, or while many lines are unread."""
        return self._settled > asyncio.get_running_loop().time() or self.unread_log() > MAX_UNREAD_BYTES

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[Slot]:
        """Wait for a slot, first come first served, and hold it."""
        slot = await self._acquire()
        try:
            yield slot
        finally:
            self._held.pop(slot)
            self._grant()

    def watch_for_stalls(self) -> None:
        """Start to record when the event loop runs."""
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
        """Return at once; after a stall, only when Airflow has had time to cancel reassigned triggers."""
        self._note_stall()
        if (wait := self._settled - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)

    async def ready_to_log(self) -> None:
        """Return when lines may be logged: not right after a stall, and not while many lines are unread."""
        await self.awake()
        while self.unread_log() > MAX_UNREAD_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(UNREAD_INTERVAL)

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
        slot = Slot(self._arm)
        self._held[slot] = None
        return slot

    def _grant(self) -> None:
        while self._waiting and len(self._held) < self.streams:
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
        self._timer = loop.call_at(max(oldest + self.turn, loop.time()), self._take_back, context=Context())

    def _take_back(self) -> None:
        self._timer = None
        over = asyncio.get_running_loop().time() - self.turn
        missing = sum(not future.done() for future in self._waiting)
        missing -= sum(slot.revoked for slot in self._held)
        for slot in [s for s in self._held if not s.revoked and s.since <= over][: max(missing, 0)]:
            slot._revoke()
        self._arm()


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, StreamBudget] = WeakKeyDictionary()


def process_budget() -> StreamBudget:
    """The budget of the running event loop, of which a triggerer and a worker have one each."""
    return _budgets.setdefault(asyncio.get_running_loop(), StreamBudget())
