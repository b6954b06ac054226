"""Garbage collection by ownerReferences: Background, Foreground with blockOwnerDeletion, Orphan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from airflow_provider_ktrain.local.controllers.runtime import Clock, Controller
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Change, Obj, Store

Ref = tuple[Resource, str, str]  # resource, namespace, name
FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


class GarbageCollector:
    """Deletes what has lost all its owners, and finishes deletions that wait for dependents."""

    def __init__(self, store: Store, resources: Iterable[Resource], clock: Clock = time.time) -> None:
        self._store = store
        self._resources = tuple(resources)
        self._clock = clock
        self._alive: dict[str, Ref] = {}  # by uid
        self._owned: defaultdict[str, dict[Ref, None]] = defaultdict(dict)  # dependents by owner uid

    def controller(self) -> Controller[Ref]:
        controller = Controller(self._store, self.collect, self._clock)
        for resource in self._resources:
            controller.watch(resource, self.affected)
        return controller

    def affected(self, change: Change) -> Iterable[Ref]:
        """Keep the graph of owners and dependents; what has to be looked at after the change."""
        meta = change.object["metadata"]
        ref: Ref = (change.resource, meta.get("namespace") or "", meta["name"])
        gone = change.type == "DELETED"
        if gone:
            self._alive.pop(meta["uid"], None)
        else:
            self._alive[meta["uid"]] = ref
        before = _owner_uids(change.previous)
        now = set() if gone else _owner_uids(change.object)
        for uid in before - now:
            self._owned[uid].pop(ref, None)
            if not self._owned[uid]:
                del self._owned[uid]
        for uid in now:
            self._owned[uid][ref] = None
        if gone:  # dependents have lost an owner, owners that wait may go on
            waiting = [self._alive[uid] for uid in before if uid in self._alive]
            return [*self._owned.get(meta["uid"], ()), *waiting]
        return [ref] if now or _is_marked(change.object) else []

    def collect(self, ref: Ref) -> None:
        """Do what the object's finalizers or the state of its owners ask for."""
        obj = self._store.find(*ref)
        if obj is None:
            return
        if "deletionTimestamp" in obj["metadata"]:
            if _is_marked(obj):
                self._finish(ref, obj)
            return
        references = obj["metadata"].get("ownerReferences") or []
        owners = {r["uid"]: self._owner(r["uid"]) for r in references}
        solid = [r for r in references if (o := owners[r["uid"]]) and not _is_marked(o, FOREGROUND)]
        if not references or len(solid) == len(references):
            return
        if solid:  # another owner keeps it: forget those that are gone
            self._store.update(ref[0], {**obj, "metadata": {**obj["metadata"], "ownerReferences": solid}})
            return
        waited_for = any(owners.values()) and self._owned.get(obj["metadata"]["uid"])
        propagation = "Foreground" if waited_for else "Background"
        self._store.delete(*ref, propagation=propagation, uid=obj["metadata"]["uid"])

    def _owner(self, uid: str) -> Obj | None:
        ref = self._alive.get(uid)
        return self._store.find(*ref) if ref else None

    def _finish(self, ref: Ref, owner: Obj) -> None:
        """Let go of dependents, or delete them, and of the owner once nothing holds it."""
        uid = owner["metadata"]["uid"]
        dependents = [(d, o) for d in tuple(self._owned.get(uid, ())) if (o := self._store.find(*d))]
        orphaning = ORPHAN in owner["metadata"]["finalizers"]
        blocked = False
        for dependent, obj in dependents:
            mine = next(r for r in obj["metadata"]["ownerReferences"] if r["uid"] == uid)
            if orphaning:
                others = [r for r in obj["metadata"]["ownerReferences"] if r["uid"] != uid]
                meta = {k: v for k, v in obj["metadata"].items() if k != "ownerReferences"}
                if others:
                    meta["ownerReferences"] = others
                self._store.update(dependent[0], {**obj, "metadata": meta})
            elif mine.get("blockOwnerDeletion"):
                self.collect(dependent)
                blocked = blocked or self._store.find(*dependent) is not None
        if blocked:
            return
        finished = ORPHAN if orphaning else FOREGROUND
        left = [f for f in owner["metadata"]["finalizers"] if f != finished]
        self._store.update(ref[0], {**owner, "metadata": {**owner["metadata"], "finalizers": left}})


def _owner_uids(obj: Obj | None) -> set[str]:
    return {r["uid"] for r in (obj or {}).get("metadata", {}).get("ownerReferences") or ()}


def _is_marked(obj: Obj, *markers: str) -> bool:
    """Whether a deletion of the object waits for its dependents."""
    meta = obj["metadata"]
    finalizers = set(meta.get("finalizers") or ())
    return "deletionTimestamp" in meta and bool(finalizers & set(markers or (FOREGROUND, ORPHAN)))
