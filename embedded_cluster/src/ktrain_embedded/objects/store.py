"""The cluster's state: objects with resource versions, a bounded history of changes, and the rules of deletion.

All code runs on one event loop and all calls are synchronous. A read and a subsequent write are atomic if there is no
await between them. Returned objects are shared: copy an object before you change it.
"""

from __future__ import annotations

import copy
import datetime
import json
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from ktrain_embedded.objects import defaults, priorities
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.names import random_suffix
from ktrain_embedded.objects.resources import Obj as Obj
from ktrain_embedded.objects.resources import Resource

Key = tuple[str, str]  # namespace ("" for cluster-scoped objects) and name
Objects = list[Obj]  # inside Store, `list` is a method
T = TypeVar("T")
ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]
HISTORY = 20_000  # number of changes that are kept for resumed watches
FIRST = 1000  # version of an empty store. Earlier versions count as compacted, as on a real cluster.
#: Built-in types with metadata.generation. Custom resources always have it.
GENERATIONS = (r.POD, r.BATCH_JOB, r.CRD, r.DISRUPTION_BUDGET)


def now(later: int = 0) -> str:
    """Return the time `later` seconds from now in the format of creationTimestamp: RFC 3339 with whole seconds."""
    time = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def at(obj: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or `default` if any part of the path is missing or null."""
    for part in path.split("."):
        obj = obj.get(part) if isinstance(obj, dict) else None
    return default if obj is None else obj


@dataclass(frozen=True, eq=False)
class Change:
    """A change of an object. Watches use `previous` to detect that an object starts or stops matching a selector."""

    version: int
    type: ChangeType
    resource: Resource
    object: Obj
    previous: Obj | None = None

    @cached_property
    def encoded(self) -> bytes:
        """The object as JSON. It is encoded only once for all watches."""
        return json.dumps(self.object, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def key(self) -> Key:
        """The object's namespace ("" for cluster-scoped objects) and name."""
        meta = self.object["metadata"]
        return meta.get("namespace") or "", meta["name"]


class Store:
    """All objects of the cluster, by resource, namespace and name."""

    def __init__(self) -> None:
        self._latest: defaultdict[Resource, dict[Key, Change]] = defaultdict(dict)  # each object's latest change
        self.version = FIRST  #: The latest resource version.
        self._history: deque[Change] = deque(maxlen=HISTORY)
        self._oldest = FIRST  # watches from an older version fail with 410
        self._watchers: defaultdict[Resource, set[Callable[[Change], None]]] = defaultdict(set)
        self._undelivered: deque[Change] = deque()
        self._delivering = False

    # reading

    @property
    def oldest(self) -> int:
        """The oldest version from which a watch or a list can continue. Earlier versions have expired."""
        dropped = self._history[0].version - 1 if len(self._history) == HISTORY else 0
        return max(self._oldest, dropped)

    def expire(self) -> None:
        """Clear the history. Watches and lists from older versions get 410 Expired, as after a compaction of etcd."""
        self._history.clear()
        self._oldest = self.version

    def get(self, resource: Resource, namespace: str | None, name: str) -> Obj:
        """Return the object. Raise ApiError 404 if it doesn't exist."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise ApiError(404, f'{resource.group_resource} "{name}" not found', details=details(resource, name))
        return found

    def find(self, resource: Resource, namespace: str | None, name: str) -> Obj | None:
        """Return the object, None if it doesn't exist."""
        found = self._latest[resource].get((namespace or "", name))
        return found.object if found else None

    def list(self, resource: Resource, namespace: str | None = None, labels: dict[str, str] | None = None) -> Objects:
        """Return the objects with all of `labels`, in order of namespace and name."""
        required = (labels or {}).items()
        found = (change.object for change in self.latest(resource, namespace))
        return [o for o in found if not required or required <= at(o, "metadata.labels", {}).items()]

    def latest(self, resource: Resource, namespace: str | None = None) -> Sequence[Change]:
        """Return the latest change of each object, in order of namespace and name."""
        return _of(self._latest[resource], namespace)

    def list_at(self, resource: Resource, namespace: str | None, version: int) -> Objects:
        """Return the objects at an earlier version. The version must not be older than `oldest`."""
        then: dict[Key, Obj | None] = {key: change.object for key, change in self._latest[resource].items()}
        for change in reversed(self._history):
            if change.version <= version:
                break
            if change.resource == resource:
                then[change.key] = change.previous
        return [obj for obj in _of(then, namespace) if obj is not None]

    def owned(self, resource: Resource, owner: Obj) -> Objects:
        """Return the objects in the owner's namespace that have the owner's uid in their ownerReferences."""
        uid = owner["metadata"]["uid"]
        return [
            o for o in self.list(resource, owner["metadata"].get("namespace"))
            if any(ref["uid"] == uid for ref in at(o, "metadata.ownerReferences", ()))
        ]  # fmt: skip

    # writing

    def create(self, resource: Resource, obj: Obj, *, dry_run: bool = False) -> Obj:
        """Add an object. Set its name from generateName, its uid, creationTimestamp, generation and defaults.

        :param dry_run: return the object without storing it.
        :raises ApiError: 409 if an object with this name exists.
        """
        obj = copy.deepcopy(obj)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + random_suffix()
        name, namespace = meta["name"], meta.get("namespace") or ""
        if taken := self.find(resource, namespace, name):
            going = "object is being deleted: " if "deletionTimestamp" in taken["metadata"] else ""
            why = f'{going}{resource.group_resource} "{name}" already exists'
            raise ApiError(409, why, "AlreadyExists", details(resource, name))
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"):
            meta.pop(key, None)
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=now())
        if resource.custom or resource in GENERATIONS:
            meta["generation"] = 1
        if resource == r.POD:
            priorities.admit(obj, self.list(r.PRIORITY_CLASS))
        obj = defaults.apply(resource, _typed(resource, obj))
        return obj if dry_run else self._commit("ADDED", resource, obj, None)

    def update(self, resource: Resource, obj: Obj, *, status: bool = False, dry_run: bool = False) -> Obj:
        """Replace an object, or only its status.

        A write that changes nothing keeps the resource version. If an object is being deleted and the write removes its
        last finalizer, the object is removed.

        :param status: replace only the status.
        :param dry_run: return the object without storing it.
        :raises ApiError: 404 if the object doesn't exist, 409 if its resourceVersion or uid has changed.
        """
        meta = obj["metadata"]
        old = self.get(resource, meta.get("namespace"), meta["name"])
        if any(meta.get(k) and meta[k] != old["metadata"][k] for k in ("resourceVersion", "uid")):
            raise conflict(resource, meta["name"])
        if status:
            new = {**old, "status": copy.deepcopy(obj.get("status", {}))}
        else:
            new = _typed(resource, copy.deepcopy(obj))
            if "status" in resource.subresources:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = old["status"]
            kept = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
            new["metadata"].update({k: old["metadata"][k] for k in kept if k in old["metadata"]})
            if "generation" in new["metadata"] and _wanted(new) != _wanted(old):
                new["metadata"]["generation"] += 1
        new["metadata"] = {**new["metadata"], "resourceVersion": old["metadata"]["resourceVersion"]}
        if new == old or dry_run:
            return new
        ready = resource != r.POD or new["metadata"].get("deletionGracePeriodSeconds") == 0
        if "deletionTimestamp" in new["metadata"] and ready and not _finalizers(resource, new):
            return self._remove(resource, new)
        return self._commit("MODIFIED", resource, new, old)

    def update_status(self, resource: Resource, obj: Obj, new_status: Obj) -> Obj:
        """Set the status of an object. Raise ApiError 409 if the object has changed since it was read."""
        return self.update(resource, {**obj, "status": new_status}, status=True)

    def delete(
        self, resource: Resource, namespace: str | None, name: str, *,
        grace: int | None = None, propagation: str = "Background", uid: str | None = None, version: str | None = None,
    ) -> Obj:  # fmt: skip
        """Delete an object. If it has finalizers or a grace period, only set its deletionTimestamp.

        Only pods that are bound to a node and have not ended have a grace period.

        :param grace: grace period in seconds, None for the pod's own period. Ignored for other resources.
        :param propagation: Background, Foreground or Orphan. The garbage collector handles the dependents.
        :param uid: precondition, None for any uid.
        :param version: precondition, None for any resource version.
        :return: the object in its last state. Use `find` to check whether it still exists.
        :raises ApiError: 404 if the object doesn't exist, 409 if a precondition fails.
        """
        old = self.get(resource, namespace, name)
        meta = old["metadata"]
        for what, given, found, why in (
            ("UID", uid, meta["uid"], "deleted and then recreated"),
            ("ResourceVersion", version, meta["resourceVersion"], "modified"),
        ):
            if given not in (None, found):
                raise ApiError(
                    409,
                    f'Operation cannot be fulfilled on {resource.group_kind} "{name}": the {what} in the precondition '
                    f"({given}) does not match the {what} in record ({found}). The object might have been {why}",
                    details={**details(resource, name), "kind": resource.kind},
                )
        finalizers = [f for f in meta.get("finalizers") or () if f not in ("foregroundDeletion", "orphan")]
        marker = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(propagation)
        if marker:
            finalizers.append(marker)
        period = self._grace(resource, old, grace)
        already = meta.get("deletionGracePeriodSeconds")
        held = bool(finalizers) or (resource == r.NAMESPACE and bool(_finalizers(resource, old)))
        if not held and not period and (resource != r.POD or already == 0):
            return self._remove(resource, old)
        if already is not None and period >= already and finalizers == (meta.get("finalizers") or []):
            return old
        period = min(period, already) if already is not None else period
        new_meta = {**meta, "deletionTimestamp": now(period), "deletionGracePeriodSeconds": period}
        if "generation" in new_meta and already is None:
            new_meta["generation"] += 1
        if finalizers:
            new_meta["finalizers"] = finalizers
        marked = self._commit("MODIFIED", resource, {**old, "metadata": new_meta}, old)
        current = self.find(resource, namespace, name)  # a watcher, called during the commit, may have removed it
        if held or period or current is None or current["metadata"]["uid"] != meta["uid"]:
            return marked
        return self._remove(resource, current)

    @staticmethod
    def _grace(resource: Resource, obj: Obj, grace: int | None) -> int:
        """Return the grace period in seconds: 0 for objects without a kubelet and for pods that have ended."""
        ended = at(obj, "status.phase") in ("Succeeded", "Failed")
        if resource != r.POD or ended or not at(obj, "spec.nodeName"):
            return 0
        return max(int(at(obj, "spec.terminationGracePeriodSeconds", 30) if grace is None else grace), 0)

    def _remove(self, resource: Resource, obj: Obj) -> Obj:
        return self._commit("DELETED", resource, obj, obj)

    def _commit(self, kind: ChangeType, resource: Resource, obj: Obj, previous: Obj | None) -> Obj:
        self.version += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self.version)}}
        change = Change(self.version, kind, resource, obj, previous)
        if kind == "DELETED":
            del self._latest[resource][change.key]
        else:
            self._latest[resource][change.key] = change
        self._history.append(change)
        self._undelivered.append(change)
        if not self._delivering:
            self._deliver()
        return obj

    def _deliver(self) -> None:
        """Notify the watchers of all changes in order.

        If a watcher writes to the store, its change is added to the queue, so that all watchers receive the changes in
        the same order.
        """
        self._delivering = True
        try:
            while self._undelivered:
                change = self._undelivered.popleft()
                for tell in list(self._watchers[change.resource]):
                    tell(change)
        finally:
            self._delivering = False

    # watching

    def changes_since(self, resource: Resource, version: int) -> Sequence[Change]:
        """Return the changes after `version`. Raise ApiError 410 if the history no longer contains them all."""
        if version < self.oldest:
            raise ApiError(410, f"too old resource version: {version} ({self.oldest})")
        return [c for c in self._history if c.version > version and c.resource == resource]

    def subscribe(self, resource: Resource, tell: Callable[[Change], None]) -> Callable[[], None]:
        """Call `tell` with each subsequent change, synchronously. Return a function that ends the subscription."""
        self._watchers[resource].add(tell)
        return lambda: self._watchers[resource].discard(tell)


