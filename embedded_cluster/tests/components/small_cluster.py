"""A cluster in small for tests of the node's side: a store, a scheduler and kubelets in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from ktrain_embedded import scheduler
from ktrain_embedded.controllers.budgets import DisruptionController
from ktrain_embedded.controllers.nodes import NodeController, NodeTimes, PodGarbageCollector, TaintController
from ktrain_embedded.node import nodes as node
from ktrain_embedded.node.kubelet import Kubelet
from ktrain_embedded.node.podworker import Timing
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store

FAST = Timing(
    backoff=0.1, backoff_max=0.4, sync=0.2, mount=0.05, mount_max=0.2, pull_error=0.05, cleanup=0.05, keep_logs=0.2
)
#: Ends at SIGTERM, which a container's command otherwise ignores.
SLEEP = "trap 'exit 143' TERM; echo up; sleep 60 & wait"


class Small:
    """The store, and what tests read from it. `history` holds every status of every pod, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store()
        self.kubelets: list[Kubelet] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.history: dict[str, list[Obj]] = {}
        self.store.subscribe(r.POD, lambda change: self._note(change.object))

    def _note(self, pod: Obj) -> None:
        self.history.setdefault(pod["metadata"]["name"], []).append(pod.get("status", {}))

    def create(self, name: str, command: list[str] | str, **spec: Any) -> Obj:
        """A pod with one container `pytorch`; a string is a shell command. `container` adds to the container."""
        container = {
            "name": "pytorch", "image": "demo", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", command] if isinstance(command, str) else command,
            **spec.pop("container", {}),
        }  # fmt: skip
        meta = {"name": name, "namespace": "default", **spec.pop("metadata", {})}
        return self.store.create(r.POD, {
            "metadata": meta,
            "spec": {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container], **spec,
            },
            "status": {"phase": "Pending"},
        })  # fmt: skip

    def pod(self, name: str) -> Obj | None:
        return self.store.find(r.POD, "default", name)

    def state(self, name: str) -> Obj:
        """The state of the pod's first container."""
        pod = self.pod(name)
        statuses = (pod or {}).get("status", {}).get("containerStatuses") or [{}]
        return statuses[0].get("state", {})

    def phase(self, name: str) -> str | None:
        return (self.pod(name) or {}).get("status", {}).get("phase")

    def phases(self, name: str) -> list[str]:
        """The phases that the pod went through."""
        seen = [s.get("phase", "") for s in self.history[name]]
        return [p for i, p in enumerate(seen) if i == 0 or p != seen[i - 1]]

    def log(self, pod: Obj, container: str = "pytorch", run: int = 0) -> str:
        """What a container wrote, without times."""
        path = self.root / "pods" / pod["metadata"]["uid"] / container / f"{run}.log"
        records = [record.split(b" ", 3) for record in path.read_bytes().splitlines()] if path.exists() else []
        return b"".join(f[3] + (b"\n" if f[2] == b"F" else b"") for f in records).decode()

    def events(self, name: str) -> list[tuple[str, str]]:
        """(reason, message) of all events about a pod, in their order."""
        found = [e for e in self.store.list(r.EVENT) if e["involvedObject"]["name"] == name]
        found.sort(key=lambda e: e["metadata"]["name"].rpartition(".")[2])
        return [(e["reason"], e["message"]) for e in found]

    async def until(self, holds: Callable[[], object], what: str = "", timeout: float = 240) -> None:
        """Wait for a condition; AssertionError with the pods' statuses where it does not come."""
        try:
            async with asyncio.timeout(timeout):
                while not holds():
                    assert not any(t.done() for t in self.tasks), [t.exception() for t in self.tasks if t.done()]
                    await asyncio.sleep(0.005)
        except TimeoutError:
            states = {p["metadata"]["name"]: p.get("status") for p in self.store.list(r.POD)}
            raise AssertionError(f"not in {timeout} s: {what or holds}; pods: {states}") from None

    async def ended(self, name: str, timeout: float = 240) -> str:
        """The phase in which the pod ends."""
        await self.until(lambda: self.phase(name) in ("Succeeded", "Failed"), f"end of {name}", timeout)
        return self.phase(name) or ""

    async def runs(self, name: str) -> None:
        await self.until(lambda: "running" in self.state(name), f"{name} runs")

    async def up(self, name: str) -> None:
        """Wait until a container with command SLEEP has its handler."""
        await self.runs(name)
        await self.until(lambda: self.log(self.pod(name) or {}) == "up\n", f"{name} is up")


@contextlib.asynccontextmanager
async def small(
    root: Path,
    *,
    nodes: int = 1,
    gpus: int = 0,
    timing: Timing = FAST,
    images: dict[str, Path | None] | None = None,
    node_times: NodeTimes | None = None,
) -> AsyncIterator[Small]:
    """A running small cluster with image `demo`; all that it started is gone afterwards."""
    cluster = Small(root)
    for obj in node.node_objects(nodes, gpus):
        cluster.store.create(r.NODE, obj)
        cluster.kubelets.append(
            Kubelet(cluster.store, obj["metadata"]["name"], root, {"demo": None, **(images or {})}, timing=timing)
        )
    times = node_times or NodeTimes()
    of_nodes = (NodeController(cluster.store), TaintController(cluster.store, times))
    collector = PodGarbageCollector(cluster.store, times)
    controllers = (*of_nodes, collector, DisruptionController(cluster.store))
    loops = (*(kubelet.run for kubelet in cluster.kubelets), *(controller.run for controller in controllers))
    runs = (scheduler.run(cluster.store), *(loop() for loop in loops))
    tasks = cluster.tasks = [asyncio.create_task(run) for run in runs]
    try:
        yield cluster
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
