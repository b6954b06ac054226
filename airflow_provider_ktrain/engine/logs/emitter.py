"""From the bytes of a log stream to lines in the task's log: split, deduplicated, inspected, rate-limited and counted.

Stacks that a container prints when it is stopped are no lines: they are left out.

The order matters. Every new line is inspected first: results and the causes of failures must not get lost in a flood of
lines, and don't wait for Airflow's log. Then the rate limit decides whether it is logged. It is a token bucket of
bytes: a container may write a burst, and regains its allowance over time. Once it has used it up, all lines are dropped
until it has regained the allowance of some time. So a flood causes few long gaps, each with one notice that counts its
lines, and not a notice after every line. An init container's limit is low: one that waits repeats the same few lines.

If the log has no room, lines are only inspected and counted from there on: there is a backlog. `log_again` logs its
lines when they are read once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time as clock
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from airflow_provider_ktrain.core.diagnosis.cause_scanner import count_plain
from airflow_provider_ktrain.core.logs.backlog import Backlog
from airflow_provider_ktrain.core.logs.cursor import Position, Replay, normal_time, normal_times
from airflow_provider_ktrain.core.logs.exec_trace import KnownJob, masked_trace
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.text.output import counted, readable_size
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import SLICE_SECONDS, LineQueue, log_socket

MAX_LINE_BYTES = 256 * 1024  #: Bytes of a line; Airflow loses messages of megabytes.
#: Bytes that a container may log per second on average, and at once. Lines over it are dropped.
BYTES_PER_SECOND, BURST_BYTES = 2 * 1024 * 1024, 32 * 1024 * 1024
INIT_BYTES_PER_SECOND, INIT_BURST_BYTES = 16, 32 * 1024  #: The same limits for an init container.
#: How long a container regains its allowance before its lines are logged again.
PAUSE_SECONDS, INIT_PAUSE_SECONDS = 5.0, 600.0
MAX_GAPS = 20  #: How many gaps of one container are reported.
OWN_MARK = b"KTRAIN_"  #: What stands in each line that a program writes for us: results, metrics, stacks.
COUNTED_LINES = 2000  #: How many lines from before a takeover are counted in one slice, which takes about 1 ms.


@dataclass(slots=True)
class Tally:
    """What became of one container's log. Its emitter counts in it; a copy is reported.

    :param lines, bytes: that were logged.
    :param dropped: lines dropped by the rate limit.
    :param dropped_bytes: bytes of these lines, and bytes cut off lines over MAX_LINE_BYTES.
    :param gaps: where lines may be missing, and why.
    :param complete: whether everything that the server had was read.
    :param unlogged: lines that were inspected and are not logged; those of a backlog may still be.
    :param unsaid: the gaps of which the log has no notice in their place.
    """

    lines: int = 0
    bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    gaps: tuple[str, ...] = ()
    complete: bool = False
    unlogged: int = 0
    unsaid: tuple[str, ...] = ()

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.lines + other.lines,
            self.bytes + other.bytes,
            self.dropped + other.dropped,
            self.dropped_bytes + other.dropped_bytes,
            (self.gaps + other.gaps)[:MAX_GAPS],
            self.complete and other.complete,
            self.unlogged + other.unlogged,
            (self.unsaid + other.unsaid)[:MAX_GAPS],
        )


#: Called with a line's text, its time, the number of its container's run, and whether it is one of many lines without a
#: sign of an error: see `count_plain`.
Inspect = Callable[[str, str, int, bool], None]


def ignore(text: str, time: str, run: int, is_plain: bool) -> None:
    """An inspector that does nothing."""


class LineSplitter:
    """Joins the chunks of a stream to blocks of whole lines. Lines over MAX_LINE_BYTES are cut, with a mark there."""

    def __init__(self) -> None:
        self.unended_line = b""  #: The line that has no line end yet.
        self.bytes_cut = 0  #: Bytes that were cut, of all lines.
        self._bytes_cut_of_line = 0  # of `unended_line`

    def feed(self, chunk: bytes) -> bytes | None:
        """The lines that a chunk completes, without the last line end; None if it completes none."""
        end = chunk.rfind(b"\n")
        if end < 0:
            self._keep(chunk)
            return None
        head = chunk[:end]
        if self._bytes_cut_of_line:
            first = head.find(b"\n")
            first = len(head) if first < 0 else first
            self._bytes_cut_of_line += first
            self.bytes_cut += self._bytes_cut_of_line
            head = b" ... (%d bytes cut)" % self._bytes_cut_of_line + head[first:]
        block = self.unended_line + head
        self.unended_line, self._bytes_cut_of_line = b"", 0
        self._keep(chunk[end + 1 :])
        return block

    def _keep(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self.unended_line)
        self.unended_line += piece[:room]
        self._bytes_cut_of_line += max(len(piece) - room, 0)


class EndReached(Exception):
    """Nothing more of this response is to be read: all lines are logged, or there is no room for more."""


class _Steps(NamedTuple):
    """What happens with the lines of a response.

    :param before: called with the response's Replay and the line's time before a line with a timestamp, maybe a known
        one.
    :param gap: called with the position and two times: lines may be missing between them.
    :param take: called with the position, the time and the text of a new line.
    :param without_time: whether texts of the kubelet, which have no timestamp, are taken too.
    """

    before: Callable[[Replay, str], None]
    gap: Callable[[Position, str, str], None]
    take: Callable[[Position, str, str], None]
    without_time: bool


class RateLimitedEmitter:
    """Inspects and logs the lines of one container, within its rate limit and in short slices of time.

    :param set_logged: called with the position up to which the log is complete, whenever it is another one than before;
        it then moves on by itself. Default: nothing.
    :param job: called for the job, as far as it is known. Default: nothing is.
    :param began: when the trigger began, by the loop's time. Default: now.
    """

    def __init__(
        self,
        sink: Callable[[LogLine], None],
        source: LogLine,
        inspect: Inspect = ignore,
        *,
        set_logged: Callable[[Position], None] = lambda position: None,
        job: KnownJob = dict,
        began: float | None = None,
    ) -> None:
        self.tally = Tally()
        self.read = 0  #: Number of lines, including repeated ones: it grows while there is progress.
        self.backlog: Backlog | None = None  #: Lines that are not logged yet. None: what was inspected is logged.
        self.only_counts = False  #: Whether no further line is logged.
        self.gap_until = ""  #: Time of the first line after the last gap that a rotation left.
        self.queue = LineQueue(sink, self._lose, again=source.again, began=began, lost_notice=self._lose_notice)
        self._inspect, self._source, self._set_logged, self._job = inspect, source, set_logged, job
        self._replica = (source.pod, source.container, source.role, source.index)
        limit = BYTES_PER_SECOND, BURST_BYTES, PAUSE_SECONDS
        self._limit = (INIT_BYTES_PER_SECOND, INIT_BURST_BYTES, INIT_PAUSE_SECONDS) if source.init else limit
        self._allowance = float(self._limit[1])
        self._allowed_at = timing.now()
        self._flooded = False
        self._unreported = self._unreported_bytes = 0
        self._steps = _Steps(self._before, self._missing, self._take, without_time=True)
        self._steps_again = _Steps(self._before_again, self._removed, self._take_again, without_time=False)
        self._is_plain = False

    async def emit(self, block: bytes, replay: Replay) -> int:
        """Inspect the new lines of a block, and log them if there is room; returns their number.

        If this is canceled, the position stands after the last line that was emitted.
        """
        return await self._emit(block, replay, self._steps)

    async def log_again(self, block: bytes, replay: Replay) -> int:
        """Log lines of the backlog; returns their number. EndReached where they end, or where there is no room."""
        return await self._emit(block, replay, self._steps_again)

    def fall_behind(self, position: Position) -> None:
        """From this position on, lines are only inspected."""
        if self.backlog is None:
            self.backlog = Backlog(copy.deepcopy(position), position)
            self._set_logged(self.backlog.logged)

    def has_caught_up(self) -> bool:
        """Whether the log has reached the place where inspecting is; where a run ends, it goes on with the next one."""
        while (backlog := self.backlog) is not None and backlog.end_is_reached:
            self._report_removed(backlog, "the node removed them before there was room in Airflow's log")
            if backlog.next_run():
                self._set_logged(backlog.logged)
            else:
                self._end_backlog(backlog)
        return self.backlog is None

    def give_up_run(self, why: str) -> None:
        """The lines of the backlog's run can't be read any more; has_caught_up is to be called next."""
        backlog = self.backlog
        if backlog is None:
            return
        end = backlog.ends.get(backlog.logged.restart, backlog.inspected)
        backlog.removed = backlog.removed or (backlog.logged.last or "its beginning", end.last)
        self._report_removed(backlog, why)
        backlog.logged = copy.deepcopy(end)
        self._set_logged(backlog.logged)

    def _report_removed(self, backlog: Backlog, why: str) -> None:
        """Report lines of the run that were not found when they were to be logged."""
        lines = backlog.lines.pop(backlog.logged.restart, 0)
        if lines <= 0:
            return
        after, until = backlog.removed or ("its beginning", backlog.logged.last)
        self.tally.unlogged -= lines
        self.gap(f"{counted(lines, 'line')} between {after} and {until} are missing: {why}", backlog.logged)

    def _end_backlog(self, backlog: Backlog) -> None:
        self.backlog = None
        self._set_logged(backlog.inspected)

    async def _emit(self, block: bytes, replay: Replay, steps: _Steps) -> int:
        lines = block.decode("utf-8", "replace").split("\n")
        plain = self._count_plain(block, len(lines)) if steps is self._steps else 0
        done = fresh = 0
        while done < len(lines):
            async with self._turn():
                self._is_plain = done < plain
                until, new = self._slice(lines, done, plain if self._is_plain else len(lines), replay, steps)
                self.read += until - done
                done, fresh = until, fresh + new
                if done < len(lines):
                    await asyncio.sleep(0)  # let other tasks run after each slice, whichever stream it is from
        return fresh

    def _turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return log_socket().turn

    def _count_plain(self, block: bytes, lines: int) -> int:
        """How many of the first lines of a block need no look of their own."""
        return count_plain(block, lines)

    def _slice(self, lines: list[str], start: int, end: int, replay: Replay, steps: _Steps) -> tuple[int, int]:
        """Emit lines up to `end` until the slice is over; returns where to continue, and the number of new lines."""
        began = clock.monotonic()  # noqa: TID251  # CPU time of a slice
        self._refill(timing.now())
        position, fresh = replay.position, 0
        before, gap, take, without_time = steps
        for number in range(start, end):
            stamp, _, text = lines[number].partition(" ")
            time = normal_time(stamp)
            if time is None:  # a message of the kubelet, or the end of a line that began before sinceTime
                if without_time and replay.live and lines[number]:
                    self._take(position, position.last, lines[number], timed=False)
                continue
            before(replay, time)
            if replay.live:
                position.advance(time)
            elif not replay.fresh(time):
                continue
            fresh += 1
            if replay.gap is not None:
                (after, _), replay.gap = replay.gap, None
                gap(position, after, time)
            if (own := own_text(text)) is not None:
                take(position, time, own)
            if clock.monotonic() - began > SLICE_SECONDS:  # noqa: TID251  # CPU time of a slice
                return number + 1, fresh
        return end, fresh

    # lines that come for the first time

    def _before(self, replay: Replay, _: str) -> None:
        if self.backlog is None and not self.queue.has_room:
            self.fall_behind(replay.position)

    def _missing(self, position: Position, after: str, time: str) -> None:
        """A response begins after the last line that was read: the node has removed what was between."""
        self.gap_until = time
        self.gap(f"lines between {after} and {time} may be missing: the node rotated the log", position)

    def _take(self, position: Position, time: str, text: str, *, timed: bool = True) -> None:
        """Inspect a line, and log it if it may be logged.

        :param timed: whether it has a timestamp: only then, each response has it, and it can be logged later.
        """
        text = masked_trace(text, self._source.role, self._job)
        self._inspect(text, time, position.restart, self._is_plain)
        if self.backlog is None and not self.only_counts:
            self._log(position, time, text)
        elif timed:
            self.tally.unlogged += 1
            if self.backlog is not None:
                self.backlog.add(1)

    # lines that were inspected before

    def _before_again(self, replay: Replay, _: str) -> None:
        backlog = self.backlog
        is_of_backlog = backlog is not None and backlog.logged is replay.position
        if backlog is None or not is_of_backlog or self.only_counts or not self.queue.has_room_again:
            raise EndReached
        if backlog.end_is_reached:
            self.has_caught_up()
            raise EndReached

    def _removed(self, position: Position, after: str, time: str) -> None:
        if self.backlog is not None:
            self.backlog.removed = after, time

    def _take_again(self, position: Position, time: str, text: str) -> None:
        if self.backlog is None:
            return
        self.backlog.take()
        self.tally.unlogged -= 1
        self._log(position, time, masked_trace(text, self._source.role, self._job))
        if self.backlog.end_is_reached:  # before another task moves a position on
            self.has_caught_up()
            raise EndReached

    def _log(self, position: Position, time: str, text: str) -> None:
        """Log a line, unless it is over the limit."""
        size = len(text) + 1
        if self._flooded or size > self._allowance:
            self._flooded = True
            self.tally.dropped += 1
            self.tally.dropped_bytes += size
            self._unreported += 1
            self._unreported_bytes += size
            return
        if self._unreported:
            self.report_dropped(position)
        self._allowance -= size
        self.tally.lines += 1
        self.tally.bytes += size
        pod, container, role, index = self._replica
        init, again = self._source.init, self._source.again
        self.queue.add(LogLine(pod, container, role, index, position.restart, time, text, False, init, "", 1, again))

    def _lose(self, lines: int) -> None:
        self.tally.lines -= lines
        self.tally.unlogged += lines

    def _lose_notice(self, text: str) -> None:
        if text in self.tally.gaps:
            self.tally.unsaid = (*self.tally.unsaid, text)[:MAX_GAPS]

    def _refill(self, now: float) -> None:
        """Regain allowance for the time that has passed; a flood is over with the allowance of the pause."""
        rate, burst, pause = self._limit
        self._allowance = min(burst, self._allowance + (now - self._allowed_at) * rate)
        self._allowed_at = now
        if self._allowance >= min(pause * rate, burst):
            self._flooded = False

    def report_dropped(self, position: Position) -> None:
        """Say how many lines the rate limit has dropped since this was last said."""
        count, size = self._unreported, self._unreported_bytes
        if not count:
            return
        self._unreported = self._unreported_bytes = 0
        dropped = f"dropped {counted(count, 'line')} ({readable_size(size)}) here"
        self.add_notice(f"{dropped}: over the limit of {readable_size(self._limit[0])}/s", position)

    def gap(self, text: str, position: Position) -> None:
        """Say that lines may be missing here, and keep it for the report."""
        self.tally.gaps = (*self.tally.gaps, text)[:MAX_GAPS]
        self.add_notice(text, position)

    def add_notice(self, text: str, position: Position) -> None:
        """Log a message about this place in the container's log."""
        restart, time = position.restart, position.last
        self.queue.add(replace(self._source, restart=restart, time=time, text=text, notice=True, lines=0))


