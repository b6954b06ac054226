"""Store and controllers without a server: a test plays the kubelet, and turns the clock."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from ktrain_embedded.controllers.common import timestamp
from ktrain_embedded.controllers.gc import GarbageCollector
from ktrain_embedded.controllers.runtime import Clock, Controller
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Store

NAMESPACE = "ns"
LATE = 0.2  # seconds that a controller needs to get to what is due


class Play:
    """A cluster of the given controllers and the garbage collector.

    :param controllers: what makes each from a store and a clock.
    """

    def __init__(self, *controllers: Callable[[Store, Clock], Controller[Any]], mpi_api: str = "v1") -> None:
        self.store = Store()
        self.time = time.time()
        self.controllers = [make(self.store, lambda: self.time) for make in controllers]
        self.controllers.append(GarbageCollector(self.store, r.served(mpi_api), lambda: self.time))
        self.seen: list[Obj] = []
        self.store.subscribe(r.EVENT, lambda change: self.seen.append(change.object))

    def settle(self) -> None:
        """Let the controllers do all that is due."""
        for _ in range(10_000):
            if not [c for c in self.controllers if c.step()]:
                return
        raise AssertionError("the controllers never come to rest")

    def wait(self, seconds: float) -> None:
        """Turn the clock, and let the controllers do what is due on the way."""
        until = self.time + seconds
        while due := [c.due for c in self.controllers if c.due is not None and c.due <= until]:
            self.time = max(self.time, min(due) + LATE)
            self.settle()
        self.time = until
        self.settle()

    def create(self, resource: Resource, obj: Obj) -> Obj:
        obj = copy.deepcopy(obj)
        obj["metadata"].setdefault("namespace", NAMESPACE)
        created = self.store.create(resource, obj)
        self.settle()
        return created

    def patch(self, resource: Resource, name: str, change: Callable[[Obj], Any]) -> None:
        obj = copy.deepcopy(self.store.get(resource, NAMESPACE, name))
        change(obj)
        self.store.update(resource, obj)
        self.settle()

    # the kubelet

    def pod(self, name: str) -> Obj:
        return self.store.get(r.POD, NAMESPACE, name)

    def status(self, name: str, settle: bool = True, **status: Any) -> None:
        """Write the pod's status over what it has, on a node."""
        pod = copy.deepcopy(self.pod(name))
        pod["spec"]["nodeName"] = "node-0"
        pod = self.store.update(r.POD, pod)
        self.store.update_status(r.POD, pod, {**pod.get("status", {}), **status})
        if settle:
            self.settle()

    def run(self, *names: str, restarts: int = 0) -> None:
        """The pods' containers run."""
        for name in names:
            containers = [
                {"name": x["name"], "restartCount": restarts, "state": {"running": {}}}
                for x in self.pod(name)["spec"]["containers"]
            ]
            ready = [{"type": "Ready", "status": "True"}]
            self.status(name, phase="Running", containerStatuses=containers, conditions=ready)

    def exit(self, name: str, code: int, phase: str | None = None, **ended: Any) -> None:
        """The pod's containers end with `code`, and the pod with them."""
        terminated = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": timestamp(self.time)}
        containers = [
            {"name": x["name"], "restartCount": 0, "state": {"terminated": {**terminated, **ended}}}
            for x in self.pod(name)["spec"]["containers"]
        ]
        phase = phase or ("Failed" if code else "Succeeded")
        self.status(name, phase=phase, containerStatuses=containers, conditions=[{"type": "Ready", "status": "False"}])

    def reap(self) -> None:
        """Pods that are being deleted end, as on SIGTERM, and go."""
        for pod in self.store.list(r.POD):
            if "deletionTimestamp" in pod["metadata"]:
                self.store.delete(r.POD, pod["metadata"]["namespace"], pod["metadata"]["name"], grace=0)
                self.settle()

    # what there is

    def names(self, resource: Resource) -> list[str]:
        return [o["metadata"]["name"] for o in self.store.list(resource, NAMESPACE)]

    def conditions(self, resource: Resource, name: str) -> list[str]:
        """The conditions as `Type=Status/Reason/message`."""
        status = self.store.get(resource, NAMESPACE, name).get("status", {})
        return [
            f"{c['type']}={c['status']}/{c.get('reason', '')}/{c.get('message', '')}"
            for c in status.get("conditions", ())
        ]

    def types(self, resource: Resource, name: str) -> list[str]:
        """The conditions as `Type=Status`."""
        return [c.split("/")[0] for c in self.conditions(resource, name)]

    def counts(self, resource: Resource, name: str) -> dict[str, dict[str, int]]:
        """The replicaStatuses without selectors."""
        statuses = self.store.get(resource, NAMESPACE, name).get("status", {}).get("replicaStatuses", {})
        return {t: {k: v for k, v in s.items() if k != "selector"} for t, s in statuses.items()}

    def events(self, name: str) -> list[str]:
        """Events about an object as `Type Reason message`, oldest first."""
        events = [e for e in self.store.list(r.EVENT) if e["involvedObject"]["name"] == name]
        events.sort(key=lambda e: int(e["metadata"]["name"].rsplit(".", 1)[1], 16))
        return [f"{e['type']} {e['reason']} {e['message']}" for e in events]
