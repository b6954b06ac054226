"""The position in each container's log: following can stop at any line and resume with no line lost or repeated.

Timestamps alone can't identify a line. So a position contains a window: a second shortly before the last line, and the
number of lines read since its beginning. A resume requests the log from that second on and skips as many lines.
docs/reference/log-cursor.md explains why, and what happens if the log was rotated.

The positions travel in `Handover` (`engine/follow/deferral.py`). A retry begins without them: it has a log of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from base64 import b85decode, b85encode
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import VERSION, json_size

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)\Z")
_SECOND, _NORMAL = 19, 30  # characters of a normal time up to its second, and of all of it


def normal_time(stamp: str) -> str | None:
    """A log line's timestamp (RFC 3339, any fraction, any offset) in UTC with nine digits, so that text order is time
    order; None if it isn't a timestamp.
    """
    if len(stamp) == _NORMAL and stamp[29] == "Z" and stamp[19] == "." and stamp[10] == "T":
        return stamp
    match = _RFC3339.match(stamp)
    if match is None:
        return None
    second, fraction, zone = match.groups()
    try:
        return f"{_utc(second, zone)}.{fraction or '':0<9}Z"
    except ValueError:
        return None


def normal_times(lines: Sequence[str]) -> list[str]:
    """The timestamps of many lines, fast. Empty unless `normal_time` would return each of them unchanged."""
    width, number = _NORMAL + 1, len(lines)
    heads = "".join([line[:width] for line in lines])
    marks = [heads[at::width] for at in (10, 19, _NORMAL - 1, _NORMAL)]  # what `normal_time` looks at, and the space
    if marks != [mark * number for mark in "T.Z "] or heads.count(" ") != number or len(heads) != number * width:
        return []
    return [line[:_NORMAL] for line in lines]


@lru_cache(maxsize=64)
def _utc(second: str, zone: str) -> str:
    moment = datetime.fromisoformat(second + zone.replace("Z", "+00:00"))
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


@dataclass(slots=True)
class Window:
    """The lines read from the beginning of a second on: the time of the first one in the file, and their number.

    Unless `whole`, the file may have lines of that second before the first one that was counted. `first` is "" if the
    beginning of the window isn't known.
    """

    second: str
    first: str
    count: int
    whole: bool = True


@dataclass(slots=True)
class Position:
    """The position in the log of one run of one container.

    :param complete: whether the run has ended and all of its log was read.
    :param first: the time of the first line read; "" before it.
    :param last: the latest time of a line; "" before the first.
    :param at_last: number of lines read with this time.
    :param base: the window that a resume requests.
    :param newest: the window that becomes `base` when the next second begins.
    :param rebased: whether the next line may not directly follow the last one in the file.
    """

    restart: int = 0
    complete: bool = False
    first: str = ""
    last: str = ""
    at_last: int = 0
    base: Window = field(default_factory=lambda: Window("", "", 0))
    newest: Window = field(default_factory=lambda: Window("", "", 0))
    rebased: bool = False

    @classmethod
    def at(cls, restart: int, time: str) -> Position:
        """Before the first line of a run that is not earlier than `time`."""
        second = time[:_SECOND]
        before = datetime.fromisoformat(second) - timedelta(seconds=1)  # for lines written out of order
        return cls(restart, False, time, time, 0, Window(before.isoformat(), "", 0, False), Window(second, "", 0))

    @property
    def since(self) -> str | None:
        """The sinceTime to resume from, in whole seconds; None for the beginning."""
        return f"{self.base.second}Z" if self.last else None

    def has_reached(self, other: Position) -> bool:
        """Whether this position, which was a copy of an earlier state of `other`, stands after the same line now.

        After a rotation, the windows of the two differ; then the times decide.
        """
        if (self.restart, self.last, self.at_last) != (other.restart, other.last, other.at_last):
            return False
        comparable = (self.base.first, self.newest.first) == (other.base.first, other.newest.first)
        return not comparable or (self.base, self.newest) == (other.base, other.newest)

    def rebase(self) -> None:
        """Forget the windows: the next line may not directly follow the last one in the file."""
        self.base = self.newest = Window("", "", 0)
        self.rebased = True

    def advance(self, time: str) -> None:
        """Count one line."""
        second = time[:_SECOND]
        if second == self.newest.second:
            self.newest.count += 1
            self.base.count += 1
        elif self.base.second <= second < self.newest.second:
            self.base.count += 1
        elif not self.newest.second or second < self.base.second:
            # the first line, or a clock that was set back: begin a second before, for lines written out of order
            if self.newest.second:
                self.last = ""
            whole, self.rebased = not (self.rebased or self.newest.second), False
            self.first = self.first or time
            before = datetime.fromisoformat(second) - timedelta(seconds=1)
            self.base = Window(before.isoformat(), time, 1, whole)
            self.newest = Window(second, time, 1, whole)
        else:
            if self.newest.first:
                self.base = self.newest
            self.base.count += 1
            self.newest = Window(second, time, 1)
        if time > self.last:
            self.last, self.at_last = time, 1
        elif time == self.last:
            self.at_last += 1

    def advance_all(self, times: Sequence[str]) -> None:
        """Count lines; fast if their times are in order."""
        if times and (times[0] < self.last or times != sorted(times)):
            for time in times:
                self.advance(time)
            return
        begin = 0
        while begin < len(times):
            end = bisect_left(times, times[begin][:_SECOND] + "~", begin)  # of its second
            self.advance(times[begin])
            self.newest.count += end - begin - 1
            self.base.count += end - begin - 1
            if (last := times[end - 1]) == self.last:
                self.at_last += end - begin - 1
            else:
                self.last, self.at_last = last, end - bisect_left(times, last, begin)
            begin = end


class Replay:
    """Separates the new lines of a response from known ones, and moves the position.

    One Replay reads one response to a request from `position.since`.
    """

    def __init__(self, position: Position) -> None:
        self.position = position
        self.live = not position.last  #: Whether all further lines are new.
        self.gap: tuple[str, str] | None = None  #: Lines may be missing between these times: the log was rotated.
        self._skip = -1  # known lines left to skip; -1: unknown before the first line
        self._again = position.at_last

    @classmethod
    def after(cls, position: Position) -> Replay:
        """Of text that certainly follows the position."""
        replay = cls(position)
        replay.live = True
        return replay

    def follows(self, time: str | None) -> bool:
        """Whether a response whose first line has that time, or none, continues the file that was read.

        Otherwise it is the log of another run, or what a rotation left. True if this can't be known.
        """
        base = self.position.base
        return time is None or not self.position.last or not base.whole or time == base.first

    def fresh(self, time: str) -> bool:
        """Whether the next line of the response is new."""
        if not self.live and self._seen(time):
            return False
        self.position.advance(time)
        return True

    def _seen(self, time: str) -> bool:
        position = self.position
        if self._skip < 0:
            same = time == position.base.first
            self._skip = position.base.count if same else 0
            if not same and time > position.last and position.base.first:
                self.gap = position.last, time
        if time > position.last:
            seen = False
        elif self._skip:
            self._skip -= 1
            self.live = not self._skip
            return True
        else:
            seen = time < position.last or self._again > 0
            self._again -= time == position.last
        if not seen:
            self.live = True
            position.rebase()
        return seen


KEY_BYTES = 6  #: Size of a container's hash: of 1,000 containers, two collide once in 500 million cursors.
MAX_SIZE = 32 * 1024  #: Bytes of a cursor as JSON text; see also `core.reporting.trigger_arguments`.
MAX_WATCH_DELAY_SECONDS = 60  #: How long a watch may take to show a container that has started.
_MILLISECOND = 10**6  # in nanoseconds


def _nanoseconds(time: str) -> int:
    """Nanoseconds since 1970 of a `normal_time`; ValueError if it isn't a date."""
    since = datetime.fromisoformat(time[:_SECOND]) - datetime(1970, 1, 1)
    return (since.days * 86400 + since.seconds) * 10**9 + int(time[_SECOND + 1 : -1] or 0)


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{(datetime(1970, 1, 1) + timedelta(seconds=seconds)).isoformat()}.{rest:09d}Z"


