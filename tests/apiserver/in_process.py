"""The transport in-process: a client whose requests and watches a test orders, in one event loop without I/O."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Self

from airflow_provider_ktrain.engine.api.answers import ApiStatusError, ApiUnavailable, interpret
from tests.apiserver.faults import Lost
from tests.apiserver.messages import Object, Request, Response
from tests.apiserver.server import ApiServer, LogStream
from tests.apiserver.store import copied
from tests.apiserver.watches import Watch, encoded


class InProcessStream:
    """The response to a watch. The test decides when events arrive, and when the connection breaks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.resource = watch.resource
        self.is_open = True

    @property
    def content(self) -> Self:
        return self

    @property
    def backlog(self) -> int:
        """Number of changes that were not delivered yet."""
        return self._watch.backlog

    def deliver(self, most: int, *, bookmark: bool = False) -> None:
        """Deliver the events of at most that many changes, in one chunk."""
        before, events = self._watch.backlog, self._watch.take(most)
        if bookmark and self._watch.backlog < before and (mark := self._watch.bookmark()) is not None:
            events.append(mark)
        if events:
            self._chunks.put_nowait(encoded(events))

    def abort(self) -> None:
        """Break the connection. What was not delivered is delivered by the next watch."""
        self._chunks.put_nowait(None)

    async def iter_any(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._watch.seconds
        while (left := end - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    chunk = await self._chunks.get()
            except TimeoutError:
                return
            if chunk is None:
                raise ApiUnavailable("cut")
            yield chunk


class InProcessLog:
    """The response to a request for a log. Its lines arrive at once."""

    def __init__(self, log: LogStream) -> None:
        self._log, self._closed = log, asyncio.Event()

    @property
    def content(self) -> Self:
        return self

    def close(self) -> None:
        self._closed.set()

    async def read(self, size: int) -> bytes:
        """The whole response."""
        return b"".join([piece async for piece in self.iter_any()])

    async def iter_any(self) -> AsyncIterator[bytes]:
        pieces, closed = self._log.pieces(), asyncio.ensure_future(self._closed.wait())
        try:
            while True:
                piece = asyncio.ensure_future(anext(pieces, None))
                try:
                    await asyncio.wait([piece, closed], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    piece.cancel()
                if closed.done():
                    raise ApiUnavailable("closed")
                if (found := piece.result()) is None:
                    return
                yield found
        finally:
            closed.cancel()


class InProcessApi:
    """The part of `engine.api.Api` that the owner of a training uses.

    :param actor: names the client in `Gate.actor` and `cut_off`.
    :param informers: see `Api.informers`. Default: none run yet.
    """

    def __init__(
        self, server: ApiServer, actor: str, informers: dict[tuple[str, str, str], object] | None = None
    ) -> None:
        self.actor = actor
        self.informers = {} if informers is None else informers
        self.stats: Counter[str] = Counter()
        self._server = server
        self._at_close: dict[object, Callable[[], Awaitable[None]]] = {}

    async def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None, **_: Any
    ) -> Object:
        sent = None if body is None else copied(body)
        try:
            answer = await self._server.handle(self._signed(Request(method, path, dict(query or {}), sent)))
        except Lost as lost:
            raise ApiUnavailable(str(lost)) from None
        assert isinstance(answer, Response)
        return interpret(method, path, sent, answer.status, answer.data, answer.headers.get("Retry-After"))

    def _signed(self, request: Request) -> Request:
        request.actor, request.sender = self.actor, self
        return request

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, *, query: Mapping[str, str], **_: Any
    ) -> AsyncIterator[InProcessStream | InProcessLog]:
        """A watch, or a log if the server has logs."""
        request = self._signed(Request("GET", path, query))
        try:
            self._server.check_reached(request)
        except Lost as lost:
            raise ApiUnavailable(str(lost)) from None
        answer = self._server.answer(request)
        if isinstance(answer, Response) and answer.status >= 300:
            interpret("GET", path, None, answer.status, answer.data, answer.headers.get("Retry-After"))
        if isinstance(answer, LogStream) and self._server.has_logs:
            yield InProcessLog(answer)
            return
        if not isinstance(answer, Watch):
            raise ApiStatusError(404, "NotFound", path)
        stream = InProcessStream(answer)
        self._server.streams[id(stream)] = stream
        try:
            yield stream
        finally:
            stream.is_open = False
            del self._server.streams[id(stream)]

    async def cluster(self) -> str:
        return "https://cluster"

    def on_notice(self, tell: Callable[[str], object]) -> Callable[[], None]:
        return lambda: None

    def add_known_object(self, path: str, uid: str) -> Callable[[], None]:
        return lambda: None

    def at_close(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        handle = object()
        self._at_close[handle] = callback

        def remove() -> None:
            self._at_close.pop(handle, None)

        return remove

    async def close(self) -> None:
        """Stop the informers."""
        for callback in list(self._at_close.values()):
            await callback()
