"""From the bytes of a log stream to lines in the task's log: split, deduplicated, rate-limited and counted.

Stacks that a container prints when it is stopped are no lines: they are left out.

The order matters. Every new line is inspected first: results and the causes of failures must not get lost in a flood of
lines, and don't wait for Airflow's log. Then the rate limit decides whether it is logged. It is a token bucket of
bytes: a container may write a burst, and regains its allowance over time. Once it has used it up, all lines are dropped
until it has regained the allowance of some time. So a flood causes few long gaps, each with one note that counts its
lines, and not a note after every line. An init container's limit is low: one that waits repeats the same few lines.
"""

from __future__ import annotations

import asyncio
import copy
import time as clock
from collections.abc import Callable
from dataclasses import dataclass, replace

from airflow_provider_ktrain.core.logs.cursor import Position, Replay, normal_time
from airflow_provider_ktrain.core.logs.exec_trace import KnownJob, masked_trace
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.text.output import counted, readable_size
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import SLICE_SECONDS, LineQueue, log_socket

MAX_LINE_BYTES = 256 * 1024  #: bytes of a line; Airflow loses messages of megabytes
#: of a container: bytes that it may log per second on average, and at once; lines over it are dropped
BYTES_PER_SECOND, BURST_BYTES = 2 * 1024 * 1024, 32 * 1024 * 1024
INIT_BYTES_PER_SECOND, INIT_BURST_BYTES = 16, 32 * 1024  #: the same of an init container
PAUSE_SECONDS, INIT_PAUSE_SECONDS = 5.0, 600.0  #: for which it regains its allowance before lines are logged again
MAX_GAPS = 20  #: kept per container of deleted pods


@dataclass(slots=True)
class Tally:
    """What became of one container's log. Its emitter counts in it; a copy is reported.

    :param lines, bytes: that were logged.
    :param dropped: lines dropped by the rate limit.
    :param dropped_bytes: bytes of these lines, and bytes cut off lines over MAX_LINE_BYTES.
    :param gaps: where lines may be missing, and why.
    :param complete: whether everything that the server had was read.
    :param late: lines that were read but not logged. A late reader may still log them.
    """

    lines: int = 0
    bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    gaps: tuple[str, ...] = ()
    complete: bool = False
    late: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.lines + other.lines,
            self.bytes + other.bytes,
            self.dropped + other.dropped,
            self.dropped_bytes + other.dropped_bytes,
            (self.gaps + other.gaps)[:MAX_GAPS],
            self.complete and other.complete,
            self.late + other.late,
        )


Inspect = Callable[[str, str, int], None]  #: called with a line's text, its time and the number of its container's run


def ignore(text: str, time: str, run: int) -> None:
    """An inspector that does nothing."""


class LineSplitter:
    """Joins the chunks of a stream to blocks of whole lines. Lines over MAX_LINE_BYTES are cut, with a mark there."""

    def __init__(self) -> None:
        self.unended_line = b""  #: the line that has no line end yet
        self.bytes_cut = 0  #: of all lines
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
    """A late reader has logged what it was to log."""


