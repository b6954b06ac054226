"""Watches: initial events, changes that match a selector, bookmarks, and the timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterator

from aiohttp import web

from ktrain_embedded.apiserver.listing import ListOptions
from ktrain_embedded.apiserver.negotiation import encode
from ktrain_embedded.apiserver.tables import View
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.selectors import Selector
from ktrain_embedded.objects.store import Change, Obj, Store

DEFAULT_TIMEOUT = 1800  # seconds. A watch without timeoutSeconds ends after one to two times this value.
BOOKMARK_PERIOD = 60.0  # seconds
BOOKMARK_BEFORE_END = 2.0  # seconds
BACKLOG = 50_000  # changes. The watch of a client with more unread changes is closed.
CHUNK = 256  # events per write
BACKLOG_CHECK_INTERVAL = 0.05  # seconds between checks of delayed events


class Watch:
    """A watch of a resource: a stream of JSON lines."""

    def __init__(
        self, store: Store, view: View, namespace: str | None, options: ListOptions, delay: Callable[[], float]
    ) -> None:
        """:param delay: returns the seconds by which events are delayed (a fault switch)."""
        self._store, self._view, self._namespace, self._options, self._delay = store, view, namespace, options, delay
        self._resource = view.resource
        self._backlog: deque[tuple[float, Change]] = deque()
        self._wakeup = asyncio.Event()
        self._overflown = False
        self._seen = store.version  # the version up to which the client has received all changes
        self._head = True  # the column definitions of a Table are sent once

    async def serve(self, request: web.Request, response: web.StreamResponse) -> None:
        """Write the whole stream to the response. Raise ConnectionError if the client has disconnected."""
        response.content_type = "application/json"
        response.enable_chunked_encoding()
        loop = asyncio.get_running_loop()
        timeout = self._options.timeout or DEFAULT_TIMEOUT * (1 + random.random())
        end = loop.time() + max(timeout, 0)
        stop = self._store.subscribe(self._resource, self._take)
        try:
            first = list(self._initial())  # before the first await, so that no change is lost
            await response.prepare(request)
            for at in range(0, len(first), CHUNK):
                await response.write(b"".join(first[at : at + CHUNK]))
            await self._follow(response, end)
        finally:
            stop()

    def _take(self, change: Change) -> None:
        if len(self._backlog) >= BACKLOG:
            self._overflown = True
        else:
            self._backlog.append((asyncio.get_running_loop().time(), change))
        self._wakeup.set()

    def _initial(self) -> Iterator[bytes]:
        """Yield events for the existing objects, or for the changes since the requested version."""
        options = self._options
        if options.initial_events or (options.initial_events is None and not options.version):
            for change in self._store.latest(self._resource, self._namespace):
                if options.selector.matches(change.object):
                    yield self._line("ADDED", change.object, change)
            if options.initial_events and options.bookmarks:
                yield self._bookmark({"annotations": {"k8s.io/initial-events-end": "true"}})
        elif options.version:
            self._seen = max(self._seen, options.version)
            try:
                for change in self._store.changes_since(self._resource, options.version):
                    yield from self._lines(change)
            except ApiError as e:
                self._overflown = True
                yield line("ERROR", encode(e.status()))

    async def _follow(self, response: web.StreamResponse, end: float) -> None:
        loop = asyncio.get_running_loop()
        # send a bookmark shortly before the end, and about once a minute
        marks = [end - BOOKMARK_BEFORE_END, loop.time() + BOOKMARK_PERIOD] if self._options.bookmarks else []
        while not self._overflown:
            now, delay = loop.time(), self._delay()
            ready: list[bytes] = []
            while self._backlog and self._backlog[0][0] + delay <= now and len(ready) < CHUNK:
                change = self._backlog.popleft()[1]
                ready += self._lines(change)
                self._seen = max(self._seen, change.version)
            if marks and min(marks) <= now and not self._backlog:
                self._seen = max(self._seen, self._store.version)
                ready.append(self._bookmark({}))
                marks = [now + BOOKMARK_PERIOD if mark <= now else mark for mark in marks]
            if ready:
                await response.write(b"".join(ready))
                continue
            if now >= end:
                return
            # check again soon: the fault with the delay may be removed
            due = [end, *marks, *([now + BACKLOG_CHECK_INTERVAL] if self._backlog else [])]
            self._wakeup.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(due)):
                    await self._wakeup.wait()

    def _lines(self, change: Change) -> Iterator[bytes]:
        """Yield the event of a change for this watch, if any.

        An object that starts to match the selector is ADDED. An object that no longer matches is DELETED.
        """
        if self._namespace is not None and change.object["metadata"].get("namespace") != self._namespace:
            return
        if self._options.version and change.version <= self._options.version:
            return
        kind, obj = seen_as(change, self._options.selector)
        if kind:
            yield self._line(kind, obj, change)

    def _line(self, kind: str, obj: Obj, change: Change) -> bytes:
        if obj is change.object and not self._view.form:
            return line(kind, change.encoded)
        shown, self._head = self._view.one(obj, head=self._head), False
        return line(kind, encode(shown))

    def _bookmark(self, meta: Obj) -> bytes:
        metadata = {"resourceVersion": str(self._seen), **meta}
        obj = {"kind": self._resource.kind, "apiVersion": self._resource.api_version, "metadata": metadata}
        return line("BOOKMARK", encode(obj))


def seen_as(change: Change, selector: Selector) -> tuple[str, Obj]:
    """Return the type and object of a change's event for a watch with this selector. The type is "" for no event."""
    if not selector:
        return change.type, change.object
    previous = change.previous if change.previous is not None and selector.matches(change.previous) else None
    if change.type != "DELETED" and selector.matches(change.object):
        return ("ADDED" if previous is None else "MODIFIED"), change.object
    if previous is None:
        return "", change.object
    version = change.object["metadata"]["resourceVersion"]
    return "DELETED", {**previous, "metadata": {**previous["metadata"], "resourceVersion": version}}


def line(kind: str, obj: bytes) -> bytes:
    """Return a watch event as a line of the stream."""
    return b'{"type":%s,"object":%s}\n' % (json.dumps(kind).encode(), obj)
