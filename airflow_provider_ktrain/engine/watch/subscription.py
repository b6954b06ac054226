"""What a subscriber of a shared informer gets: objects and their changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

from airflow_provider_ktrain.engine.wakeup import Wakeup
from airflow_provider_ktrain.engine.watch.object_keys import Key

Object = dict[str, Any]


@dataclass(frozen=True)
class WatchEvent:
    """A change of one object. Changes that are read together are merged into one event.

    :param type: ADDED, MODIFIED or DELETED.
    :param object: the object after the change; with DELETED, its last known state.
    """

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


class Informer(Protocol):
    """What delivers objects to subscriptions."""

    def add(self, subscription: Subscription, key: Key | None) -> None:
        """Begin a subscription: deliver what is known, and then all changes."""

    def discard(self, subscription: Subscription, key: Key | None) -> None:
        """End a subscription."""


class Subscription:
    """The objects and events of an informer for one subscriber; a context manager that ends the subscription.

    `objects` has the objects by uid, as last seen. If an object is missing from it, that doesn't prove that it
    doesn't exist: it may be newer than the last event. An event DELETED is such a proof.

    Get it from `SharedInformer.subscribe`, which describes the parameters in full.

    :param informer: which calls `deliver`, `sync` and `fail`.
    :param key: of the objects. Default: all objects.
    :param news: set when `take` has something to return. Default: none.
    """

    __slots__ = ("_changed", "_error", "_informer", "_key", "_new", "_news", "_pending", "objects", "synced")

    def __init__(self, informer: Informer, key: Key | None = None, news: Wakeup | None = None) -> None:
        self.objects: dict[str, Object] = {}
        self.synced = False  #: whether the first list is complete
        self._informer, self._key = informer, key
        self._pending: dict[str, WatchEvent] = {}
        self._changed: dict[str, None] = {}  # an empty dict is smaller than an empty set
        self._error: Exception | None = None
        self._news = news or Wakeup()
        self._new = False  # whether `take` has something to return

    async def __aenter__(self) -> Self:
        self._informer.add(self, self._key)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._informer.discard(self, self._key)

    def take(self) -> list[WatchEvent] | None:
        """The changes since the last call, one event per object; [] after an empty first list. None: nothing is new.

        :raises ApiStatusError: the API server rejects the list or watch. The informer continues to try, so the caller
            may call this again.
        :raises ApiUnavailable: the informer was closed.
        """
        if not self._new:
            return None
        self._new = False
        error, self._error = self._error, None
        if error is not None:
            raise error
        seen = list(self._pending.values())
        self._pending.clear()
        return seen

    @property
    def deleted(self) -> list[Object]:
        """Objects whose DELETED event the next `take` returns. `objects` no longer has them."""
        return [seen.object for seen in self._pending.values() if seen.type == "DELETED"]

    def take_changed(self) -> Collection[str]:
        """The uids of objects that were added, changed or removed since the last call, independent of `take`."""
        taken, self._changed = self._changed, {}
        return taken

    def _notify(self) -> None:
        self._new = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let the next `take` raise an error."""
        self._error = error
        self._notify()

    def sync(self) -> None:
        """Note that the first list is complete."""
        if not self.synced:
            self.synced = True
            self._notify()

    def deliver(self, obj: Object, *, deleted: bool = False) -> None:
        """Deliver an object that was added or changed, or one that was deleted or lost the key."""
        uid = obj["metadata"]["uid"]
        held = uid in self.objects
        if not deleted:
            self.objects[uid] = obj
            undelivered = uid in self._pending and self._pending[uid].type == "ADDED"
            self._pending[uid] = WatchEvent("MODIFIED" if held and not undelivered else "ADDED", obj)
        elif held:
            del self.objects[uid]
            self._pending[uid] = WatchEvent("DELETED", obj)
        else:
            return
        self._changed[uid] = None
        if self.synced:  # the first list is delivered as a whole
            self._notify()