class _Row(NamedTuple):
    """A position as integers: see docs/reference/log-cursor.md. Of the windows, a resume needs only `base`.

    `before` is rounded down: if the first line seems too late, a rotation in that millisecond is missed, but none is
    reported falsely.
    """

    key: int
    complete: int
    restart: int
    last: int = 0
    before: int = 0
    at_last: int = 0
    second: int = 0
    offset: int = -1
    lines: int = 0
    whole: int = True


def _row(key: int, at: Position) -> _Row:
    if at.complete or not at.last:
        return _Row(key, at.complete, at.restart)
    last, base = _nanoseconds(at.last), at.base
    second = _nanoseconds(f"{base.second}.0Z")
    return _Row(
        key,
        complete=False,
        restart=at.restart,
        last=last,
        before=last // _MILLISECOND - -(-_nanoseconds(at.first or at.last) // _MILLISECOND),
        at_last=at.at_last,
        second=(last - second) // 10**9,
        offset=_nanoseconds(base.first) - second if base.first else -1,
        lines=base.count,
        whole=base.whole,
    )


def _position(row: _Row) -> Position:
    if not row.last:
        return Position(row.restart, complete=bool(row.complete))
    last, second = _time(row.last), (row.last // 10**9 - row.second) * 10**9
    first = _time(second + row.offset) if row.offset >= 0 else ""
    base = Window(_time(second)[:_SECOND], first, row.lines, bool(row.whole))
    newest = Window(last[:_SECOND], "", 0)
    began = (row.last // _MILLISECOND - row.before) * _MILLISECOND
    return Position(row.restart, False, _time(began), last, row.at_last, base, newest)


@dataclass
class Cursor:
    """The positions up to which lines of a job's containers are logged, by `Cursor.key` of pod uid and container name.

    A trigger's arguments contain it, in at most MAX_SIZE bytes: docs/reference/log-cursor.md describes the format.
    1,000 containers fit. If there are more, those whose logs are furthest behind keep exact positions; all others are
    read again from one common time.

    :param inspected: up to where lines are inspected, for containers whose log is behind. It is not handed over.
    :param names: `pod/container` of each key, for messages; may be incomplete.
    :param since: the common time from which containers without a position are read; "" for the beginning.
    :param omitted: number of containers whose position didn't fit.
    :param unreadable: whether the handed-over cursor could not be read, so that all logs are read again.
    """

    positions: dict[int, Position] = field(default_factory=dict)
    inspected: dict[int, Position] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    since: str = ""
    omitted: int = 0
    unreadable: bool = False

    @staticmethod
    def key(uid: str, container: str) -> int:
        """The key of a container: a hash of its pod's uid and its name."""
        return int.from_bytes(hashlib.sha256(f"{uid}/{container}".encode()).digest()[:KEY_BYTES])

    def position(self, uid: str, container: str) -> Position:
        """The position of a container; a new one at the beginning if there is none."""
        return self.positions.setdefault(self.key(uid, container), Position())

    def has(self, uid: str, container: str) -> bool:
        """Whether lines of a container were inspected, in this process or before a handover."""
        key = self.key(uid, container)
        at = self.inspected.get(key) or self.positions.get(key)
        return at is not None and bool(at.last or at.complete)

    def resume(self, uid: str, container: str, restart: int, started: str) -> None:
        """Set the position of a container without one to the common time, if there is one.

        :param started: when that run started, according to its status; "" if unknown.
        """
        key = self.key(uid, container)
        if key in self.positions or not self.since:
            return
        began = normal_time(started)
        margin = _time(_nanoseconds(self.since) - MAX_WATCH_DELAY_SECONDS * 10**9)
        if began is not None and began < margin:
            self.positions[key] = Position.at(restart, self.since)
        elif restart:
            self.positions[key] = Position.at(restart - 1, self.since)

    def forget(self, uid: str, container: str) -> None:
        """Remove a container whose pod was deleted."""
        key = self.key(uid, container)
        self.positions.pop(key, None)
        self.inspected.pop(key, None)
        self.names.pop(key, None)

    def to_dict(self, limit: int = MAX_SIZE) -> dict[str, Any]:
        """The cursor as JSON data.

        :param limit: bytes of the JSON text. Default: MAX_SIZE.
        """
        if not (self.positions or self.since):
            return {}
        rows = self._rows()
        for names in (True, False):
            if json_size(whole := self._packed(rows, len(rows), names)) <= limit:
                return whole
        too_many = bisect_right(range(len(rows)), limit, key=lambda count: json_size(self._packed(rows, count, False)))
        return self._packed(rows, max(too_many - 1, 0), False)

    def _rows(self) -> list[_Row]:
        """Complete positions first, then those without lines, then by the time of the last line."""
        rows = []
        for key, at in self.positions.items():
            try:
                rows.append(_row(key, at))
            except ValueError:  # a timestamp that isn't a date: read the log again
                rows.append(_row(key, Position(at.restart)))
        return sorted(rows, key=lambda row: (not row.complete, row.last, row.key))

    def _packed(self, rows: Sequence[_Row], count: int, names: bool) -> dict[str, Any]:
        kept, left_out = rows[:count], rows[count:]
        columns: dict[str, Any] = {name: [row[number] for row in kept] for number, name in enumerate(_Row._fields)}
        # differences are shorter; `itertools.accumulate` reverses them
        columns["last"] = [last - before for before, last in pairwise((0, *columns["last"]))]
        if names:
            columns["names"] = ["" if row.complete else self.names.get(row.key, "") for row in kept]
        data = zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), 9)
        packed: dict[str, Any] = {"version": VERSION, "containers": b85encode(data).decode()}
        if left_out or self.since:
            times = [_time(row.last) for row in left_out[:1]]  # the earliest; 1970 without lines
            packed["since"] = min(filter(None, [*times, self.since]))
            packed["omitted"] = self.omitted + len(left_out)
        return packed

    @classmethod
    def from_dict(cls, data: object) -> Cursor:
        """Read what `to_dict` returned; None or an empty dict is an empty cursor."""
        if not data:
            return cls()
        if not isinstance(data, Mapping):
            return cls(unreadable=True)
        try:
            cursor = cls(since=normal_time(str(data.get("since"))) or "", omitted=int(data.get("omitted") or 0))
            if "containers" in data:
                cursor._unpack(data["containers"])
            return cursor
        except (KeyError, OverflowError, TypeError, ValueError, zlib.error):
            return cls(unreadable=True)

    def _unpack(self, text: str) -> None:
        columns = json.loads(zlib.decompress(b85decode(text)))
        columns["last"] = accumulate(columns["last"])
        rows = [_Row(*row) for row in zip(*(columns[name] for name in _Row._fields), strict=True)]
        self.positions = {row.key: _position(row) for row in rows}
        names = columns.get("names") or ()
        self.names = {row.key: name for row, name in zip(rows, names, strict=False) if name}
