"""Where the log of each container stands: following it can stop anywhere and go on with no line lost or told twice.

What a server answers to `sinceTime` (recorded on Kubernetes 1.36): every line of the file from that time on, in the
order of the file; the time counts in whole seconds. Lines of stdout and stderr can stand in an order that is not quite
that of their times, and many lines can have the same time. So a resume asks from the beginning of a second a little
before the last line, and skips as many lines as were seen since then. Where the answer does not begin with the line
that it should begin with, the file is another one (it was rotated, or only its last lines were asked for): then times
decide, and a gap is reported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from airflow_provider_ktrain.core.formats import VERSION
from airflow_provider_ktrain.core.logs.packing import compress, decompress, pack_integers, unpack_integers

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)\Z")
_SECOND = 19  # characters of a time up to its second


def normal_time(stamp: str) -> str | None:
    """A log line's timestamp (RFC 3339, any fraction, any offset) in UTC with nine digits, so that text order is time
    order; None where it is none.
    """
    if len(stamp) == 30 and stamp[29] == "Z" and stamp[19] == "." and stamp[10] == "T":
        return stamp
    match = _RFC3339.match(stamp)
    if match is None:
        return None
    second, fraction, zone = match.groups()
    try:
        return f"{_utc(second, zone)}.{fraction or '':0<9}Z"
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _utc(second: str, zone: str) -> str:
    moment = datetime.fromisoformat(second + zone.replace("Z", "+00:00"))
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


@dataclass(slots=True)
class Window:
    """What was seen from the beginning of a second on: the first line's time, in the file's order, and how many.

    Unless `whole`, the file may have lines of that second before the first one that was counted. `first` is "" where
    the beginning of the window isn't known.
    """

    second: str
    first: str
    count: int
    whole: bool = True


@dataclass(slots=True)
class Position:
    """Where the log of one run of one container stands.

    :param restart: the run: the container's restartCount.
    :param complete: the run has ended and all of its log was read.
    :param first: the time of the first line that was seen; "" before it.
    :param last: the latest time of a line; "" before the first.
    :param at_last: lines seen that have this time.
    :param base: the window that a resume asks for.
    :param newest: the window that becomes it when the next second begins.
    :param rebased: the next line does not follow what was seen, in the file that is served.
    """

    restart: int = 0
    complete: bool = False
    first: str = ""
    last: str = ""
    at_last: int = 0
    base: Window = field(default_factory=lambda: Window("", "", 0))
    newest: Window = field(default_factory=lambda: Window("", "", 0))
    rebased: bool = False

    @property
    def since(self) -> str | None:
        """The sinceTime to go on from, in whole seconds; None: from the beginning."""
        return f"{self.base.second}Z" if self.last else None

    def rebase(self) -> None:
        """Forget the windows: what comes next does not follow what was seen, in the file that is served."""
        self.base = self.newest = Window("", "", 0)
        self.rebased = True

    def advance(self, time: str) -> None:
        """Count one line, whose time is normal."""
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


@dataclass(frozen=True)
class Gap:
    """Lines may be missing between two times: what lay between was rotated away, or not asked for."""

    after: str
    until: str


class Replay:
    """Tells the new lines of an answer from those that were seen, and moves the position on.

    One Replay reads one answer to a request from `position.since`.
    """

    def __init__(self, position: Position) -> None:
        self.position = position
        self.live = not position.last  #: everything from here on is new
        self.gap: Gap | None = None
        self._skip = -1  # lines still to skip; -1: not known before the first line
        self._again = position.at_last

    def follows(self, time: str) -> bool:
        """Whether an answer that begins with a line of that time is of the file that was read: not of another run,
        and not of what a rotation left. Where that is not known, it is.
        """
        base = self.position.base
        return not self.position.last or not base.whole or time == base.first

    def fresh(self, time: str) -> bool:
        """Whether the next line of the answer is new. Its time is normal."""
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
                self.gap = Gap(position.last, time)
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


KEY_BYTES = 6  #: of the hash that stands for a container: two of 1,000 collide once in 500 million cursors
MAX_SIZE = 32 * 1024  #: bytes of a cursor as JSON text: encrypted it must fit the 64 KiB of MySQL's column
NEVER_SEEN = timedelta(seconds=60)  #: how long a started container may stay unseen, because a watch is behind
_MILLISECOND = 10**6
_COMPLETE, _STARTED, _WHOLE, _ANCHORED = 1, 2, 4, 8  # flags of a packed position
_COLUMNS = 8


def _nanoseconds(time: str) -> int:
    """Of a normal time, since 1970; ValueError where it isn't a date."""
    since = datetime.fromisoformat(time[:_SECOND]) - datetime(1970, 1, 1)
    return (since.days * 86400 + since.seconds) * 10**9 + int(time[_SECOND + 1 : -1] or 0)


