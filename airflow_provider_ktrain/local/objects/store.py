"""The cluster's state: objects with resource versions, a bounded history of changes, and the rules of deletion.

Everything runs on one event loop and every call is synchronous, so a read and the write that follows it
are atomic as long as nothing is awaited between them. Objects that come out are shared: copy before changing one.
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

from airflow_provider_ktrain.local.objects import defaults
from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.errors import ApiError
from airflow_provider_ktrain.local.objects.names import random_suffix
from airflow_provider_ktrain.local.objects.resources import Resource

Obj = dict[str, Any]
Key = tuple[str, str]  # namespace ("" for what has none) and name
Objects = list[Obj]  # inside Store, `list` is a method
T = TypeVar("T")
ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]
HISTORY = 20_000  # changes kept for watches that resume
FIRST = 1000  # the version of an empty store: what came before has been compacted, as on any real cluster
GENERATIONS = (r.POD, r.BATCH_JOB, r.CRD)  # built-in types that count generations, as custom resources do


def now(later: int = 0) -> str:
    """The time, or some seconds later, in the form of metadata.creationTimestamp: RFC 3339, whole seconds."""
    time = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=later)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def at(obj: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path, `default` where it, or anything on the way, is missing or null."""
    for part in path.split("."):
        obj = obj.get(part) if isinstance(obj, dict) else None
    return default if obj is None else obj


@dataclass(frozen=True, eq=False)
class Change:
    """One change of one object. `previous` lets a watch with a selector see objects enter and leave it."""

    version: int
    type: ChangeType
    resource: Resource
    object: Obj
    previous: Obj | None = None

    @cached_property
    def encoded(self) -> bytes:
        """The object as JSON, encoded once however many watches send it."""
        return json.dumps(self.object, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def key(self) -> Key:
        """Namespace, empty for cluster-scoped objects, and name."""
        meta = self.object["metadata"]
        return meta.get("namespace") or "", meta["name"]


class Store:
    """All objects of the cluster, by resource, namespace and name."""

    def __init__(self) -> None:
        self._latest: defaultdict[Resource, dict[Key, Change]] = defaultdict(dict)  # what made each object what it is
        self._version = FIRST
        self._history: deque[Change] = deque(maxlen=HISTORY)
        self._oldest = FIRST  # watches from before this version get 410
        self._watchers: defaultdict[Resource, set[Callable[[Change], None]]] = defaultdict(set)
        self._untold: deque[Change] = deque()
        self._telling = False

    # reading

    @property
    def version(self) -> int:
        """The newest resource version of the whole store."""
        return self._version

    @property
    def oldest(self) -> int:
        """A watch or continued list from a version before this one has expired."""
        dropped = self._history[0].version - 1 if len(self._history) == HISTORY else 0
        return max(self._oldest, dropped)

    def expire(self) -> None:
        """Forget the history: what resumes from an older version gets 410 Expired, as after etcd's compaction."""
        self._history.clear()
        self._oldest = self._version

    def get(self, resource: Resource, namespace: str | None, name: str) -> Obj:
        """The object; ApiError 404 where there is none."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource, name)
        return found

    def find(self, resource: Resource, namespace: str | None, name: str) -> Obj | None:
        """The object, or None."""
        found = self._latest[resource].get((namespace or "", name))
        return found.object if found else None

    def list(self, resource: Resource, namespace: str | None = None, labels: dict[str, str] | None = None) -> Objects:
        """Objects in order of namespace and name; `labels` must all be equal."""
        wanted = (labels or {}).items()
        found = (change.object for change in self.latest(resource, namespace))
        return [o for o in found if not wanted or wanted <= at(o, "metadata.labels", {}).items()]

    def latest(self, resource: Resource, namespace: str | None = None) -> Sequence[Change]:
        """The change that made each object what it is now, in order of namespace and name."""
        return _of(self._latest[resource], namespace)

    def list_at(self, resource: Resource, namespace: str | None, version: int) -> Objects:
        """The list as it was at a version that history still reaches."""
        then: dict[Key, Obj | None] = {key: change.object for key, change in self._latest[resource].items()}
        for change in reversed(self._history):
            if change.version <= version:
                break
            if change.resource == resource:
                then[change.key] = change.previous
        return [obj for obj in _of(then, namespace) if obj is not None]

    def owned(self, resource: Resource, owner: Obj) -> Objects:
        """Objects of the owner's namespace whose ownerReferences name the owner's uid."""
        uid = owner["metadata"]["uid"]
        return [
            o for o in self.list(resource, owner["metadata"].get("namespace"))
            if any(ref["uid"] == uid for ref in at(o, "metadata.ownerReferences", ()))
        ]  # fmt: skip

    # writing

    def create(self, resource: Resource, obj: Obj, *, dry_run: bool = False) -> Obj:
        """Add an object: name from generateName, uid, creationTimestamp, generation. ApiError 409: the name is taken.

        :param dry_run: make the object and leave the store as it is.
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
        obj = defaults.apply(resource, _typed(resource, obj))
        return obj if dry_run else self._commit("ADDED", resource, obj, None)

    def update(self, resource: Resource, obj: Obj, *, status: bool = False, dry_run: bool = False) -> Obj:
        """Replace an object, or with `status` only its status. ApiError 404; 409 where obj's resourceVersion is stale.

        A write that changes nothing keeps the resource version. Removing the last finalizer of an object that is being
        deleted removes the object.
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
        """Set the status of an object that was read: 409 where it changed since."""
        return self.update(resource, {**obj, "status": new_status}, status=True)

    def delete(
        self, resource: Resource, namespace: str | None, name: str, *,
        grace: int | None = None, propagation: str = "Background", uid: str | None = None, version: str | None = None,
    ) -> Obj:  # fmt: skip
        """Delete, or begin to: pods that a kubelet runs keep a grace period, finalizers hold an object back.

        :param grace: seconds; None is the pod's own period. Other resources ignore it.
        :param propagation: Background, Foreground or Orphan; the garbage collector does the rest.
        :param uid, version: preconditions; ApiError 409 where they do not hold.
        :return: the object as last seen; it still exists where it has a deletionTimestamp.
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
        current = self.find(resource, namespace, name)  # a watcher, told within the commit, may have removed it already
        if held or period or current is None or current["metadata"]["uid"] != meta["uid"]:
            return marked
        return self._remove(resource, current)

    @staticmethod
    def _grace(resource: Resource, obj: Obj, grace: int | None) -> int:
        """Seconds that a deletion has to wait for the kubelet: none for what no kubelet runs, or what has ended."""
        ended = at(obj, "status.phase") in ("Succeeded", "Failed")
        if resource != r.POD or ended or not at(obj, "spec.nodeName"):
            return 0
        return max(int(at(obj, "spec.terminationGracePeriodSeconds", 30) if grace is None else grace), 0)

    def _remove(self, resource: Resource, obj: Obj) -> Obj:
        return self._commit("DELETED", resource, obj, obj)

    def _commit(self, kind: ChangeType, resource: Resource, obj: Obj, previous: Obj | None) -> Obj:
        self._version += 1
        obj = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version)}}
        change = Change(self._version, kind, resource, obj, previous)
        if kind == "DELETED":
            del self._latest[resource][change.key]
        else:
            self._latest[resource][change.key] = change
        self._history.append(change)
        self._untold.append(change)
        if not self._telling:
            self._tell()
        return obj

    def _tell(self) -> None:
        """Tell watchers of changes in their order: what one of them changes when told, all hear of after that."""
        self._telling = True
        try:
            while self._untold:
                change = self._untold.popleft()
                for tell in list(self._watchers[change.resource]):
                    tell(change)
        finally:
            self._telling = False

    # watching

    def changes_since(self, resource: Resource, version: int) -> Sequence[Change]:
        """Changes after `version` that history holds. ApiError 410 where it holds them no longer."""
        if version < self.oldest:
            raise ApiError(410, f"too old resource version: {version} ({self.oldest})")
        return [c for c in self._history if c.version > version and c.resource == resource]

    def subscribe(self, resource: Resource, tell: Callable[[Change], None]) -> Callable[[], None]:
        """Call `tell` with every change from now on, in the loop that makes it; returns what ends that."""
        self._watchers[resource].add(tell)
        return lambda: self._watchers[resource].discard(tell)


