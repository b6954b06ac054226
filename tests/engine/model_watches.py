"""The part of the cluster model that serves watches: a history of changes, and streams that lag as the test decides.

Each stream has its own position in the history, so that the watch of the jobs may be ahead of the watch of the pods or
behind it. Nothing is delivered before the test calls `deliver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable

Object = dict[str, Any]


def selects(query: Mapping[str, str], obj: Object) -> bool:
    """Whether the selectors of a list or watch request match the object."""
    label, _, value = query.get("labelSelector", "").partition("=")
    labels = obj["metadata"].get("labels") or {}
    if label and (label not in labels or (value and labels[label] != value)):
        return False
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return not name or obj["metadata"]["name"] == name


@dataclass(frozen=True)
class Change:
    """A write of one object. `before` is None for a create, `after` for a deletion; both are snapshots."""

    version: int
    before: Object | None
    after: Object | None

    def event(self, query: Mapping[str, str]) -> Object | None:
        """The event of a watch with these selectors, as the API server sends it. None: it sends none."""
        was = self.before is not None and selects(query, self.before)
        if self.after is not None and selects(query, self.after):
            return {"type": "MODIFIED" if was else "ADDED", "object": self.after}
        if not was or self.before is None:
            return None
        # deleted, or no longer selected: both events have the object's last state and the version of this write
        meta = {**self.before["metadata"], "resourceVersion": str(self.version)}
        return {"type": "DELETED", "object": {**self.before, "metadata": meta}}


class History:
    """All changes of one resource."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.expired = 0  #: a watch can't start before this version
        self._last: dict[str, Object] = {}

    def note(self, version: int, obj: Object, *, deleted: bool = False) -> None:
        """Record a write of the object, which has happened."""
        uid = obj["metadata"]["uid"]
        before = self._last.pop(uid, None)
        after: Object | None = None
        if not deleted:
            after = self._last[uid] = json.loads(json.dumps(obj))
        self.changes.append(Change(version, before, after))


class Stream:
    """The response to a watch request. The test decides when events arrive, and when the connection breaks."""

    def __init__(self, path: str, history: History, query: Mapping[str, str]) -> None:
        self.path = path
        since = int(query["resourceVersion"])
        if since < history.expired:
            raise ApiStatusError(410, "Expired", "too old resource version")
        self._history, self._query = history, query
        self._position = sum(change.version <= since for change in history.changes)
        self._chunks: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    @property
    def content(self) -> Self:
        return self

    @property
    def backlog(self) -> int:
        """Number of changes that were not delivered yet."""
        return len(self._history.changes) - self._position

    def deliver(self, most: int, *, bookmark: bool = False) -> None:
        """Deliver the events of at most that many changes, in one chunk."""
        begin, self._position = self._position, min(self._position + most, len(self._history.changes))
        passed = self._history.changes[begin : self._position]
        events = [event for change in passed if (event := change.event(self._query)) is not None]
        if bookmark and passed and "allowWatchBookmarks" in self._query:
            meta = {"resourceVersion": str(passed[-1].version)}
            events.append({"type": "BOOKMARK", "object": {"metadata": meta}})
        if events:
            self._chunks.put_nowait(b"".join(json.dumps(event).encode() + b"\n" for event in events))

    def cut(self) -> None:
        """Break the connection. What was not delivered is delivered by the next watch."""
        self._chunks.put_nowait(ApiUnavailable("cut"))

    async def iter_any(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end = loop.time() + float(self._query["timeoutSeconds"])
        while (left := end - loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    chunk = await self._chunks.get()
            except TimeoutError:
                return
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk


class WatchingApi:
    """The part of `engine.api.Api` that informers use beside requests.

    :param histories: of the resources, by path.
    :param streams: gets the open watches.
    :param informers: see `Api.informers`. Default: none run yet.
    """

    def __init__(
        self,
        histories: Mapping[str, History],
        streams: list[Stream],
        informers: dict[tuple[str, str, str], object] | None = None,
    ) -> None:
        self.informers = {} if informers is None else informers
        self._histories, self._streams = histories, streams
        self._at_close: dict[object, Callable[[], Awaitable[None]]] = {}

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], **_: Any) -> AsyncIterator[Stream]:
        if self.is_away:
            raise ApiUnavailable("the API server is away")
        if path not in self._histories:  # a log
            raise ApiStatusError(404, "NotFound", path)
        stream = Stream(path, self._histories[path], query)
        self._streams.append(stream)
        try:
            yield stream
        finally:
            self._streams.remove(stream)

    @property
    def is_away(self) -> bool:
        """Whether the API server can't be reached from this process."""
        raise NotImplementedError

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
