"""Decides when the streams of an event loop may log lines: one stream at a time, and not always at once.

Stalls: a triggerer whose process is stalled (suspended, or without CPU) misses heartbeats, and Airflow assigns its
triggers to another triggerer, which logs the same lines. When the process resumes, it can't detect this. So after a
stall, all lines are held back for some seconds, in which Airflow cancels the triggers that were reassigned.

Unread lines: a triggerer's supervisor reads the lines of all its triggers from a socket, and it is slower than several
hundred containers may be. A write to a full socket would block the loop, and with it all events and kills. So lines are
held back while much is unread; meanwhile, they stay on the node.

Bursts: the supervisor reads at most 4 KiB from that socket, about ten lines. Before it reads again, it sends several
queries to Airflow's database (seen with Airflow 3.3.2). If lines came one by one, each of them would cost as much. So
after a burst of few, short lines, all streams wait for a quarter of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import Context

STALL_SECONDS = 5.0  #: without a turn of the event loop that count as a stall
#: after a stall in which no line is logged. A trigger can't find out whether it was reassigned: its task is `deferred`
#: in both cases. But about once a second, a triggerer cancels the running triggers that are no longer assigned to it.
SETTLE_SECONDS = 10.0
MAX_UNREAD_BYTES = 100_000  #: in the socket to the supervisor; Linux makes it full at about twice that
UNREAD_INTERVAL = 0.005  #: seconds until the unread bytes are counted again
MIN_BURST_LINES = 32  #: lines of a burst after which the next one may follow at once
MIN_BURST_BYTES = 16 * 1024  #: bytes of its lines that have the same effect, so that long lines aren't slowed down
BURST_INTERVAL = 0.25  #: seconds between a smaller burst and the next one


class LogGate:
    """Lets one stream at a time log lines.

    :param unread_log: returns the number of bytes that this process has logged and that its supervisor hasn't read yet.
        Default: None, lines aren't held back for it, and there are no bursts.
    """

    def __init__(self, unread_log: Callable[[], int] | None = None) -> None:
        self.unread_log = unread_log
        self._ticked: float | None = None  # when the loop last ran
        self._settled = 0.0  # when lines may be logged again after a stall
        self._lock = asyncio.Lock()  # of the one stream that logs lines
        self._writers = 0  # streams that log lines, or wait to
        self._lines = self._bytes = 0  # of the present burst
        self._next_burst = 0.0  # when it may begin

    @property
    def holds_lines_back(self) -> bool:
        """Whether no line may be logged at present: after a stall, or while many lines are unread."""
        return self._settled > asyncio.get_running_loop().time() or self._is_crowded

    @property
    def _is_crowded(self) -> bool:
        return self.unread_log is not None and self.unread_log() > MAX_UNREAD_BYTES

    def watch_for_stalls(self) -> None:
        """Start to record when the event loop runs."""
        if self._ticked is None:
            self._ticked = asyncio.get_running_loop().time()
            self._tick()

    def _tick(self) -> None:
        self._note_stall()
        asyncio.get_running_loop().call_later(min(1.0, STALL_SECONDS / 4), self._tick, context=Context())

    def _note_stall(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ticked is not None and now - self._ticked > STALL_SECONDS:
            self._settled = now + SETTLE_SECONDS
        self._ticked = now

    async def awake(self) -> None:
        """Return at once; after a stall, only when Airflow has had time to cancel reassigned triggers."""
        self._note_stall()
        if (wait := self._settled - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)

    @contextlib.asynccontextmanager
    async def burst(self) -> AsyncIterator[None]:
        """Take part in the present burst, or wait for the next one. It ends when no stream takes part anymore."""
        self._writers += 1
        try:
            if (wait := self._next_burst - asyncio.get_running_loop().time()) > 0:
                await asyncio.sleep(wait)
            yield
        finally:
            self._writers -= 1
            if not self._writers:
                small = 0 < self._lines < MIN_BURST_LINES and self._bytes < MIN_BURST_BYTES
                if self.unread_log is not None and small:
                    self._next_burst = asyncio.get_running_loop().time() + BURST_INTERVAL
                self._lines = self._bytes = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until this stream may log lines: not right after a stall, and not while many lines are unread."""
        async with self._lock:
            await self.awake()
            while self._is_crowded:  # noqa: ASYNC110
                await asyncio.sleep(UNREAD_INTERVAL)
            yield

    def count(self, lines: int, size: int) -> None:
        """Note that the stream whose turn it is has logged lines.

        :param lines: their number.
        :param size: their bytes.
        """
        self._lines += lines
        self._bytes += size