class RateLimitedEmitter:
    """Passes on the new lines of one container, within its rate limit and in short slices of time.

    :param on_full: called with the position when no further line can be passed on; `logs` is False from then on.
        Default: None, lines wait for room.
    :param until: called before each line with the position and the line's time, and after them with "": whether to
        end there, with `EndReached`. Default: None, never.
    :param job: called for the job, as far as it is known. Default: nothing is.
    """

    def __init__(
        self,
        sink: Callable[[LogLine], None],
        source: LogLine,
        inspect: Inspect = ignore,
        *,
        on_full: Callable[[Position], None] | None = None,
        until: Callable[[Position, str], bool] | None = None,
        job: KnownJob = dict,
    ) -> None:
        self.tally = Tally()
        self.read = 0  #: lines, including repeated ones: it grows while there is progress
        self.logs = True  #: whether lines are logged; otherwise they are inspected and counted as late
        self.repays = False  #: whether the lines were counted as late before
        self.gap_until = ""  #: time of the first line after the last gap that a rotation left
        self.queue = LineQueue(sink, self._lose, late=until is not None)
        self._inspect, self._source = inspect, source
        self._on_full, self._until, self._job = on_full, until, job
        self._replica = (source.pod, source.container, source.role, source.index)
        limit = BYTES_PER_SECOND, BURST_BYTES, PAUSE_SECONDS
        self._limit = (INIT_BYTES_PER_SECOND, INIT_BURST_BYTES, INIT_PAUSE_SECONDS) if source.init else limit
        self._allowance = float(self._limit[1])
        self._allowed_at = timing.now()
        self._flooded = False
        self._unreported = self._unreported_bytes = 0

    async def emit(self, block: bytes, replay: Replay) -> int:
        """Emit the new lines of a block; returns their number.

        If this is canceled, the position stands after the last line that was emitted.
        """
        lines = block.decode("utf-8", "replace").split("\n")
        done = fresh = 0
        while done < len(lines):
            if self._on_full is None and self.logs:
                await self.queue.room()
            async with log_socket().turn:
                until, new = self._slice(lines, done, replay)
            self.read += until - done
            done, fresh = until, fresh + new
            if done < len(lines):
                await asyncio.sleep(0)
        self.end_at(replay.position, "")
        return fresh

    def end_at(self, position: Position, time: str) -> None:
        """Raise EndReached if `until` says so."""
        if self._until is not None and self._until(position, time):
            raise EndReached

    def _slice(self, lines: list[str], start: int, replay: Replay) -> tuple[int, int]:
        """Emit lines until the slice is over; returns where to continue, and the number of new lines."""
        began = clock.monotonic()  # noqa: TID251  # CPU time of a slice
        self._refill(timing.now())
        position, fresh = replay.position, 0
        for number in range(start, len(lines)):
            if self.logs and self._on_full is not None and not self.queue.has_room:
                self.logs = False
                self._on_full(copy.deepcopy(position))
            stamp, _, text = lines[number].partition(" ")
            time = normal_time(stamp)
            if time is None:  # a message of the kubelet, or the end of a line that began before sinceTime
                if replay.live and lines[number]:
                    self._emit_line(position, position.last, lines[number], counts=False)
                continue
            self.end_at(position, time)
            if replay.live:
                position.advance(time)
            elif not replay.fresh(time):
                continue
            fresh += 1
            if replay.gap is not None:
                (after, self.gap_until), replay.gap = replay.gap, None
                self.gap(f"lines between {after} and {time} may be missing: the node rotated the log", position)
            if (own := own_text(text)) is not None:
                self._emit_line(position, time, own)
            if clock.monotonic() - began > SLICE_SECONDS:  # noqa: TID251  # CPU time of a slice
                return number + 1, fresh
        return len(lines), fresh

    def _emit_line(self, position: Position, time: str, text: str, *, counts: bool = True) -> None:
        """Inspect a line, and log it if it may be logged.

        :param counts: whether each response has the line, so that a late reader finds it again. Default: True.
        """
        text = masked_trace(text, self._source.role, self._job)
        self._inspect(text, time, position.restart)
        if not self.logs:
            self.tally.late += counts and not self.repays
            return
        self.tally.late -= counts and self.repays
        size = len(text) + 1
        if self._flooded or size > self._allowance:
            self._flooded = True
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
        self.tally.late += lines

    def _refill(self, now: float) -> None:
        """Regain allowance for the time that has passed; a flood is over with the allowance of the pause."""
        rate, burst, pause = self._limit
        self._allowance = min(burst, self._allowance + (now - self._allowed_at) * rate)
        self._allowed_at = now
        if self._allowance >= min(pause * rate, burst):
            self._flooded = False

    def report_dropped(self, position: Position) -> None:
        """Note how many lines the rate limit has dropped since the last note."""
        count, size = self._unreported, self._unreported_bytes
        if not count:
            return
        self._unreported = self._unreported_bytes = 0
        self.tally.dropped += count
        self.tally.dropped_bytes += size
        dropped = f"dropped {counted(count, 'line')} ({readable_size(size)}) here"
        self.note(f"{dropped}: over the limit of {readable_size(self._limit[0])}/s", position)

    def gap(self, text: str, position: Position) -> None:
        """Note that lines may be missing here, and keep it for the report."""
        self.tally.gaps += (text,)
        self.note(text, position)

    def note(self, text: str, position: Position) -> None:
        """Log a message about this place in the container's log."""
        restart, time = position.restart, position.last
        self.queue.add(replace(self._source, restart=restart, time=time, text=text, note=True, lines=0))
