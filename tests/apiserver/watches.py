"""Watches: a position in the history of a resource."""

from __future__ import annotations

import asyncio
import bisect
import json
from collections.abc import AsyncIterator, Collection, Mapping

from tests.apiserver.messages import Object, Refused, failure
from tests.apiserver.selectors import selector
from tests.apiserver.store import Store


def encoded(events: Collection[Object]) -> bytes:
    """Events as they are sent."""
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


class Watch:
    """The events that a watch has still to deliver. Whoever serves it decides when.

    :param frozen: resources whose watches show nothing new.
    :raises Refused: the query isn't valid.
    """

    content_type = "application/json"

    def __init__(self, store: Store, resource: str, query: Mapping[str, str], frozen: Collection[str] = ()) -> None:
        version = query.get("resourceVersion") or "0"
        if not version.isdigit():
            why = f'strconv.ParseUint: parsing "{version}": invalid syntax'
            raise Refused(500, f'resourceVersion: Invalid value: "{version}": {why}')
        self.resource = resource
        self.has_bookmarks = query.get("allowWatchBookmarks") == "true"
        self.seconds = float(query.get("timeoutSeconds", 3600))
        self.version = int(version)  #: Version of the last change that was taken.
        self._expired = 0 < self.version < store.oldest
        self._store, self._frozen, self._selected = store, frozen, selector(resource, query)
        self._history = store.history[resource]
        self._first: list[Object] = []
        if not self.version:  # it begins with the present state
            self.version = store.version
            found = store.objects[resource].values()
            self._first = [{"type": "ADDED", "object": obj} for obj in found if self._selected(obj)]
        self._position = bisect.bisect_right(self._history, self.version, key=lambda change: change.version)

    @property
    def backlog(self) -> int:
        """Number of changes that were not taken yet."""
        return len(self._history) - self._position

    def take(self, most: int | None = None) -> list[Object]:
        """The events of the next changes, at most so many."""
        if self._expired:
            status = failure(410, f"too old resource version: {self.version} ({self._store.oldest})")
            return [{"type": "ERROR", "object": status.body}]
        end = len(self._history) if most is None else self._position + most
        changes = self._history[self._position : end]
        self._position += len(changes)
        events, self._first = self._first, []
        for change in changes:
            self.version = change.version
            event = change.event(self._selected) if change.is_write else self.bookmark()
            events += [event] if event is not None else []
        return events

    def bookmark(self) -> Object | None:
        """A bookmark at the last change that was taken. None: the client wants none."""
        if not self.has_bookmarks:
            return None
        return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}

    async def pieces(self) -> AsyncIterator[bytes]:
        """All events as soon as they happen, until the time of the watch is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds
        while True:
            if self.resource not in self._frozen and (events := self.take()):
                yield encoded(events)
            if self._expired or loop.time() >= end:
                return
            await self._store.news.wait(end)
