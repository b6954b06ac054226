"""Garbage collection by ownerReferences: Background, Foreground with blockOwnerDeletion, Orphan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from airflow_provider_ktrain.local.controllers.common import is_terminating
from airflow_provider_ktrain.local.controllers.runtime import Clock, Controller
from airflow_provider_ktrain.local.objects.resources import Resource
from airflow_provider_ktrain.local.objects.store import Change, Obj, Objects, Store

Ref = tuple[Resource, str, str]  # resource, namespace, name
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


class GarbageCollector(Controller[Ref]):
    """Deletes what has lost all its owners, and finishes deletions that wait for dependents."""

    def __init__(self, store: Store, resources: Iterable[Resource], clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._alive: dict[str, Ref] = {}  # by uid
        self._owned: defaultdict[str, dict[Ref, None]] = defaultdict(dict)  # dependents, also former ones, by owner uid
        for resource in resources:
            self.watch(resource, self._affected)

    def _affected(self, change: Change) -> Iterable[Ref]:
        """Keep the graph of owners and dependents; what has to be looked at after the change."""
        meta, owners = change.object["metadata"], [owner["uid"] for owner in _owners(change.object)]
        ref: Ref = (change.resource, meta.get("namespace") or "", meta["name"])
        if change.type == "DELETED":  # dependents have lost an owner, owners that wait may go on
            self._alive.pop(meta["uid"], None)
            for uid in owners:
                self._owned.get(uid, {}).pop(ref, None)
            return [*self._owned.pop(meta["uid"], ()), *(self._alive[uid] for uid in owners if uid in self._alive)]
        self._alive[meta["uid"]] = ref
        for uid in owners:
            self._owned[uid][ref] = None
        return [ref] if owners or _waits(change.object, FOREGROUND, ORPHAN) else []

    def reconcile(self, key: Ref) -> None:
        """Do what the object's finalizers or the state of its owners ask for."""
        obj = self.store.find(*key)
        if obj is None:
            return
        if is_terminating(obj):
            if _waits(obj, FOREGROUND, ORPHAN):
                self._finish(key, obj)
            return
        alive = [(o["uid"], self._alive[o["uid"]]) for o in _owners(obj) if o["uid"] in self._alive]
        owners = {uid: owner for uid, ref in alive if (owner := self.store.find(*ref))}
        solid = [o for o in _owners(obj) if o["uid"] in owners and not _waits(owners[o["uid"]], FOREGROUND)]
        if len(solid) == len(_owners(obj)):
            return
        if solid:  # another owner keeps it: forget those that are gone
            self._own(key, obj, solid)
            return
        waited_for = owners and self._owned.get(obj["metadata"]["uid"])
        propagation = "Foreground" if waited_for else "Background"
        self.store.delete(*key, propagation=propagation, uid=obj["metadata"]["uid"])

    def _own(self, ref: Ref, obj: Obj, owners: Objects) -> None:
        meta = {k: v for k, v in obj["metadata"].items() if k != "ownerReferences"}
        self.store.update(ref[0], {**obj, "metadata": {**meta, **({"ownerReferences": owners} if owners else {})}})

    def _finish(self, ref: Ref, owner: Obj) -> None:
        """Let go of dependents, or delete them, and of the owner once nothing holds it."""
        uid = owner["metadata"]["uid"]
        orphaning = _waits(owner, ORPHAN)
        blocked = False
        for dependent in tuple(self._owned.get(uid, ())):
            obj = self.store.find(*dependent)
            if obj is None:
                continue
            if orphaning:
                self._own(dependent, obj, [o for o in _owners(obj) if o["uid"] != uid])
            elif any(o.get("blockOwnerDeletion") for o in _owners(obj) if o["uid"] == uid):
                self.reconcile(dependent)
                blocked = blocked or self.store.find(*dependent) is not None
        if not blocked:
            done = ORPHAN if orphaning else FOREGROUND
            left = [f for f in owner["metadata"]["finalizers"] if f != done]
            self.store.update(ref[0], {**owner, "metadata": {**owner["metadata"], "finalizers": left}})


def _owners(obj: Obj) -> Objects:
    return obj["metadata"].get("ownerReferences") or []


def _waits(obj: Obj, *finalizers: str) -> bool:
    """Whether a deletion of the object waits, under one of these finalizers, for its dependents."""
    return is_terminating(obj) and not {*finalizers}.isdisjoint(obj["metadata"].get("finalizers") or ())
