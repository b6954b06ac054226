"""The controllers of failed nodes: taints, deletion of pods by NoExecute taints, and the pod garbage collector."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers.runtime import Clock, Controller, Key, itself
from ktrain_embedded.events import EventRecorder
from ktrain_embedded.objects import disruptions
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.store import Change, Obj, Objects, Store, at, now
from ktrain_embedded.scheduler import toleration_of

PREFIX = "node.kubernetes.io/"
NOT_READY, UNREACHABLE, UNSCHEDULABLE = f"{PREFIX}not-ready", f"{PREFIX}unreachable", f"{PREFIX}unschedulable"
DISK_PRESSURE = f"{PREFIX}disk-pressure"
OUT_OF_SERVICE = f"{PREFIX}out-of-service"
OF_CONDITION = {"Unknown": UNREACHABLE, "False": NOT_READY}  # the taints of a node by its condition Ready
MONITOR_PERIOD = 5.0  # seconds until the controller notices that a kubelet reports that it is not ready
MANAGED = (NOT_READY, UNREACHABLE, UNSCHEDULABLE, DISK_PRESSURE)


@dataclass(frozen=True)
class NodeTimes:
    """Times of kube-controller-manager in seconds, multiplied by `factor` so that tests don't take minutes.

    :param tolerations: the factor for the tolerationSeconds of pods (300 by default).
    :param quarantine: seconds for which a node must be missing before its pods are deleted.
    :param period: seconds between two runs of the pod garbage collector.
    """

    tolerations: float = 1.0
    quarantine: float = 40.0
    period: float = 20.0

    @classmethod
    def scaled(cls, factor: float) -> NodeTimes:
        """The real times, multiplied by a factor."""
        return cls(factor, cls.quarantine * factor, cls.period * factor)


class NodeController(Controller[Key]):
    """Taints nodes that are unschedulable, not ready or out of disk; of those not ready, no pod is Ready."""

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._recorder = EventRecorder(store, "node-controller")
        self.watch(r.NODE, itself)

    def reconcile(self, key: Key) -> float | None:
        """Reconcile one node. Returns the seconds until the pods of a node that is not ready are marked."""
        node = self.store.find(r.NODE, *key)
        if node is None:
            return None
        ready = c.condition(node["status"], "Ready") or {"status": "Unknown"}
        failed = OF_CONDITION.get(ready["status"])
        wanted = [(UNSCHEDULABLE, "NoSchedule")] if node["spec"].get("unschedulable") else []
        wanted += [(DISK_PRESSURE, "NoSchedule")] if c.has(node["status"], "DiskPressure") else []
        wanted += [(failed, "NoSchedule"), (failed, "NoExecute")] if failed else []
        old = node["spec"].get("taints") or []
        known = [(taint["key"], taint["effect"]) for taint in old]
        kept = [t for t in old if t["key"] not in MANAGED or (t["key"], t["effect"]) in wanted]
        added = [{"key": k, "effect": e, "timeAdded": now()} for k, e in wanted if (k, e) not in known]
        if added or kept != old:
            spec = {k: v for k, v in node["spec"].items() if k != "taints"}
            self.store.update(r.NODE, {**node, "spec": {**spec, **({"taints": kept + added} if kept + added else {})}})
        if any(taint["key"] == failed for taint in added):
            self._recorder.event(node, "Normal", "NodeNotReady", f"Node {key[1]} status is now: NodeNotReady")
        noticed = c.seconds(ready["lastTransitionTime"]) + MONITOR_PERIOD - self.clock() if failed == NOT_READY else 0.0
        if failed and noticed <= 0:
            self._mark_pods(key[1])
        return noticed if noticed > 0 else None

    def _mark_pods(self, node: str) -> None:
        for pod in _pods_of(self.store, node):
            if disruptions.is_ready(pod):
                conditions = [
                    {**x, "status": "False", "lastTransitionTime": now()} if x["type"] == "Ready" else x
                    for x in pod["status"]["conditions"]
                ]
                self.store.update_status(r.POD, pod, {**pod["status"], "conditions": conditions})
                self._recorder.event(pod, "Warning", "NodeNotReady", "Node is not ready")


class TaintController(Controller[Key]):
    """Deletes pods from nodes with NoExecute taints, at once or after the pod's tolerationSeconds."""

    def __init__(self, store: Store, times: NodeTimes, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._times = times
        self._since: dict[tuple[str, str], float] = {}  # when each taint was first seen, by node and key
        self._waiting: dict[Key, Obj] = {}  # pods that will be deleted, unless their node recovers
        self._recorder = EventRecorder(store, "taint-eviction-controller")
        self.watch(r.NODE, self._of_node)
        self.watch(r.POD, itself)

    def _of_node(self, change: Change) -> Iterable[Key]:
        name = change.object["metadata"]["name"]
        taints = {t["key"] for t in _no_execute(change.object)} if change.type != "DELETED" else set()
        for known in [known for known in self._since if known[0] == name and known[1] not in taints]:
            del self._since[known]
        for key in taints:
            self._since.setdefault((name, key), self.clock())
        return [_key(pod) for pod in _pods_of(self.store, name)] if taints else []

    def reconcile(self, key: Key) -> float | None:
        """Delete the pod if a taint requires it. Returns the seconds until then."""
        pod = self.store.find(r.POD, *key)
        node = self.store.find(r.NODE, None, at(pod, "spec.nodeName", "")) if pod else None
        waiting = self._waiting.pop(key, None)
        if pod is None or node is None or c.is_terminating(pod) or has_ended(pod):
            self._cancel(key, waiting)
            return None
        due = [self._due(pod, node, taint) for taint in _no_execute(node)]
        at_time = min((time for time in due if time is not None), default=None)
        if at_time is None:
            self._cancel(key, waiting)
            return None
        if at_time > self.clock():
            self._waiting[key] = pod
            return at_time - self.clock()
        message = f"Marking for deletion Pod {key[0]}/{key[1]}"
        self._recorder.event(pod, "Normal", "TaintManagerEviction", message)
        disruptions.delete(self.store, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
        return None

    def _cancel(self, key: Key, pod: Obj | None) -> None:
        """Record that a pod which was going to be deleted stays."""
        if pod is not None:
            message = f"Cancelling deletion of Pod {key[0]}/{key[1]}"
            self._recorder.event(pod, "Normal", "TaintManagerEviction", message)

    def _due(self, pod: Obj, node: Obj, taint: Obj) -> float | None:
        """When a taint deletes the pod, in seconds since the epoch. None if the pod tolerates it for ever."""
        toleration = toleration_of(pod, taint)
        if toleration and toleration.get("tolerationSeconds") is None:
            return None
        tolerated = toleration["tolerationSeconds"] * self._times.tolerations if toleration else 0.0
        return self._since.get((node["metadata"]["name"], taint["key"]), self.clock()) + float(tolerated)


class PodGarbageCollector(Controller[str]):
    """Removes the pods of nodes that no longer exist, and those that terminate on nodes that are out of service.

    It looks in a fixed period, as long as there are such pods.
    """

    def __init__(self, store: Store, times: NodeTimes, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._times = times
        self._missing: dict[str, float] = {}  # when a node was first found missing
        self.watch(r.NODE, lambda _: [""] if self._candidates() else [], after=times.period)
        self.watch(r.POD, lambda change: [""] if self._is_candidate(change.object) else [], after=times.period)

    def reconcile(self, key: str) -> float | None:
        """Look at all pods. Returns the seconds until the next look, None if there is nothing to do."""
        found = self._candidates()
        nodes = {pod["spec"]["nodeName"] for pod in found}
        self._missing = {name: self._missing.get(name, self.clock()) for name in nodes}
        for pod in found:
            name = pod["spec"]["nodeName"]
            if self.store.find(r.NODE, None, name) is not None:
                self._remove(pod)
            elif self.clock() - self._missing[name] >= self._times.quarantine:
                self._remove(pod, ("DeletionByPodGC", "PodGC: node no longer exists"))
        return self._times.period if found else None

    def _candidates(self) -> Objects:
        return [pod for pod in self.store.list(r.POD) if self._is_candidate(pod)]

    def _is_candidate(self, pod: Obj) -> bool:
        name = pod["spec"].get("nodeName")
        node = self.store.find(r.NODE, None, name) if name else None
        if node is None:
            return bool(name)
        out_of_service = any(taint["key"] == OUT_OF_SERVICE for taint in node["spec"].get("taints") or ())
        return out_of_service and c.is_terminating(pod) and not c.has(node["status"], "Ready")

    def _remove(self, pod: Obj, disruption: tuple[str, str] | None = None) -> None:
        """Set the phase to Failed and delete the pod at once, without its kubelet."""
        meta = pod["metadata"]
        if not has_ended(pod):
            if disruption:
                pod = disruptions.mark(self.store, pod, *disruption, phase="Failed")
            else:
                pod = self.store.update_status(r.POD, pod, {**pod["status"], "phase": "Failed"})
        self.store.delete(r.POD, meta["namespace"], meta["name"], grace=0, uid=meta["uid"])


def _no_execute(node: Obj) -> Objects:
    return [taint for taint in node["spec"].get("taints") or () if taint["effect"] == "NoExecute"]


def _pods_of(store: Store, node: str) -> Objects:
    """The pods of a node that have not ended."""
    return [pod for pod in store.list(r.POD) if pod["spec"].get("nodeName") == node and not has_ended(pod)]


def _key(pod: Obj) -> Key:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]
