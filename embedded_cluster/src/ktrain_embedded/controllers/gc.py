"""Garbage collection by ownerReferences: Background, Foreground with blockOwnerDeletion, Orphan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from ktrain_embedded.controllers.common import is_terminating
from ktrain_embedded.controllers.runtime import Clock, Controller
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Change, Obj, Objects, Store

Ref = tuple[Resource, str, str]  # resource, namespace, name
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
OWNER_LATER = (
    0.02  # seconds from the deletion of a dependent to the check of its owner, so that controllers can react first
)


class GarbageCollector(Controller[Ref]):
    """Deletes objects whose owners are all deleted, and finishes deletions that wait for dependents."""

    def __init__(self, store: Store, resources: Iterable[Resource], clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._alive: dict[str, Ref] = {}  # by uid
        self._owned: defaultdict[str, dict[Ref, None]] = defaultdict(dict)  # current and former dependents by owner uid
        for resource in resources:
            self.watch(resource, self._affected)

    def _affected(self, change: Change) -> Iterable[Ref]:
        """Update the graph of owners and dependents. Returns the objects to check after the change."""
        meta, owners = change.object["metadata"], [owner["uid"] for owner in _owners(change.object)]
        ref: Ref = (change.resource, meta.get("namespace") or "", meta["name"])
        if change.type == "DELETED":  # dependents have lost an owner; owners that wait may continue
            self._alive.pop(meta["uid"], None)
            for uid in owners:
                self._owned.get(uid, {}).pop(ref, None)
            for uid in owners:
                if owner := self._alive.get(uid):
                    self.enqueue(owner, OWNER_LATER if owner[0].custom else 0.0)
            return tuple(self._owned.pop(meta["uid"], ()))
        self._alive[meta["uid"]] = ref
        for uid in owners:
            self._owned[uid][ref] = None
        waits = _waits(change.object, FOREGROUND, ORPHAN) and not (
            change.previous and _waits(change.previous, FOREGROUND, ORPHAN)
        )
        return [ref] if waits or not all(uid in self._alive for uid in owners) else []

    def reconcile(self, key: Ref) -> float | None:
        """Process the object's finalizers or the state of its owners. Returns the seconds until the next check."""
        obj = self.store.find(*key)
        if obj is None:
            return None
        if is_terminating(obj):
            return self._finish(key, obj) if _waits(obj, FOREGROUND, ORPHAN) else None
        alive = [(o["uid"], self._alive[o["uid"]]) for o in _owners(obj) if o["uid"] in self._alive]
        owners = {uid: owner for uid, ref in alive if (owner := self.store.find(*ref))}
        solid = [o for o in _owners(obj) if o["uid"] in owners and not _waits(owners[o["uid"]], FOREGROUND)]
        if len(solid) == len(_owners(obj)):
            return None
        if solid:  # another owner keeps the object: remove the references to deleted owners
            self._own(key, obj, solid)
            return None
        waited_for = owners and self._owned.get(obj["metadata"]["uid"])
        propagation = "Foreground" if waited_for else "Background"
        self.store.delete(*key, propagation=propagation, uid=obj["metadata"]["uid"])
        return None

    def _own(self, ref: Ref, obj: Obj, owners: Objects) -> None:
        meta = {k: v for k, v in obj["metadata"].items() if k != "ownerReferences"}
        self.store.update(ref[0], {**obj, "metadata": {**meta, **({"ownerReferences": owners} if owners else {})}})

    def _finish(self, ref: Ref, owner: Obj) -> float | None:
        """Orphan or delete the dependents, then release the owner. Returns the seconds until the next check."""
        uid = owner["metadata"]["uid"]
        found = ((dependent, self.store.find(*dependent)) for dependent in tuple(self._owned.get(uid, ())))
        held = [(dependent, obj) for dependent, obj in found if obj and any(o["uid"] == uid for o in _owners(obj))]
        orphaning = _waits(owner, ORPHAN)
        if orphaning:
            for dependent, obj in held:
                self._own(dependent, obj, [o for o in _owners(obj) if o["uid"] != uid])
            if held:
                return OWNER_LATER
        blocking = [d for d, obj in held if any(o.get("blockOwnerDeletion") for o in _owners(obj) if o["uid"] == uid)]
        if not orphaning and blocking:
            for dependent in blocking:
                self.enqueue(dependent)
            return None
        done = ORPHAN if orphaning else FOREGROUND
        left = [f for f in owner["metadata"]["finalizers"] if f != done]
        self.store.update(ref[0], {**owner, "metadata": {**owner["metadata"], "finalizers": left}})
        return None


def _owners(obj: Obj) -> Objects:
    return obj["metadata"].get("ownerReferences") or []


def _waits(obj: Obj, *finalizers: str) -> bool:
    """Whether the object is being deleted and waits for its dependents because of one of these finalizers."""
    return is_terminating(obj) and not {*finalizers}.isdisjoint(obj["metadata"].get("finalizers") or ())