def _time(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{(datetime(1970, 1, 1) + timedelta(seconds=seconds)).isoformat()}.{rest:09d}Z"


def _row(at: Position) -> tuple[int, ...]:
    """A position as integers: flags, restart, last, last - first (ms), at_last, and the base window.

    The newest window is left out: the base alone is enough to resume from.
    """
    if at.complete or not at.last:
        return (_COMPLETE if at.complete else 0, at.restart, 0, 0, 0, 0, 0, 0)
    last, base = _nanoseconds(at.last), at.base
    second = _nanoseconds(f"{base.second}.0Z")
    flags = _STARTED | (_WHOLE if base.whole else 0) | (_ANCHORED if base.first else 0)
    # rounded up: a first line that seems later than it was hides a rotation in that millisecond, and invents none
    first = -(-_nanoseconds(at.first or at.last) // _MILLISECOND)
    offset = _nanoseconds(base.first) - second if base.first else 0
    return (
        flags, at.restart, last, last // _MILLISECOND - first, at.at_last, (last - second) // 10**9, offset, base.count
    )  # fmt: skip


def _position(row: Sequence[int]) -> Position:
    flags, restart, last, before, at_last, seconds, offset, count = row
    if not flags & _STARTED:
        return Position(restart, complete=bool(flags & _COMPLETE))
    second = (last // 10**9 - seconds) * 10**9
    whole = bool(flags & _WHOLE)
    base = Window(_time(second)[:_SECOND], _time(second + offset) if flags & _ANCHORED else "", count, whole)
    first = _time((last // _MILLISECOND - before) * _MILLISECOND)
    return Position(restart, False, first, _time(last), at_last, base, Window(_time(last)[:_SECOND], "", 0))


@dataclass
class Cursor:
    """The positions of a job's containers, by `Cursor.key` of pod uid and container name.

    It travels in a trigger's arguments, in at most MAX_SIZE bytes: docs/reference/formats.md describes the format.
    1,000 containers fit. Of more, those whose logs are the furthest behind keep exact positions; all others are read
    again from one common time.

    :param names: `pod/container` of each key, for messages; may be missing.
    :param since: the common time from which containers without a position are read; "" for the beginning.
    :param omitted: how many containers have no position for lack of space.
    :param unreadable: True where the cursor that was handed over could not be read: everything is read again.
    """

    positions: dict[bytes, Position] = field(default_factory=dict)
    names: dict[bytes, str] = field(default_factory=dict)
    since: str = ""
    omitted: int = 0
    unreadable: bool = False

    @staticmethod
    def key(uid: str, container: str) -> bytes:
        """What stands for a container: a hash of its pod's uid and its name."""
        return hashlib.sha256(f"{uid}/{container}".encode()).digest()[:KEY_BYTES]

    def position(self, uid: str, container: str) -> Position:
        """The position of a container, made where there is none."""
        return self.positions.setdefault(self.key(uid, container), Position())

    def has(self, uid: str, container: str) -> bool:
        """Whether lines of a container were read, here or before a handover."""
        return bool((at := self.positions.get(self.key(uid, container))) and (at.last or at.complete))

    def begin(self, uid: str, container: str, restart: int) -> Position:
        """The position at the beginning of another run of a container, in place of the last one's."""
        position = self.positions[self.key(uid, container)] = Position(restart)
        return position

    def resume(self, uid: str, container: str, restart: int, started: str) -> None:
        """Give a container that is followed for the first time here its position: the common time's, if there is one.

        :param restart: its newest run.
        :param started: when that run started, as its status says; "" where that isn't known.
        """
        key = self.key(uid, container)
        if key in self.positions or not self.since:
            return
        began = normal_time(started)
        margin = _time(_nanoseconds(self.since) - NEVER_SEEN // timedelta(microseconds=1) * 1000)
        if began is not None and began < margin:
            self.positions[key] = self._at_common_time(restart)
        elif restart:
            self.positions[key] = self._at_common_time(restart - 1)

    def _at_common_time(self, restart: int) -> Position:
        second = self.since[:_SECOND]
        return Position(restart, False, self.since, self.since, 0, Window(second, "", 0, False), Window(second, "", 0))

    def forget(self, uid: str, container: str) -> None:
        """A container whose pod is gone from the API server."""
        key = self.key(uid, container)
        self.positions.pop(key, None)
        self.names.pop(key, None)

    def unfinished(self) -> dict[bytes, Position]:
        """The positions of what is not complete."""
        return {key: at for key, at in self.positions.items() if not at.complete}

    def to_dict(self, limit: int = MAX_SIZE) -> dict[str, Any]:
        """For JSON.

        :param limit: bytes that it may have as JSON text.
        """
        if not self.positions:
            return {} if not self.since else {"version": VERSION, "since": self.since, "omitted": self.omitted}
        rows = self._rows()
        for names in (True, False):
            if _size(whole := self._packed(rows, len(rows), names)) <= limit:
                return whole
        fits, too_many = 0, len(rows)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if _size(self._packed(rows, middle, False)) <= limit:
                fits = middle
            else:
                too_many = middle
        return self._packed(rows, fits, False)

    def _rows(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """What is complete first, then what was not begun, then by the time of the last line."""
        rows = []
        for key, at in self.positions.items():
            try:
                rows.append((key, _row(at)))
            except ValueError:  # a time that isn't a date: read it again
                rows.append((key, _row(Position(at.restart))))
        return sorted(rows, key=lambda row: (not row[1][0] & _COMPLETE, row[1][2], row[0]))

    def _packed(self, rows: Sequence[tuple[bytes, tuple[int, ...]]], count: int, names: bool) -> dict[str, Any]:
        kept, left_out = rows[:count], rows[count:]
        columns = [list(column) for column in zip(*(row for _, row in kept), strict=True)] or [[]] * _COLUMNS
        columns[2] = [time - before for time, before in zip(columns[2], [0, *columns[2]], strict=False)]
        data = pack_integers([len(kept)]) + b"".join(key for key, _ in kept) + b"".join(map(pack_integers, columns))
        packed: dict[str, Any] = {"version": VERSION, "containers": compress(data)}
        if names:
            lines = ("" if row[0] & _COMPLETE else self.names.get(key, "") for key, row in kept)
            packed["names"] = compress("\n".join(lines).encode())
        if left_out or self.since:
            times = [_time(row[2]) for _, row in left_out[:1]]  # the earliest; what isn't begun counts as 1970
            packed["since"] = min(filter(None, [*times, self.since]))
            packed["omitted"] = self.omitted + len(left_out)
        return packed

    @classmethod
    def from_dict(cls, data: object) -> Cursor:
        """What `to_dict` gave; None or an empty dict is an empty cursor."""
        if not data:
            return cls()
        if not isinstance(data, Mapping):
            return cls(unreadable=True)
        try:
            cursor = cls(since=normal_time(str(data.get("since"))) or "", omitted=int(data.get("omitted") or 0))
            if "containers" in data:
                cursor._unpack(decompress(data["containers"]), str(data.get("names") or ""))
            return cursor
        except (ValueError, TypeError, OverflowError):
            return cls(unreadable=True)

    def _unpack(self, data: bytes, names: str) -> None:
        (count,), start = unpack_integers(data, 0, 1)
        keys = [data[at : at + KEY_BYTES] for at in range(start, start + count * KEY_BYTES, KEY_BYTES)]
        start += count * KEY_BYTES
        columns = []
        for _ in range(_COLUMNS):
            column, start = unpack_integers(data, start, count)
            columns.append(column)
        last = 0
        for key, row in zip(keys, zip(*columns, strict=True), strict=True):
            last += row[2]
            self.positions[key] = _position((*row[:2], last, *row[3:]))
        if names:
            texts = decompress(names).decode().split("\n")
            self.names = {key: text for key, text in zip(keys, texts, strict=False) if text}


def _size(data: Mapping[str, Any]) -> int:
    return len(json.dumps(data))
