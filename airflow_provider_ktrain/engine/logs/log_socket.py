"""The only way from an event loop into Airflow's log. It never blocks the loop, and no reader waits for it.

A triggerer's supervisor reads the lines of all its triggers from one socket. A write to a full socket blocks the loop,
and with it all events and kills; if the supervisor sends a long message at that moment, both wait for each other for
ever (seen with Airflow 3.3.2). So a record is written only if it is known to fit. All others wait in queues: one of the
triggers' own messages, which come first, and one for each container. The containers take turns.

Cost: the supervisor reads at most 4 KiB at a time, and sends several queries to Airflow's database before it reads
again. So after a burst of few, short lines, the next lines wait for a quarter of a second. While much is unread, lines
of one container are joined in one record. A text that is too long for a record is split into parts.

Full queues: a reader of a log doesn't wait. It inspects on, and the lines are read again when there is room
(`engine.logs.follower`). Lines that are repeated after a takeover come after all others.

Stalls: a triggerer whose process is stalled (suspended, or without CPU) misses heartbeats, and Airflow assigns its
triggers to another triggerer, which logs the same lines. When the process resumes, it can't detect this. So after a
stall, nothing of the queues is written for some seconds, in which Airflow cancels the triggers that were reassigned.
A trigger that has started since the stall began was assigned to this process in it, and doesn't wait: the start of many
triggers can itself keep the loop busy for that long.

Loggers of the standard library, Airflow's and ours, write to the same socket at once: they have the other half of it.

A worker's log has no such socket (`connect` is not called): its lines are written at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.logs.log_line import LogLine

STALL_SECONDS = 5.0  #: A stall: how long the event loop has had no turn.
#: How long no line is logged after a stall. A trigger can't find out whether it was reassigned: its task is `deferred`
#: in both cases. But about once a second, a triggerer cancels the running triggers that are no longer assigned to it.
SETTLE_SECONDS = 10.0
UNREAD_INTERVAL = 0.005  #: Seconds until the unread bytes are counted again.
SLICE_SECONDS = 0.004  #: How long lines are written before other tasks run.
RECORD_BYTES = 512  #: Size of a record without its text: times, names, and the keys of JSON.
PIECE_BYTES = 16 * 1024  #: Size of a text as JSON. A longer one is split.
MARK_BYTES = 32  #: Largest size of the mark of a part.
PREFIX_BYTES = 32  #: Size of what precedes a line in a record: the replica and a line break.
JOINED_BYTES = 4096 - RECORD_BYTES  #: Size of the lines that are joined in one record.
MIN_BURST_LINES = 32  #: Lines of a burst after which the next one may follow at once.
MIN_BURST_BYTES = 16 * 1024  #: Bytes of its lines that have the same effect, so that long lines aren't slowed down.
BURST_INTERVAL = 0.25  #: Seconds between a smaller burst and the next one.
LINE_BYTES = 256  #: Memory that a line in a queue takes beside its text.
#: Size of the lines that wait: of one container, and of all.
QUEUE_BYTES, ALL_QUEUES_BYTES = 1024 * 1024, 32 * 1024 * 1024
MESSAGES_BYTES = 8 * 1024 * 1024  #: Size of the messages that wait, of all triggers.
#: How much may wait of a container whose lines are read again: each time is one request.
BACKLOG_BYTES = 4 * 1024 * 1024
AGAIN_QUEUE_BYTES = 256 * 1024  #: How much may wait of lines that are repeated after a takeover.

Record = Callable[[], object]


def record_cost(size: int) -> int:
    """At most how many bytes a record takes in the socket as Linux counts them, by bytes (measured with Linux 6.18)."""
    return 1280 + min(2 * size, size + 2816)


def json_size(text: str) -> int:
    """The bytes of a text as JSON. NUL and lone surrogates are replaced later, by fewer bytes."""
    return len(json.dumps(text, ensure_ascii=False).encode(errors="surrogatepass"))


def parts(text: str, size: int) -> list[str]:
    """The text, split into numbered parts if it is longer.

    :param size: bytes of a part as JSON, with its mark.
    """
    if json_size(text) <= size:
        return [text]
    pieces = list(_pieces(text, size - MARK_BYTES))
    return [f"{piece} (part {number} of {len(pieces)})" for number, piece in enumerate(pieces, 1)]


def _pieces(text: str, size: int) -> Iterator[str]:
    if json_size(text) <= size or len(text) == 1:
        yield text
    else:
        middle = len(text) // 2
        yield from _pieces(text[:middle], size)
        yield from _pieces(text[middle:], size)


class LineQueue:
    """Lines of one container on their way to the log, in the context of its creation.

    :param write: logs a line, or several with line breaks between them.
    :param lost: called with the number of lines that could not be written, or were discarded.
    :param lost_notice: called with the text of each notice to which that happened. Default: nothing.
    :param again: whether the lines come after those of all other queues. Default: False.
    :param began: when the trigger began, by the loop's time. Default: now.
    """

    def __init__(
        self,
        write: Callable[[LogLine], None],
        lost: Callable[[int], None],
        *,
        again: bool = False,
        began: float | None = None,
        lost_notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.again = again
        self.began = asyncio.get_running_loop().time() if began is None else began
        self.is_served = False  #: Whether the socket will take the next lines.
        self.written = 0  #: Lines; it grows while there is progress.
        self._socket, self._write, self._lost, self._lost_notice = log_socket(), write, lost, lost_notice
        self._context = copy_context()
        self._lines: deque[LogLine] = deque()
        self._bytes = 0
        self._on_empty: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def has_room(self) -> bool:
        """Whether another line may wait here."""
        return self._bytes < QUEUE_BYTES and self._socket.waiting_bytes < ALL_QUEUES_BYTES

    @property
    def has_room_again(self) -> bool:
        """Whether another line that is read again may wait here; there is always room for those of all others."""
        if self.again:
            return self._bytes < AGAIN_QUEUE_BYTES
        return self._bytes < BACKLOG_BYTES and self._socket.waiting_bytes < ALL_QUEUES_BYTES // 2

    @property
    def is_low(self) -> bool:
        """Whether there is so much room that a request for lines is worth while."""
        if self.again:
            return self._bytes < AGAIN_QUEUE_BYTES // 4
        return self._bytes < QUEUE_BYTES and self._socket.waiting_bytes < ALL_QUEUES_BYTES // 2

    def add(self, line: LogLine) -> None:
        """Write a line when there is room, in a worker at once."""
        if not self._socket.is_connected:
            self._try(line, line.lines)
            return
        self._lines.append(line)
        self._count(len(line.text) + LINE_BYTES)
        self._socket.serve(self)

    def when_empty(self, act: Callable[[], None]) -> None:
        """Call a function when all lines are written or discarded, in place of one that was set before."""
        self._on_empty = act

    def discard(self) -> None:
        """Give up the lines that wait."""
        self._lose(self._lines)
        self._lines.clear()
        self._count(-self._bytes)
        self._call_if_empty()

    def _lose(self, lines: Collection[LogLine]) -> None:
        self._lost(sum(line.lines for line in lines))
        for line in lines:
            if line.notice:
                self._lost_notice(line.text)

    def _call_if_empty(self) -> None:
        if self._on_empty is not None and not self._lines:
            self._on_empty()

    def take(self, join: bool, piece: int) -> tuple[Record, int, int]:
        """Remove lines from the queue, for one record; returns how to write it, its lines, and the bytes of its text.

        :param piece: bytes of a text as JSON, at most.
        """
        first = self._lines.popleft()
        self._count(-len(first.text) - LINE_BYTES)
        size = json_size(first.text)
        if size > piece:
            lines = first.lines
            first, *rest = (replace(first, text=text, lines=0) for text in parts(first.text, piece))
            rest[-1].lines = lines
            self._lines.extendleft(reversed(rest))
            self._count(sum(len(line.text) + LINE_BYTES for line in rest))
            size = json_size(first.text)
        texts = [first.text]
        while join and self._lines and first.lines and _of_one_record(first, self._lines[0]):
            size += json_size(self._lines[0].text) + PREFIX_BYTES
            if size > JOINED_BYTES:
                break
            texts.append(self._lines.popleft().text)
            self._count(-len(texts[-1]) - LINE_BYTES)
        if len(texts) > 1:
            first = replace(first, text="\n".join(texts), lines=len(texts))
        return partial(self._context.run, self._try, first, first.lines), first.lines, size

    def _try(self, line: LogLine, lines: int) -> None:
        """Write it. An error costs these lines and no others."""
        try:
            self._write(line)
            self.written += lines
        except Exception:
            self._lose([line])
        self._call_if_empty()

    def _count(self, size: int) -> None:
        self._bytes += size
        if not self.again:
            self._socket.waiting_bytes += size


def _of_one_record(first: LogLine, line: LogLine) -> bool:
    """Whether two lines may be joined; not a part of a line, and no notice."""
    return line.lines == 1 and line.restart == first.restart and not (first.notice or line.notice)


class LogSocket:
    """Writes what waits, as far as it is known to fit."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()  #: Held by the one stream whose lines are inspected, also while other tasks run.
        #: Held by the one stream of lines from before a takeover that waits for `turn`, so that others wait for one.
        self.earlier_turn = asyncio.Lock()
        self.waiting_bytes = 0  #: Size of the lines in all queues except those of repeated lines.
        self._unread: Callable[[], int] | None = None
        self._limit = self._piece = 0
        self._messages: deque[tuple[Record, int]] = deque()  # each with the bytes of its text
        self._message_bytes = self._lost_messages = 0
        self._queues: deque[LineQueue] = deque()  # that have lines
        self._again: deque[LineQueue] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False
        self._passed = 0  # bytes that were written; unread ones among them are the last ones
        self._lines = self._bytes = 0  # of the present burst
        self._next_burst = 0.0  # when it may begin
        self._ticked: float | None = None  # when the loop last ran
        self._stalled = self._settled = 0.0  # when the last stall began, and when lines may be written again after it

    def connect(self, unread: Callable[[], int], size: int) -> None:
        """Write to a socket that must not become full.

        :param unread: returns how many of its bytes the supervisor hasn't read yet.
        :param size: bytes that it holds. Other writers have a half of it.
        """
        self._unread, self._limit = unread, size // 2
        self._piece = min(PIECE_BYTES, self._limit // 6)

    @property
    def is_connected(self) -> bool:
        """Whether lines may have to wait."""
        return self._unread is not None

    def unread(self) -> int:
        """Bytes in the socket that the supervisor hasn't read yet."""
        return 0 if self._unread is None else self._unread()

    def serve(self, queue: LineQueue) -> None:
        """Write a queue's lines when it is its turn."""
        if not queue.is_served:
            queue.is_served = True
            (self._again if queue.again else self._queues).append(queue)
            self._arm(max(self._next_burst - asyncio.get_running_loop().time(), 0.0))

    def admit(self, method: Callable[..., Any], text: str, kw: dict[str, Any]) -> bool:
        """Whether a logger's method may be called now with a message; otherwise it is called in its turn.

        While MESSAGES_BYTES wait, messages are lost; their number is logged in their place.
        """
        if self._writing or self._unread is None or not _is_loop_of(self):
            return True
        pieces = parts(text, self._piece)
        if len(pieces) == 1 and not self._messages and self._fits(record_cost(json_size(text) + RECORD_BYTES)):
            return True
        now = timing.utc_now().replace(tzinfo=None).isoformat(timespec="microseconds")
        records = [partial(method, piece, **{"timestamp": f"{now}Z", **kw}) for piece in pieces]
        if self._message_bytes >= MESSAGES_BYTES:
            pieces, records = ([""], [partial(self._log_lost, method)]) if not self._lost_messages else ([], [])
            self._lost_messages += 1
        for record, piece in zip(records, pieces, strict=True):
            self._messages.append((partial(copy_context().run, record), json_size(piece)))
            self._message_bytes += json_size(piece)
        self._arm(0.0)
        return False

    def _log_lost(self, method: Callable[..., Any]) -> None:
        """Log how many messages are missing between the one before and the next one."""
        lost, self._lost_messages = counted(self._lost_messages, "message"), 0
        method(f"{lost} of triggers in this process are missing here: Airflow did not read the log in time.")

    async def read(self, patience: float, *, lines: bool = True) -> bool:
        """Wait until the supervisor has read what was logged until now, except for repeated lines.

        :param lines: whether lines that wait in queues, of any job, are waited for. Default: True.
        """
        loop = asyncio.get_running_loop()
        end, waiting, passed = loop.time() + patience, [*self._queues] if lines else [], -1
        while loop.time() < end:
            waiting = [queue for queue in waiting if queue]
            if passed < 0 and not waiting and not self._messages:
                passed = self._passed
            if passed >= 0 and self.unread() <= self._passed - passed:
                return True
            await asyncio.sleep(10 * UNREAD_INTERVAL)
        return False

    def _fits(self, cost: int, share: int = 1) -> bool:
        unread = self.unread()
        return not unread or unread + cost <= self._limit // share

    def _arm(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._pump, context=Context())

    def _pump(self) -> None:
        """Write for SLICE_SECONDS at most, and go on later, whatever happens."""
        loop, self._timer = asyncio.get_running_loop(), None
        self._record_stall()
        end, self._writing, pause = time.monotonic() + SLICE_SECONDS, True, 0.0  # noqa: TID251  # CPU time of a slice
        try:
            while pause <= 0 and time.monotonic() < end:  # noqa: TID251  # CPU time of a slice
                pause = self._write_record()
        finally:
            self._writing = False
            if self._messages or self._queues or self._again:
                self._arm(max(pause, 0.0))
            elif self._lines:
                small = self._lines < MIN_BURST_LINES and self._bytes < MIN_BURST_BYTES
                self._next_burst = loop.time() + BURST_INTERVAL if small else 0.0
                self._lines = self._bytes = 0

    def _write_record(self) -> float:
        """Write one record, if there is one; returns in how many seconds to go on."""
        if self._messages:
            record, size = self._messages[0]
            if not self._fits(record_cost(size + RECORD_BYTES)):
                return UNREAD_INTERVAL
            self._messages.popleft()
            self._message_bytes -= size
            self._write(record)
            return 0.0
        queues, share = (self._queues, 1) if self._may_write(self._queues) else (self._again, 2)
        if not self._may_write(queues) or not self._fits(record_cost(self._piece + RECORD_BYTES), share):
            return UNREAD_INTERVAL
        queue = queues.popleft()
        try:
            if queue:
                record, lines, size = queue.take(queue.again or self.unread() > self._limit // 4, self._piece)
                self._write(record)
                self._lines += lines
                self._bytes += size
        finally:
            queue.is_served = bool(queue)
            if queue:
                queues.append(queue)
        return 0.0

    def _may_write(self, queues: deque[LineQueue]) -> bool:
        """Whether there is a queue that may be written now; it comes first."""
        if self._settled <= asyncio.get_running_loop().time():
            return bool(queues)
        for _ in range(len(queues)):
            if not self.settling_seconds(queues[0].began):
                return True
            queues.rotate(-1)
        return False

    def _write(self, record: Record) -> None:
        before = self.unread()
        with contextlib.suppress(Exception):  # this message is lost: the log is where it could be reported
            record()
        self._passed += max(self.unread() - before, 0)

    # stalls

    def watch_for_stalls(self) -> None:
        """Start to record when the event loop runs."""
        if self._ticked is None:
            self._ticked = asyncio.get_running_loop().time()
            self._tick()

    def _tick(self) -> None:
        self._record_stall()
        asyncio.get_running_loop().call_later(min(1.0, STALL_SECONDS / 4), self._tick, context=Context())

    def _record_stall(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ticked is not None and now - self._ticked > STALL_SECONDS:
            self._stalled, self._settled = self._ticked, now + SETTLE_SECONDS
        self._ticked = now

    def settling_seconds(self, began: float) -> float:
        """Seconds in which Airflow may still cancel a trigger that it reassigned during a stall; 0 without one.

        :param began: when the trigger began, by the loop's time.
        """
        self._record_stall()
        if began >= self._stalled:
            return 0.0
        return max(self._settled - asyncio.get_running_loop().time(), 0.0)

    async def awake(self, began: float) -> None:
        """Return at once; after a stall, only when Airflow has had time to cancel a trigger that began then."""
        if wait := self.settling_seconds(began):
            await asyncio.sleep(wait)


_sockets: WeakKeyDictionary[asyncio.AbstractEventLoop, LogSocket] = WeakKeyDictionary()


def _is_loop_of(socket: LogSocket) -> bool:
    """Whether this is the thread of its event loop, which must not block."""
    try:
        return _sockets.get(asyncio.get_running_loop()) is socket
    except RuntimeError:
        return False


def log_socket() -> LogSocket:
    """The one of the running event loop."""
    return _sockets.setdefault(asyncio.get_running_loop(), LogSocket())