def _of(found: dict[Key, T], namespace: str | None) -> list[T]:
    """What is in a namespace, or in all of them, in order of namespace and name."""
    return [found[key] for key in sorted(found) if namespace is None or key[0] == namespace]


def _finalizers(resource: Resource, obj: Obj) -> list[str]:
    """What holds an object back; of a namespace also `spec.finalizers`, which its controller empties with it."""
    own = at(obj, "spec.finalizers", ()) if resource == r.NAMESPACE else ()
    return [*at(obj, "metadata.finalizers", ()), *own]


def _wanted(obj: Obj) -> Obj:
    """What counts as another generation: the spec, but for the node that a pod is bound to."""
    return {k: v for k, v in at(obj, "spec", {}).items() if k != "nodeName"}


def details(resource: Resource, name: str) -> Obj:
    """`details` of a Status about one object."""
    return {"name": name, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}


def not_found(resource: Resource, name: str) -> ApiError:
    """The API server's error 404 for an object."""
    return ApiError(404, f'{resource.group_resource} "{name}" not found', details=details(resource, name))


def conflict(resource: Resource, name: str) -> ApiError:
    """The API server's error 409 for a write with an old resourceVersion."""
    return ApiError(
        409,
        f'Operation cannot be fulfilled on {resource.group_resource} "{name}": the object has been modified; please '
        "apply your changes to the latest version and try again",
        details=details(resource, name),
    )


def _typed(resource: Resource, obj: Obj) -> Obj:
    head = {"apiVersion": resource.api_version, "kind": resource.kind}
    return {**head, **{k: v for k, v in obj.items() if k not in head}}
