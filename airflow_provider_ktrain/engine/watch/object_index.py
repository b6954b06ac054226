"""The objects that an informer knows, by uid and by key, as in client-go's Indexer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from airflow_provider_ktrain.engine.api.client import Object
from airflow_provider_ktrain.engine.watch.object_keys import Key, keys_of, uid_of
from airflow_provider_ktrain.engine.watch.stripping import share_parts


class ObjectIndex:
    """Objects as last seen. Equal parts of them are kept once."""

    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}
        self._last: Object = {}  # the object that was added or changed last
        self._keys: dict[str, tuple[Key, ...]] = {}
        self._uids: dict[Key, set[str]] = {}

    def outside(self, uids: Collection[str]) -> list[Object]:
        """The objects that have none of these uids."""
        return [self._objects[uid] for uid in self._objects.keys() - uids]

    def having(self, keys: Iterable[Key | None]) -> list[Object]:
        """The objects that have one of these keys; all for the key None."""
        uids = dict.fromkeys(uid for key in keys for uid in self._uids_of(key))
        return [self._objects[uid] for uid in uids]

    def _uids_of(self, key: Key | None) -> Collection[str]:
        if key is None:
            return self._objects
        uid = uid_of(key)
        if uid is None:
            return self._uids.get(key, ())
        return (uid,) if uid in self._objects else ()

    def is_current(self, obj: Object) -> bool:
        """Whether the object is known in this version."""
        known = self._objects.get(obj["metadata"]["uid"])
        return known is not None and known["metadata"]["resourceVersion"] == obj["metadata"]["resourceVersion"]

    def put(self, obj: Object) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """Add or replace an object. Returns the keys that it had, and those that it has."""
        uid = obj["metadata"]["uid"]
        share_parts(obj, self._objects.get(uid) or self._last)
        self._last = obj
        before, keys = self._keys.get(uid, ()), keys_of(obj)
        self._objects[uid] = obj
        if keys != before:
            self._index(uid, before, keys)
        return before, keys

    def remove(self, uid: str) -> tuple[Key, ...] | None:
        """Remove an object. Returns the keys that it had. None: it isn't known."""
        if self._objects.pop(uid, None) is None:
            return None
        before = self._keys.get(uid, ())
        self._index(uid, before, ())
        return before

    def clear(self) -> None:
        """Remove all objects."""
        self._last = {}
        for held in (self._objects, self._keys, self._uids):
            held.clear()

    def _index(self, uid: str, before: tuple[Key, ...], keys: tuple[Key, ...]) -> None:
        for key in set(before).difference(keys):
            self._uids[key].discard(uid)
            if not self._uids[key]:
                del self._uids[key]
        for key in set(keys).difference(before):
            self._uids.setdefault(key, set()).add(uid)
        if keys:
            self._keys[uid] = keys
        else:
            self._keys.pop(uid, None)
