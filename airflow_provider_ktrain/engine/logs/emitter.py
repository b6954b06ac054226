"""From the bytes of a log stream to lines in the task's log: split, deduplicated, rate-limited and counted.

The order matters. Every new line is inspected first: results and the causes of failures must not get lost in a flood of
lines. Then the rate limit decides whether it is logged. It is a token bucket of bytes: a container may write a burst,
and regains its allowance over time. Once it has used it up, all lines are dropped until it has regained five seconds'
worth. So a flood causes few long gaps, each with one note that counts its lines, and not a note after every line.

An init container that waits writes the same few lines again and again. A few of them are logged, and then a few every
ten minutes; the others are counted. A line is a repetition if it is equal to one of the last MAX_RECENT_LINES different
lines, apart from dates and times of day. Other numbers distinguish lines, because they may show progress.
"""

from __future__ import annotations

import asyncio
import re
import time as clock
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from airflow_provider_ktrain.core.logs.cursor import Position, Replay, normal_time
from airflow_provider_ktrain.core.text import counted, readable_size
from airflow_provider_ktrain.engine.logs.log_gate import LogGate

SLICE_SECONDS = 0.004  #: for which one stream may log lines before other tasks run
MAX_LINE_BYTES = 256 * 1024  #: bytes of a line; Airflow loses messages of megabytes
#: of a container: bytes that it may log per second on average, and at once; lines over it are dropped
BYTES_PER_SECOND, BURST_BYTES = 2 * 1024 * 1024, 32 * 1024 * 1024
MAX_RECENT_LINES = 8  #: different lines of an init container that a repetition is compared with
MAX_REPETITIONS, REPETITION_SECONDS = 6, 600.0  #: repetitions in a row that an init container may log in that time
MAX_GAPS = 20  #: kept per container of deleted pods
_TIME = re.compile(r"(?<!\d)(?:\d{4}[-/]\d\d[-/]\d\d[T ]?)?(?:\d\d:\d\d:\d\d(?:[.,]\d+)?)?")


@dataclass(slots=True)  # not frozen: that takes three times as long, and one is made for every line
class LogLine:
    """One line of one container.

    `time` is the kubelet's, in UTC with nine digits; "" if there is none. `text` has no line end; bytes that aren't
    UTF-8 are replaced. `note` marks a message of the follower about that place in the log: a gap, or dropped lines.
    `init` marks lines of an init container. `pod_uid` is set where the line stands for its container.
    """

    pod: str
    container: str
    role: str
    index: int
    restart: int
    time: str
    text: str
    note: bool = False
    init: bool = False
    pod_uid: str = ""


