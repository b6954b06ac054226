"""Events, as client-go's recorder writes them: it counts repetitions and limits the events of each object."""

from __future__ import annotations

import datetime
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store, now

MAX_CACHED_OBJECTS = 4096  # maximum number of objects in a recorder's cache
BUDGET, REFILL = 25.0, 1 / 300  # events about one object in a burst; then events per second


@dataclass
class _Written:
    name: str = ""
    count: int = 0
    first: str = ""


@dataclass
class _About:
    """The cache entry of an object: its budget, and its events by field path, type, reason and message."""

    at: float
    budget: float = BUDGET
    written: dict[tuple[str, ...], _Written] = field(default_factory=dict)

    def affordable(self, at: float) -> bool:
        """Take one event from the budget. False if the budget is exhausted."""
        self.budget, self.at = min(BUDGET, self.budget + (at - self.at) * REFILL), at
        if self.budget < 1:
            return False
        self.budget -= 1
        return True


class EventRecorder:
    """Records Events about objects for one component.

    Each object has a budget of 25 events, plus one every 5 minutes. As on a real cluster, further events are dropped.
    """

    def __init__(self, store: Store, component: str, events_v1: bool = False, host: str = "") -> None:
        """
        :param component: the component that reports the events.
        :param host: the node that it runs on, of a kubelet. Default: empty, none is named.
        :param events_v1: write events like recorders of events.k8s.io: with eventTime, without count and timestamps.
        """
        self._store = store
        self._component, self._host = component, host
        self._events_v1 = events_v1
        self._about: OrderedDict[str, _About] = OrderedDict()  # by uid, least recently used first

    def event(self, obj: Obj, type_: str, reason: str, message: str, field_path: str = "") -> None:
        """Record an Event (`type_`: Normal or Warning) about `obj`, or increase the count of an identical one."""
        meta, at = obj["metadata"], time.monotonic()
        about = self._about.setdefault(meta["uid"], _About(at))
        self._about.move_to_end(meta["uid"])
        if len(self._about) > MAX_CACHED_OBJECTS:
            self._about.popitem(last=False)
        written = about.written.setdefault((field_path, type_, reason, message), _Written())
        written.count += 1
        if not about.affordable(at):
            return
        namespace = meta.get("namespace") or "default"
        known = self._store.find(r.EVENT, namespace, written.name)
        if known and self._events_v1:
            series = {"count": written.count, "lastObservedTime": precise_now()}
            self._store.update(r.EVENT, {**known, "series": series})
            return
        if known:
            self._store.update(r.EVENT, {**known, "count": written.count, "lastTimestamp": now()})
            return
        written.first = written.first or now()
        written.name = f"{meta['name']}.{self._store.version + 1:016x}"
        involved = {
            "kind": obj["kind"], "namespace": meta.get("namespace"), "name": meta["name"], "uid": meta["uid"],
            "apiVersion": obj["apiVersion"], "resourceVersion": meta.get("resourceVersion"), "fieldPath": field_path,
        }  # fmt: skip
        head: Obj = {
            "metadata": {"namespace": namespace, "name": written.name},
            "involvedObject": {key: value for key, value in involved.items() if value},
            "reason": reason, "message": message, "type": type_, "reportingComponent": self._component,
        }  # fmt: skip
        if self._events_v1:
            head |= {
                "source": {}, "firstTimestamp": None, "lastTimestamp": None, "eventTime": precise_now(),
                "action": "Reconciling", "reportingInstance": f"{self._component}-controller",
            }  # fmt: skip
        else:
            head |= {
                "count": written.count, "source": {"component": self._component}, "eventTime": None,
                "firstTimestamp": written.first, "lastTimestamp": now(), "reportingInstance": self._host,
            }  # fmt: skip
        if self._host:
            head["source"]["host"] = self._host
        self._store.create(r.EVENT, head)


def precise_now() -> str:
    """The current time as metav1.MicroTime."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
