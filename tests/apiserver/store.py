"""The objects of a cluster, all their changes, and the garbage collection of what a deleted object owned."""

from __future__ import annotations

import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from tests.apiserver.messages import Object
from tests.apiserver.news import News
from tests.apiserver.resources import BY_PLURAL
from tests.apiserver.selectors import Selector
from tests.apiserver.stamps import stamp

NAMESPACE = "ns"


def copied(obj: Object) -> Object:
    """A copy of an object, as its way through JSON makes one."""
    result: Object = json.loads(json.dumps(obj))
    return result


@dataclass(frozen=True)
class Change:
    """A write of one object. `before` is None for a create, `after` for a deletion; a bookmark has neither."""

    version: int
    before: Object | None = None
    after: Object | None = None

    @property
    def is_write(self) -> bool:
        return self.before is not None or self.after is not None

    def event(self, selected: Selector) -> Object | None:
        """The event of a watch with this selector. None: it gets none."""
        was = self.before is not None and selected(self.before)
        if self.after is not None and selected(self.after):
            return {"type": "MODIFIED" if was else "ADDED", "object": self.after}
        if not was or self.before is None:
            return None
        # deleted, or no longer selected: both events have the object's last state and the version of this write
        meta = {**self.before["metadata"], "resourceVersion": str(self.version)}
        return {"type": "DELETED", "object": {**self.before, "metadata": meta}}


class Store:
    """One namespace, and what belongs to none.

    :ivar objects: by resource and name. After a change of one in place, `put` it.
    :ivar oldest: a watch can't begin before this version, nor can a list continue.
    :ivar history: all changes, by resource.
    :ivar news: of any change.
    """

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self.namespace = namespace
        self.objects: dict[str, dict[str, Object]] = defaultdict(dict)
        self.history: dict[str, list[Change]] = defaultdict(list)
        self.version = 100
        self.oldest = 0
        self.news = News()
        self._uids = itertools.count(1)
        self._snapshots: dict[str, Object] = {}  # the last state of each object, by uid

    @property
    def pods(self) -> dict[str, Object]:
        """The pods by name."""
        return self.objects["pods"]

    def new_uid(self) -> str:
        """A uid that no object has."""
        return f"uid-{next(self._uids)}"

    def snapshot(self, obj: Object) -> Object:
        """The state of an object when it was stored last."""
        return self._snapshots.get(obj["metadata"]["uid"], obj)

    def put(self, resource: str, obj: Object) -> Object:
        """Create or replace an object. It is completed by what an API server sets."""
        meta, known = obj["metadata"], BY_PLURAL.get(resource)
        old = self.objects[resource].get(meta["name"])
        before = None if old is None else self._snapshots.get(old["metadata"]["uid"])
        if known is not None:
            obj.setdefault("apiVersion", known.api_version)
            obj.setdefault("kind", known.kind)
        if known is None or known.namespaced:
            meta["namespace"] = self.namespace
        if "uid" not in meta:
            meta["uid"] = old["metadata"]["uid"] if old else self.new_uid()
        meta.setdefault("managedFields", [{"manager": "test"}])
        if "creationTimestamp" not in meta:
            meta["creationTimestamp"] = old["metadata"]["creationTimestamp"] if old else stamp()
        if before is not None and before["metadata"]["uid"] != meta["uid"]:  # another object with its name
            self._note(resource, before, None)
            before = None
        self.objects[resource][meta["name"]] = obj
        self._note(resource, before, obj)
        return obj

    def change(self, resource: str, name: str, change: Callable[[Object], object]) -> Object:
        """Change a copy of an object, and store it."""
        obj = copy.deepcopy(self.objects[resource][name])
        change(obj)
        return self.put(resource, obj)

    def remove(self, resource: str, name: str) -> Object:
        """Delete an object and everything that it owns; returns its last state, with the version of the deletion."""
        obj = copied(self.objects[resource].pop(name))
        uid = obj["metadata"]["uid"]
        self._note(resource, self._snapshots.get(uid, obj), None)
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.collect(uid)
        return obj

    def forget(self, resource: str, name: str) -> Object:
        """Delete an object without an event."""
        obj = self.objects[resource].pop(name)
        self._snapshots.pop(obj["metadata"]["uid"], None)
        return obj

    def collect(self, uid: str) -> None:
        """Delete what the object with this uid owned."""
        for resource, objects in list(self.objects.items()):
            for owned in list(objects.values()):
                owners = owned["metadata"].get("ownerReferences") or ()
                if any(owner["uid"] == uid for owner in owners) and owned["metadata"]["name"] in objects:
                    self.remove(resource, owned["metadata"]["name"])

    def release(self, uid: str) -> None:
        """Take the object with this uid from the owners of others, as propagation Orphan does."""
        for resource, objects in list(self.objects.items()):
            for owned in list(objects.values()):
                owners = owned["metadata"].get("ownerReferences") or []
                kept = [owner for owner in owners if owner["uid"] != uid]
                if len(kept) < len(owners):
                    owned["metadata"]["ownerReferences"] = kept
                    self.put(resource, owned)

    def bookmark(self) -> str:
        """Send a bookmark to all watches; returns its version."""
        self.version += 1
        for changes in self.history.values():
            changes.append(Change(self.version))
        self.news.tell()
        return str(self.version)

    def expire(self) -> None:
        """Forget all changes so far: watches and lists that begin with an older version get 410."""
        self.version += 1
        self.oldest = self.version

    def _note(self, resource: str, before: Object | None, obj: Object | None) -> None:
        """Give a write its version, and record it."""
        self.version += 1
        after = None
        if before is not None:
            self._snapshots.pop(before["metadata"]["uid"], None)
        if obj is not None:
            obj["metadata"]["resourceVersion"] = str(self.version)
            after = self._snapshots[obj["metadata"]["uid"]] = copied(obj)
        self.history[resource].append(Change(self.version, before, after))
        self.news.tell()