@dataclass(slots=True)
class Tally:
    """What became of one container's log. Its emitter counts in it; a copy is reported.

    :param lines, bytes: that were logged; repetitions that were left out count as lines.
    :param dropped: lines dropped by the rate limit.
    :param dropped_bytes: bytes of these lines, and bytes cut off lines over MAX_LINE_BYTES.
    :param gaps: where lines may be missing, and why.
    :param complete: whether everything that the server had was read.
    :param late: lines that were counted but not logged, because the final drain ran out of time.
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


class RateLimitedEmitter:
    """Calls the sink with the new lines of one container, within its rate limit and in short slices of time.

    :param sink: called for each line.
    :param gate: through which the lines of all streams of the process are logged.
    :param source: a line with the pod, container, role and index of all lines.
    :param inspect: called with text, time and run of each new line before the rate limit drops any.
    """

    def __init__(
        self,
        sink: Callable[[LogLine], None],
        gate: LogGate,
        source: LogLine,
        inspect: Inspect = ignore,
    ) -> None:
        self.tally = Tally()
        self.read = 0  #: lines, including repeated ones: it grows while there is progress
        self.is_emitting = False  #: whether received lines are being emitted, or are held back
        self.count_only = False  #: whether lines are only inspected and counted
        self.gap_until = ""  #: time of the first line after the last gap that a rotation left
        self._sink = sink
        self._gate = gate
        self._inspect = inspect
        self._source = source
        self._replica = (source.pod, source.container, source.role, source.index)
        self._recent: deque[tuple[int, str]] = deque(maxlen=MAX_RECENT_LINES)  # of an init container: run and line
        self._repetitions, self._repetitions_end = 0, 0.0  # in a row, and when the next ones are logged again
        self._left_out = 0  # repetitions that the log doesn't mention yet
        self._allowance = float(BURST_BYTES)
        self._allowed_at = clock.monotonic()
        self._flooded = False
        self._unreported = self._unreported_bytes = 0

    async def emit(self, block: bytes, replay: Replay) -> int:
        """Emit the new lines of a block; returns their number.

        If this is canceled, the position stands after the last line that was emitted.
        """
        lines = block.decode("utf-8", "replace").split("\n")
        done = fresh = 0
        self.is_emitting = True
        try:
            async with self._gate.burst():
                while done < len(lines):
                    async with self._gate.turn():
                        logged, size = self.tally.lines, self.tally.bytes
                        until, new = self._slice(lines, done, replay)
                        self._gate.count(self.tally.lines - logged, self.tally.bytes - size)
                    self.read += until - done
                    done, fresh = until, fresh + new
                    if done < len(lines):
                        await asyncio.sleep(0)
        finally:
            self.is_emitting = False
        return fresh

    def _slice(self, lines: list[str], start: int, replay: Replay) -> tuple[int, int]:
        """Emit lines until the slice is over; returns where to continue, and the number of new lines."""
        began = clock.monotonic()
        self._refill(began)
        position, fresh = replay.position, 0
        for number in range(start, len(lines)):
            stamp, _, text = lines[number].partition(" ")
            time = normal_time(stamp)
            if time is None:  # a message of the kubelet, or the end of a line that began before sinceTime
                if replay.live and lines[number]:
                    self._emit_line(position, position.last, lines[number])
            elif replay.live:
                position.advance(time)
                fresh += 1
                self._emit_line(position, time, text)
            elif replay.fresh(time):
                fresh += 1
                if replay.gap is not None:
                    after, self.gap_until = replay.gap
                    rotated = f"lines between {after} and {time} may be missing: the node rotated the log"
                    self.gap(rotated, position)
                self._emit_line(position, time, text)
            if clock.monotonic() - began > SLICE_SECONDS:
                return number + 1, fresh
        return len(lines), fresh

    def _emit_line(self, position: Position, time: str, text: str) -> None:
        self._inspect(text, time, position.restart)
        if self.count_only:
            self.tally.late += 1
            return
        if self._source.init and self._is_left_out(position.restart, text):
            self._left_out += 1
            return
        if self._left_out:
            self._report_left_out(position)
        self._log(position, time, text)

    def _is_left_out(self, restart: int, text: str) -> bool:
        """Whether a line of an init container is a repetition, and enough of them were logged."""
        line, now = (restart, _TIME.sub("", text)), clock.monotonic()
        repeated = line in self._recent
        if not repeated:
            self._recent.append(line)
        if not repeated or now >= self._repetitions_end:
            self._repetitions, self._repetitions_end = 0, now + REPETITION_SECONDS
        self._repetitions += repeated
        return self._repetitions > MAX_REPETITIONS

    def _report_left_out(self, position: Position) -> None:
        count, self._left_out = self._left_out, 0
        self._log(position, position.last, f"({counted(count, 'repeated line')} left out here)", count)

    def _log(self, position: Position, time: str, text: str, count: int = 1) -> None:
        """Emit one line, which stands for `count` lines, unless the rate limit drops it."""
        size = len(text) + 1
        if self._flooded or size > self._allowance:
            self._flooded = True
            self._unreported += count
            self._unreported_bytes += size
            return
        if self._unreported:
            self.report_dropped(position)
        self._allowance -= size
        self.tally.lines += count
        self.tally.bytes += size
        pod, container, role, index = self._replica
        self._sink(LogLine(pod, container, role, index, position.restart, time, text, False, self._source.init))

    def finish(self, position: Position) -> None:
        """Report what was left out or dropped since the last line: the run has ended, or nobody follows it here now."""
        if self._left_out:
            self._report_left_out(position)
        self.report_dropped(position)

    def _refill(self, now: float) -> None:
        """Regain allowance for the time that has passed; a flood is over with the allowance of five seconds."""
        self._allowance = min(BURST_BYTES, self._allowance + (now - self._allowed_at) * BYTES_PER_SECOND)
        self._allowed_at = now
        if self._allowance >= min(5 * BYTES_PER_SECOND, BURST_BYTES):
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
        self.note(f"{dropped}: over the limit of {readable_size(BYTES_PER_SECOND)}/s", position)

    def gap(self, text: str, position: Position) -> None:
        """Note that lines may be missing here, and keep it for the report."""
        self.tally.gaps += (text,)
        self.note(text, position)

    def note(self, text: str, position: Position) -> None:
        """Emit a message about this place in the container's log."""
        self._sink(replace(self._source, restart=position.restart, time=position.last, text=text, note=True))
