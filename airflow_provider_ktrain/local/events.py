"""Events as client-go's recorder writes them: repetitions counted, similar ones combined, a budget for each object."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.store import Obj, Store, now

REMEMBERED = 4096  # distinct events, and objects, that a recorder keeps in mind
BUDGET, REFILL = 25.0, 1 / 300  # events about one object at once; then so many a second
SIMILAR, SIMILAR_WINDOW = 10, 600.0  # differing messages of one reason, within seconds, before they are combined

T = TypeVar("T")


@dataclass
class _Budget:
    at: float
    left: float = BUDGET


@dataclass
class _Similar:
    at: float
    messages: set[str] = field(default_factory=set)


@dataclass
class _Written:
    name: str = ""
    count: int = 0
    first: str = ""


class EventRecorder:
    """Records Events about objects in the name of one component.

    An object has a budget of 25 events and one more every 5 minutes: what exceeds it is lost, as on a real cluster.
    """

    def __init__(self, store: Store, component: str) -> None:
        self._store = store
        self._component = component
        self._written: OrderedDict[Hashable, _Written] = OrderedDict()
        self._similar: OrderedDict[Hashable, _Similar] = OrderedDict()
        self._budgets: OrderedDict[Hashable, _Budget] = OrderedDict()

    def event(self, obj: Obj, type_: str, reason: str, message: str, field_path: str = "") -> None:
        """Record an Event (`type_`: Normal or Warning) about `obj`, or count the same one up."""
        meta, at = obj["metadata"], time.monotonic()
        namespace = meta.get("namespace") or "default"
        kind: Hashable = (meta["uid"], field_path, type_, reason)
        similar = _recall(self._similar, kind, _Similar(at))
        if at - similar.at > SIMILAR_WINDOW:
            similar.messages.clear()
        similar.at = at
        similar.messages.add(message)
        if len(similar.messages) >= SIMILAR:
            similar.messages.pop()
            message = f"(combined from similar events): {message}"
            same = kind
        else:
            same = (kind, message)
        written = _recall(self._written, same, _Written())
        written.count += 1
        if not self._affordable(meta["uid"], at):
            return
        known = self._store.find(r.EVENT, namespace, written.name)
        if known is not None:
            changed = {"count": written.count, "lastTimestamp": now(), "message": message}
            self._store.update(r.EVENT, {**known, **changed})
            return
        written.first = written.first or now()
        written.name = f"{meta['name']}.{self._store.version + 1:016x}"
        involved = {
            "kind": obj["kind"], "name": meta["name"], "uid": meta["uid"], "apiVersion": obj["apiVersion"],
            "resourceVersion": meta.get("resourceVersion", ""),
            **({"namespace": meta["namespace"]} if meta.get("namespace") else {}),
            **({"fieldPath": field_path} if field_path else {}),
        }  # fmt: skip
        self._store.create(r.EVENT, {
            "metadata": {"namespace": namespace, "name": written.name},
            "involvedObject": involved, "reason": reason, "message": message, "type": type_,
            "source": {"component": self._component}, "firstTimestamp": written.first, "lastTimestamp": now(),
            "count": written.count, "eventTime": None, "reportingComponent": self._component, "reportingInstance": "",
        })  # fmt: skip

    def _affordable(self, uid: str, at: float) -> bool:
        """Take one event from the object's budget; False where it is used up."""
        budget = _recall(self._budgets, uid, _Budget(at))
        budget.left = min(BUDGET, budget.left + (at - budget.at) * REFILL)
        budget.at = at
        if budget.left < 1:
            return False
        budget.left -= 1
        return True


def _recall(memory: OrderedDict[Hashable, T], key: Hashable, new: T) -> T:
    """What `memory` holds for `key`, or `new` from now on; the least recently used is forgotten."""
    found = memory.setdefault(key, new)
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
    return found