def _of(found: dict[Key, T], namespace: str | None) -> list[T]:
    """Return the values in a namespace, or in all namespaces, in order of namespace and name."""
    return [found[key] for key in sorted(found) if namespace is None or key[0] == namespace]


def _finalizers(resource: Resource, obj: Obj) -> list[str]:
    """Return the object's finalizers. For a namespace, include `spec.finalizers`, which its controller removes."""
    own = at(obj, "spec.finalizers", ()) if resource == r.NAMESPACE else ()
    return [*at(obj, "metadata.finalizers", ()), *own]


def _wanted(obj: Obj) -> Obj:
    """Return the fields whose change increments the generation: the spec without the node of a pod."""
    return {k: v for k, v in at(obj, "spec", {}).items() if k != "nodeName"}


def details(resource: Resource, name: str) -> Obj:
    """Return the `details` of a Status for an object."""
    return {"name": name, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}


def conflict(resource: Resource, name: str) -> ApiError:
    """Return the API server's error 409 for a write with an old resourceVersion."""
    return ApiError(
        409,
        f'Operation cannot be fulfilled on {resource.group_resource} "{name}": the object has been modified; please '
        "apply your changes to the latest version and try again",
        details=details(resource, name),
    )


def _typed(resource: Resource, obj: Obj) -> Obj:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**head, **{k: v for k, v in obj.items() if k not in head}}
