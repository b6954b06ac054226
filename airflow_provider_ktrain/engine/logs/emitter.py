"""From the bytes of a log stream to lines that are handed on: split, told from repeated ones, limited, counted."""

from __future__ import annotations

import asyncio
import time as clock
from collections.abc import Callable
from dataclasses import dataclass, replace

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Position, Replay, normal_time
from airflow_provider_ktrain.engine.logs.budget import StreamBudget

SLICE_SECONDS = 0.004  #: seconds that lines are handed on before the loop gets its turn
MAX_LINE_BYTES = 256 * 1024  #: bytes of a line; Airflow loses messages of megabytes


@dataclass(slots=True)  # not frozen: that takes three times as long, and one is made for every line
class LogLine:
    """One line of one container.

    `time` is the kubelet's, in UTC with nine digits; "" where there is none. `text` has no line end; bytes that are no
    UTF-8 are replaced. `note` marks what the follower itself has to say at that place: a gap, lines left out.
    """

    pod: str
    container: str
    role: str
    index: int
    restart: int
    time: str
    text: str
    note: bool = False


def format_line(text: str, kind: Kind, role: str, index: int, container: str | None = None) -> str:
    """A line as it is logged: `[Role index] text`, with the container's name unless it runs the training.

    :param container: None for the training container.
    """
    name = "" if kind.container is None or container in (None, kind.container) else f" {container}"
    return f"[{role} {index}{name}] {text}"


Inspect = Callable[[str, str, int], None]  #: called with a line's text, its time and the number of its container's run


def ignore(text: str, time: str, run: int) -> None:
    """An inspector of lines that looks at none."""


@dataclass(frozen=True)
class RateLimit:
    """How much of one container is handed on; what exceeds it is read, counted and left out.

    :param bytes_per_second: on average.
    :param burst_bytes: at once.
    """

    bytes_per_second: int = 2 * 1024 * 1024
    burst_bytes: int = 32 * 1024 * 1024


class LineSplitter:
    """Joins the pieces of a stream to blocks of whole lines. A line over MAX_LINE_BYTES loses its end, and says so."""

    def __init__(self) -> None:
        self.unended_line = b""  #: the line that has not ended
        self.bytes_cut = 0  #: bytes that lines have lost
        self._bytes_cut_of_line = 0  # bytes that `unended_line` has lost

    def feed(self, chunk: bytes) -> bytes | None:
        """The lines that a piece completes, without the last line end; None where it completes none."""
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
            head = b" ... (%d bytes left out)" % self._bytes_cut_of_line + head[first:]
        block = self.unended_line + head
        self.unended_line, self._bytes_cut_of_line = b"", 0
        self._keep(chunk[end + 1 :])
        return block

    def _keep(self, piece: bytes) -> None:
        room = MAX_LINE_BYTES - len(self.unended_line)
        self.unended_line += piece[:room]
        self._bytes_cut_of_line += max(len(piece) - room, 0)


