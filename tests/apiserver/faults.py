"""What a test can do to requests and their answers.

A moment of a request is named `before GET /path`, or `after GET /path` when it has been processed. Patterns are regular
expressions: of a moment from its beginning, of a method as a whole, of a path anywhere in path and query.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tests.apiserver.messages import Request, Response, failure

NOTHING = re.compile(r"(?!)")
#: Makes the answer to a request from the server's own answer, which is None if the request was not processed.
Answer = Callable[[Request, Response | None], Response]


class Lost(Exception):
    """The connection breaks: a request or its answer is lost."""


class Connection(Protocol):
    """A connection of a client, on which an answer is awaited or a stream is open."""

    @property
    def is_open(self) -> bool: ...

    def abort(self) -> None: ...


@dataclass
class Gate:
    """Where a request waits until the test lets it pass, or loses it or its answer."""

    request: Request
    processed: bool
    opened: asyncio.Future[None]

    @property
    def actor(self) -> str:
        return self.request.actor

    def open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def lose(self) -> None:
        if not self.opened.done():
            self.opened.set_exception(Lost("cut"))


@dataclass
class _Fault:
    method: str
    path: re.Pattern[str]
    count: float  # requests that still get it
    answer: Answer
    processed: bool

    def meets(self, request: Request) -> bool:
        return bool(self.count and re.fullmatch(self.method, request.method) and self.path.search(request.line))


@dataclass(eq=False, repr=False)
class Faults:
    """The faults of a server.

    :ivar token: which requests must have. "": any, or none.
    :ivar cut_off: actors that can't reach the server.
    :ivar rejected: requests that the server didn't see, by path, because it was away.
    :ivar refused: number of requests that got an error status from `fail`.
    :ivar frozen: resources whose watches show nothing new.
    :ivar paused: set when a request waits at the moment that `pause` has set.
    :ivar gates: requests that wait where `hold` has told them to.
    :ivar cut_after: returns after how many bytes the next stream is cut. None: it isn't.
    :ivar clean_cuts: whether a cut looks like the end of the response.
    :ivar cuts: number of streams that were cut.
    :ivar sent: number of pieces of streams that were sent.
    """

    token: str = ""
    cut_off: set[str] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    frozen: set[str] = field(default_factory=set)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    gates: list[Gate] = field(default_factory=list)
    cut_after: Callable[[], int | None] = lambda: None
    clean_cuts: bool = False
    cuts: int = 0
    sent: int = 0
    connections: dict[int, Connection] = field(default_factory=dict)  # of requests that were not answered yet
    streams: dict[int, Connection] = field(default_factory=dict)  # of open streams
    _away: bool = False
    _faults: list[_Fault] = field(default_factory=list)
    _pause: re.Pattern[str] = NOTHING
    _hold: re.Pattern[str] = NOTHING
    _slow: tuple[re.Pattern[str], float] = (NOTHING, 0.0)

    # connections

    @property
    def away(self) -> bool:
        """Whether the server can't be reached. When it becomes True, all connections break."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        if away:
            self.break_connections()

    def break_connections(self) -> None:
        """Break the connections of all requests that wait for an answer, and all streams."""
        self.cut()
        for connection in list(self.connections.values()):
            connection.abort()

    def cut(self) -> None:
        """Cut all open streams."""
        for connection in list(self.streams.values()):
            connection.abort()

    @property
    def open(self) -> int:
        """Streams that their clients have not closed."""
        return sum(connection.is_open for connection in self.streams.values())

    # answers

    def fail(
        self, method: str, path: str, status: int = 503, count: float = 1, *, reason: str = "", message: str = ""
    ) -> None:
        """Answer so many requests with an error status; they are not processed."""

        def answer(request: Request, _: Response | None) -> Response:
            self.refused += 1
            where = request.where
            return failure(status, message, reason, name=where.name, group=where.group, kind=where.resource)

        self.replace(method, path, answer, count, processed=False)

    def refuse(self, status: int) -> None:
        """Answer all requests with an error status, until `clear_failures`."""
        self.fail("", "", status, math.inf)

    def replace(
        self, method: str, path: str, answer: Response | Answer, count: float = 1, *, processed: bool = True
    ) -> None:
        """Replace the answers of so many requests.

        :param answer: the answer, or a function of the request and the true answer (None if it isn't processed).
        :param processed: whether the request is carried out all the same. Default: True.
        """
        made = (lambda request, true: answer) if isinstance(answer, Response) else answer
        self._faults.append(_Fault(method or ".*", re.compile(path), count, made, processed))

    @property
    def fails(self) -> bool:
        """Whether `fail` or `replace` still concern a request."""
        return any(fault.count for fault in self._faults)

    def clear_failures(self) -> None:
        """End what `fail` and `replace` have begun."""
        self._faults.clear()

    def _replaced(self, request: Request, true: Response | None) -> Response | None:
        for fault in self._faults:
            if fault.processed is (true is not None) and fault.meets(request):
                fault.count -= 1
                return fault.answer(request, true)
        return None

    # moments

    def pause(self, moment: str) -> None:
        """Never answer a request that comes to this moment. An empty pattern ends that for later requests."""
        self._pause = re.compile(moment) if moment else NOTHING
        self.paused.clear()

    def hold(self, moment: str) -> None:
        """Let requests that come to this moment wait in `gates`, which the test opens in any order. Empty: none."""
        self._hold = re.compile(moment) if moment else NOTHING

    def slow(self, moment: str, seconds: float) -> None:
        """Let requests wait at this moment. Empty: none."""
        self._slow = re.compile(moment) if moment else NOTHING, seconds

    async def _wait(self, request: Request, *, processed: bool) -> None:
        """Wait at a moment.

        :raises Lost: the request or its answer is lost.
        """
        moment = f"{'after' if processed else 'before'} {request.line}"
        pattern, seconds = self._slow
        if pattern.match(moment):
            await asyncio.sleep(seconds)
        if self._pause.match(moment):
            self.paused.set()
            await asyncio.Event().wait()
        if self._hold.match(moment):
            gate = Gate(request, processed, asyncio.get_running_loop().create_future())
            self.gates.append(gate)
            try:
                await gate.opened
            finally:
                self.gates.remove(gate)
            self.check_reached(request)

    def check_reached(self, request: Request) -> None:
        """
        :raises Lost: the server can't be reached.
        """
        if self._away or request.actor in self.cut_off:
            self.rejected[request.path] += 1
            raise Lost("the API server is away")


def cutter(rng: random.Random, largest: int, times: int) -> Callable[[], int | None]:
    """Cuts a number of streams, each after a random number of bytes: for `cut_after`."""
    left = itertools.count(times, -1)
    return lambda: rng.randrange(largest) if next(left) > 0 else None
