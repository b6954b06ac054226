"""Collapses the lines of an init container that waits: `waiting for master (repeated 90 times in 3 min)`.

A program that waits writes the same few lines again and again, such as the answer of a name server and a line of its
own. A line is a repetition if it is equal to one of the last MAX_RECENT_LINES different lines, apart from dates and
times of day. Other numbers distinguish lines, because they may show progress. Repetitions are held back until another
line comes or until the follower requests them. Then they become one line with their number, or are logged as they are
if there are only a few.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.core.timestamps import parse_timestamp

MAX_RECENT_LINES = 8  #: different lines that a repetition is compared with
MIN_COLLAPSED_LINES = 3  #: fewer repetitions are logged as they are
_TIME = re.compile(r"(?<!\d)(?:\d{4}[-/]\d\d[-/]\d\d[T ]?)?(?:\d\d:\d\d:\d\d(?:[.,]\d+)?)?")
_MICROSECONDS = len("2026-11-21T10:00:00.000000")


@dataclass(frozen=True)
class Repeated:
    """One line of an init container, or a line that stands for several.

    :param time: the kubelet's, with nine digits; of several lines, the last one's.
    :param text: the line.
    :param count: number of lines that it stands for. Default: 1.
    """

    time: str
    text: str
    count: int = 1


class Repeats:
    """The repetitions that are held back of one container run."""

    def __init__(self) -> None:
        self._recent: dict[str, None] = {}  # the last different lines without their times, the newest last
        self._held: list[Repeated] = []  # the first repetitions since the last flush
        self._counts: Counter[str] = Counter()  # of all of them, by the line without its times
        self._last = Repeated("", "")  # the newest one

    @property
    def held(self) -> int:
        """Number of lines that are held back."""
        return self._counts.total()

    def add(self, time: str, text: str) -> list[Repeated]:
        """Take the next line.

        :return: what to log now, in this order; nothing if the line is a repetition.
        """
        key = _without_times(text)
        if key not in self._recent:
            out = [*self.flush(), Repeated(time, text)]
            self._recent[key] = None
            if len(self._recent) > MAX_RECENT_LINES:
                del self._recent[next(iter(self._recent))]
            return out
        self._last = Repeated(time, text)
        self._counts[key] += 1
        if len(self._held) < MIN_COLLAPSED_LINES:
            self._held.append(self._last)
        return []

    def flush(self) -> list[Repeated]:
        """What was held back: the lines themselves, or one line with their number."""
        held, count, last = self._held, self.held, self._last
        same = self._counts[_without_times(last.text)]
        self._held, self._counts = [], Counter()
        if count < MIN_COLLAPSED_LINES:
            return held
        others = f", with {counted(count - same, 'other line')}" if count > same else ""
        times = "once" if same == 1 else f"{same:,} times"
        text = f"{last.text} (repeated {times} in {_duration(held[0].time, last.time)}{others})"
        return [Repeated(last.time, text, count)]


def _without_times(text: str) -> str:
    return _TIME.sub("", text)


def _duration(begin: str, end: str) -> str:
    """The time between two timestamps: `45 s`, `3 min`."""
    first, last = (parse_timestamp(time[:_MICROSECONDS]) for time in (begin, end))
    seconds = max((last - first).total_seconds(), 0) if first and last else 0.0  # a line may have no time
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