class RateLimitedEmitter:
    """Hands the lines of one container to the sink, in slices of the loop's time and within the rate.

    :param sink: called for each line.
    :param budget: its gate is held while a slice is handed on: one stream of the process at a time.
    :param source: the line to make others from: pod, container, role, index.
    :param inspect: called with text, time and run of each new line before the rate limit drops any.
    """

    def __init__(
        self,
        sink: Callable[[LogLine], None],
        budget: StreamBudget,
        rate_limit: RateLimit,
        source: LogLine,
        inspect: Inspect = ignore,
    ) -> None:
        self.lines = 0
        self.bytes = 0
        self.dropped = 0
        self.dropped_bytes = 0
        self.late = 0  #: lines that came when it was closed
        self.read = 0  #: lines, those that were seen before included
        self.count_only = False  #: whether lines are only inspected and counted
        self.gaps: list[str] = []
        self._sink = sink
        self._budget = budget
        self._inspect = inspect
        self._limit = rate_limit
        self._source = source
        self._replica = (source.pod, source.container, source.role, source.index)
        self._allowance = float(rate_limit.burst_bytes)
        self._allowed_at = clock.monotonic()
        self._flooded = False
        self._unreported = self._unreported_bytes = 0

    async def emit(self, block: bytes, replay: Replay) -> int:
        """Hand on the lines of a block that are new; returns how many these are.

        Where it is cancelled, the position stands after the last line that was handed on.
        """
        lines = block.decode("utf-8", "replace").split("\n")
        done = fresh = 0
        while done < len(lines):
            async with self._budget.gate:
                await self._budget.awake()
                until, new = self._slice(lines, done, replay)
            self.read += until - done
            done, fresh = until, fresh + new
            if done < len(lines):
                await asyncio.sleep(0)
        return fresh

    def _slice(self, lines: list[str], start: int, replay: Replay) -> tuple[int, int]:
        """Hand on lines until the slice is over; returns where to go on, and how many were new."""
        began = clock.monotonic()
        self._refill(began)
        position, fresh = replay.position, 0
        for number in range(start, len(lines)):
            stamp, _, text = lines[number].partition(" ")
            time = normal_time(stamp)
            if time is None:
                self._emit_without_time(lines[number], replay)
            elif replay.live:
                position.advance(time)
                fresh += 1
                self._emit_line(position, time, text)
            elif replay.fresh(time):
                fresh += 1
                if replay.gap is not None:
                    self.gap(
                        f"lines between {replay.gap.after} and {replay.gap.until} may be missing: "
                        "the log was rotated, or only its end was asked for",
                        position,
                    )
                self._emit_line(position, time, text)
            if clock.monotonic() - began > SLICE_SECONDS:
                return number + 1, fresh
        return len(lines), fresh

    def _emit_without_time(self, line: str, replay: Replay) -> None:
        """A line without a timestamp: the kubelet's own words, or the end of a line that began before sinceTime."""
        if replay.live and line:
            self._emit_line(replay.position, replay.position.last, line)

    def _emit_line(self, position: Position, time: str, text: str) -> None:
        self._inspect(text, time, position.restart)
        if self.count_only:
            self.late += 1
            return
        size = len(text) + 1
        if self._flooded or size > self._allowance:
            self._flooded = True
            self._unreported += 1
            self._unreported_bytes += size
            return
        if self._unreported:
            self.report_dropped(position)
        self._allowance -= size
        self.lines += 1
        self.bytes += size
        pod, container, role, index = self._replica
        self._sink(LogLine(pod, container, role, index, position.restart, time, text))

    def _refill(self, now: float) -> None:
        """Time gives allowance back. After a flood nothing is handed on until there is some for five seconds."""
        limit = self._limit
        self._allowance = min(limit.burst_bytes, self._allowance + (now - self._allowed_at) * limit.bytes_per_second)
        self._allowed_at = now
        if self._allowance >= min(5 * limit.bytes_per_second, limit.burst_bytes):
            self._flooded = False

    def report_dropped(self, position: Position) -> None:
        """Say what the rate limit has left out since it was last said."""
        count, size = self._unreported, self._unreported_bytes
        if not count:
            return
        self._unreported = self._unreported_bytes = 0
        self.dropped += count
        self.dropped_bytes += size
        reason = f"more than {self._limit.bytes_per_second / 1e6:.3g} MB/s"
        self.note(f"{count:,} lines ({size / 1e6:.1f} MB) left out here: {reason}", position)

    def gap(self, text: str, position: Position) -> None:
        """Say, and keep for the report, that lines may be missing."""
        self.gaps.append(text)
        self.note(text, position)

    def note(self, text: str, position: Position) -> None:
        """Say something at this place of the container's log."""
        self._sink(replace(self._source, restart=position.restart, time=position.last, text=text, note=True))
