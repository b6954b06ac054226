"""From the bytes of a log stream to lines that are handed on: split, told from repeated ones, limited, counted."""

from __future__ import annotations

import asyncio
import time as clock
from collections.abc import Callable
from dataclasses import dataclass, replace

from airflow_provider_ktrain.core.logs.cursor import Position, Replay, normal_time
from airflow_provider_ktrain.engine.logs.budget import StreamBudget

SLICE = 0.004  #: seconds that lines are handed on before the loop gets its turn
LINE_LIMIT = 256 * 1024  #: bytes of a line; Airflow loses messages of megabytes


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


Inspect = Callable[[str, str, int], None]  #: called with a line's text, its time and the number of its container's run


def ignore(text: str, time: str, run: int) -> None:
    """An inspector of lines that looks at none."""


@dataclass(frozen=True)
class Rate:
    """How much of one container is handed on; what exceeds it is read, counted and left out.

    :param steady: bytes a second.
    :param burst: bytes at once.
    """

    steady: int = 2 * 1024 * 1024
    burst: int = 32 * 1024 * 1024


class Lines:
    """Joins the pieces of a stream to blocks of whole lines. A line over LINE_LIMIT loses its end, and says so."""

    def __init__(self) -> None:
        self.rest = b""  #: the line that has not ended
        self.cut = 0  #: bytes that lines have lost
        self._lost = 0  # bytes that the line in `rest` has lost

    def feed(self, chunk: bytes) -> bytes | None:
        """The lines that a piece completes, without the last line end; None where it completes none."""
        end = chunk.rfind(b"\n")
        if end < 0:
            self._keep(chunk)
            return None
        head = chunk[:end]
        if self._lost:
            first = head.find(b"\n")
            first = len(head) if first < 0 else first
            self._lost += first
            self.cut += self._lost
            head = b" ... (%d bytes left out)" % self._lost + head[first:]
        block = self.rest + head
        self.rest, self._lost = b"", 0
        self._keep(chunk[end + 1 :])
        return block

    def _keep(self, piece: bytes) -> None:
        room = LINE_LIMIT - len(self.rest)
        self.rest += piece[:room]
        self._lost += max(len(piece) - room, 0)


class Outlet:
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
        rate: Rate,
        source: LogLine,
        inspect: Inspect = ignore,
    ) -> None:
        self.lines = 0
        self.bytes = 0
        self.dropped = 0
        self.dropped_bytes = 0
        self.late = 0  #: lines that came when it was closed
        self.read = 0  #: lines, those that were seen before included
        self.closed = False  #: whether lines are only inspected and counted
        self.gaps: list[str] = []
        self._sink = sink
        self._budget = budget
        self._inspect = inspect
        self._rate = rate
        self._source = source
        self._where = (source.pod, source.container, source.role, source.index)
        self._allowance = float(rate.burst)
        self._allowed_at = clock.monotonic()
        self._flooded = False
        self._untold = self._untold_bytes = 0

    async def hand_on(self, block: bytes, replay: Replay) -> int:
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
        self._allow(began)
        position, fresh = replay.position, 0
        for number in range(start, len(lines)):
            stamp, _, text = lines[number].partition(" ")
            time = normal_time(stamp)
            if time is None:
                self._untimed(lines[number], replay)
            elif replay.live:
                position.advance(time)
                fresh += 1
                self._hand(position, time, text)
            elif replay.fresh(time):
                fresh += 1
                if replay.gap is not None:
                    self.gap(
                        f"lines between {replay.gap.after} and {replay.gap.until} may be missing: "
                        "the log was rotated, or only its end was asked for",
                        position,
                    )
                self._hand(position, time, text)
            if clock.monotonic() - began > SLICE:
                return number + 1, fresh
        return len(lines), fresh

    def _untimed(self, line: str, replay: Replay) -> None:
        """A line without a timestamp: the kubelet's own words, or the end of a line that began before sinceTime."""
        if replay.live and line:
            self._hand(replay.position, replay.position.last, line)

    def _hand(self, position: Position, time: str, text: str) -> None:
        self._inspect(text, time, position.restart)
        if self.closed:
            self.late += 1
            return
        size = len(text) + 1
        if self._flooded or size > self._allowance:
            self._flooded = True
            self._untold += 1
            self._untold_bytes += size
            return
        if self._untold:
            self.tell_dropped(position)
        self._allowance -= size
        self.lines += 1
        self.bytes += size
        pod, container, role, index = self._where
        self._sink(LogLine(pod, container, role, index, position.restart, time, text))

    def _allow(self, now: float) -> None:
        """Time gives allowance back. After a flood nothing is handed on until there is some for five seconds."""
        rate = self._rate
        self._allowance = min(rate.burst, self._allowance + (now - self._allowed_at) * rate.steady)
        self._allowed_at = now
        if self._allowance >= min(5 * rate.steady, rate.burst):
            self._flooded = False

    def tell_dropped(self, position: Position) -> None:
        """Say what the rate limit has left out since it was last said."""
        count, size = self._untold, self._untold_bytes
        if not count:
            return
        self._untold = self._untold_bytes = 0
        self.dropped += count
        self.dropped_bytes += size
        limit = f"more than {self._rate.steady / 1e6:.3g} MB/s"
        self.note(f"{count:,} lines ({size / 1e6:.1f} MB) left out here: {limit}", position)

    def gap(self, text: str, position: Position) -> None:
        """Say, and keep for the report, that lines may be missing."""
        self.gaps.append(text)
        self.note(text, position)

    def note(self, text: str, position: Position) -> None:
        """Say something at this place of the container's log."""
        self._sink(replace(self._source, restart=position.restart, time=position.last, text=text, note=True))
