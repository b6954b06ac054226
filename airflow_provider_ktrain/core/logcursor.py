"""Where the log of each container stands: following it can stop anywhere and go on with no line lost or told twice.

What a server answers to `sinceTime` (recorded on Kubernetes 1.36): every line of the file from that time on, in the
order of the file; the time counts in whole seconds. Lines of stdout and stderr can stand in an order that is not quite
that of their times, and many lines can have the same time. So a resume asks from the beginning of a second a little
before the last line, and skips as many lines as were seen since then. Where the answer does not begin with the line
that it should begin with, the file is another one (it was rotated, or only its last lines were asked for): then times
decide, and a gap is reported.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache

_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)\Z")
_SECOND = 19  # characters of a time up to its second


def normal_time(stamp: str) -> str | None:
    """A log line's timestamp (RFC 3339, any fraction, any offset) in UTC with nine digits, so that text order is time
    order; None where it is none."""
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

    Unless `whole`, the file may have lines of that second before the first one that was counted.
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
        and not of what a rotation left. Where that is not known, it is."""
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
            if not same and time > position.last:
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


@dataclass
class Cursor:
    """The positions of a job's containers, by pod uid and container name, and the names of the pods by their uids.

    Small enough for a trigger's arguments, which MySQL keeps to 64 KiB: packed, a container takes about 70 bytes.
    """

    positions: dict[str, Position] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)

    def position(self, uid: str, container: str) -> Position:
        """The position of a container, made where there is none."""
        return self.positions.setdefault(f"{uid}/{container}", Position())

    def has(self, uid: str, container: str) -> bool:
        """Whether lines of a container were read, here or before a handover."""
        return bool((at := self.positions.get(f"{uid}/{container}")) and (at.last or at.complete))

    def begin(self, uid: str, container: str, restart: int) -> Position:
        """The position at the beginning of another run of a container, in place of the last one's."""
        position = self.positions[f"{uid}/{container}"] = Position(restart)
        return position

    def unfinished(self) -> dict[str, dict[str, Position]]:
        """The positions of what is not complete, by pod uid and container name."""
        found: dict[str, dict[str, Position]] = {}
        for key, at in self.positions.items():
            if not at.complete:
                uid, _, container = key.partition("/")
                found.setdefault(uid, {})[container] = at
        return found

    def to_dict(self) -> dict[str, str]:
        """For JSON; of complete containers, all but the run is left out."""
        rows = []
        for key, at in self.positions.items():
            name = self.pods.get(key.partition("/")[0], "")
            rows.append((key, name, *astuple(Position(at.restart, complete=True) if at.complete else at)))
        if not rows:
            return {}
        return {"zlib": b85encode(zlib.compress(json.dumps(rows).encode())).decode()}

    @classmethod
    def from_dict(cls, data: Mapping[str, str] | None) -> Cursor:
        """What `to_dict` gave; None is an empty cursor."""
        cursor = cls()
        if data:
            for key, name, *at in json.loads(zlib.decompress(b85decode(data["zlib"]))):
                position = cursor.positions[key] = Position(*at)
                position.base, position.newest = Window(*at[5]), Window(*at[6])
                if name:
                    cursor.pods[key.partition("/")[0]] = name
        return cursor