class EarlierEmitter(RateLimitedEmitter):
    """Inspects the lines of one container up to a takeover, logs the last ones again, and counts all others.

    Lines that are not logged again are inspected only if they come in a block with OWN_MARK: a million of them must be
    counted within seconds.

    :param until: the time of the takeover.
    :param restart: the run that the container had then.
    """

    def __init__(
        self,
        sink: Callable[[LogLine], None],
        source: LogLine,
        inspect: Inspect,
        *,
        until: str,
        restart: int,
        job: KnownJob,
        began: float,
    ) -> None:
        super().__init__(sink, source, inspect, job=job, began=began)
        self.again_from = until  #: The time from which lines are logged again.
        self.ended = False  #: Whether all lines up to the takeover were read.
        self._until, self._restart = until, restart

    def _before(self, replay: Replay, time: str) -> None:
        position = replay.position
        if position.restart == self._restart and time >= self._until:
            self.ended = True
            if not replay.live and replay.fresh(time) and replay.gap is not None:  # it is the first line that is left
                self._missing(position, replay.gap[0], time)
            raise EndReached
        self.only_counts = time < self.again_from
        if not (self.only_counts or self.queue.has_room_again):
            raise EndReached

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with log_socket().earlier_turn, log_socket().turn:
            yield

    def _count_plain(self, block: bytes, lines: int) -> int:
        return 0 if OWN_MARK in block else lines

    def _slice(self, lines: list[str], start: int, end: int, replay: Replay, steps: _Steps) -> tuple[int, int]:
        """Likewise. Lines that need no look are only counted; it stops at one that is not certainly among them."""
        position, before = replay.position, min(self.again_from, self._until)
        size = min(COUNTED_LINES, end - start) if self._is_plain and replay.live else 0
        first = normal_times(lines[start : start + 1]) if size else []
        if not first or first[0] >= before:
            return super()._slice(lines, start, end, replay, steps)
        while not (times := normal_times(lines[start : start + size])) or max(times) >= before:
            size //= 2
        position.advance_all(times)
        self.only_counts = True
        self.tally.unlogged += size
        return start + size, size

    @property
    def logs(self) -> bool:
        """Whether some of the lines are logged again."""
        return self.again_from < self._until

    def stop_logging(self) -> None:
        """From now on, lines are only counted."""
        self.again_from = self._until
