"""The kubelet of one node. It runs the pods that are bound to the node, with one pod worker for each pod."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path

from ktrain_embedded.events import EventRecorder
from ktrain_embedded.node import nodes
from ktrain_embedded.node.exec import serve
from ktrain_embedded.node.images import Images
from ktrain_embedded.node.podworker import PodWorker, Timing
from ktrain_embedded.node.volumes import MountError, Token
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.store import Change, Obj, Store, now


class Kubelet:
    """One node's kubelet.

    :param root: the directory of pods and their logs (`<root>/pods/<uid>/<container>/<restarts>.log`). Nodes share it.
    :param images: directory by image name. None is an empty directory.
    :param token: creates the service account tokens that pods mount.
    :param hosts: host:port of services of the cluster, mapped to their host:port on this machine.
    """

    def __init__(
        self, store: Store, name: str, root: Path, images: Mapping[str, Path | None], *,
        timing: Timing | None = None, token: Token | None = None, hosts: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.store = store
        self.name = name
        self.root = root.absolute()
        self.images = Images(images)
        self.timing = timing or Timing()
        self.token = token
        self.hosts = hosts or {}
        self.recorder = EventRecorder(store, "kubelet")
        self.online = asyncio.Event()
        self._workers: dict[str, PodWorker] = {}
        self._addresses = itertools.count(2)
        self._unreachable: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Run pods until cancelled. Then kill all containers."""
        handlers = {r.POD: self._pod, r.NODE: self._node, r.CONFIG_MAP: self._config, r.SECRET: self._config}
        stops = [self.store.subscribe(resource, handle) for resource, handle in handlers.items()]
        self.online.set()
        try:
            for pod in self.store.list(r.POD):
                self._pod(Change(0, "ADDED", r.POD, pod))
            await serve(self.store, self.root, self.name)
        finally:
            for stop in stops:
                stop()
            tasks = [worker.task for worker in self._workers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # watched objects

    def _pod(self, change: Change) -> None:
        pod = change.object
        if pod["spec"].get("nodeName") != self.name:
            return
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if change.type == "DELETED":
            if worker:
                worker.delete(0)
        elif worker:
            worker.changed(pod)
        elif not has_ended(pod):
            worker = self._workers[uid] = PodWorker(self, pod, *self._addresses_of())
            worker.task.add_done_callback(lambda _: self._workers.pop(uid))
            worker.changed(pod)

    def _config(self, change: Change) -> None:
        """Update the volumes of a changed ConfigMap or Secret. A real kubelet does so within a minute."""
        meta = change.object["metadata"]
        for worker in self._workers.values():
            near = worker.facts.sandbox and worker.pod["metadata"]["namespace"] == meta["namespace"]
            if near and (change.resource, meta["name"]) in worker.volumes.watched:
                with contextlib.suppress(MountError):
                    worker.volumes.set_up()

    def _node(self, change: Change) -> None:
        """Copy a patched capacity to allocatable."""
        node, status = change.object, change.object["status"]
        here = node["metadata"]["name"] == self.name and change.type == "MODIFIED" and self.online.is_set()
        if here and status["allocatable"] != status["capacity"]:
            self.store.update_status(r.NODE, node, {**status, "allocatable": dict(status["capacity"])})

    def _addresses_of(self) -> tuple[str, str]:
        """Return the addresses of a new pod and of the node. They aren't reachable: all processes share loopback."""
        node = self.store.get(r.NODE, None, self.name)
        subnet = node["spec"]["podCIDR"].rpartition(".")[0]
        return f"{subnet}.{next(self._addresses)}", node["status"]["addresses"][0]["address"]

    # eviction and loss of the node

    def evict(self, pod: Obj, message: str) -> None:
        """Evict a pod, as under node pressure: phase Failed, reason Evicted. KeyError if it doesn't run here."""
        self._workers[pod["metadata"]["uid"]].end("Warning", "Evicted", message, grace=0)

    def lose(self) -> None:
        """Simulate the loss of the node: kill all its processes, and report nothing until `recover`."""
        self.online.clear()
        for worker in self._workers.values():
            worker.kill_all()
        self._write(reachable=False)
        for pod in self._pods():
            conditions = [
                {**c, "status": "False", "lastTransitionTime": now()} if c["type"] == "Ready" else c
                for c in pod["status"].get("conditions") or ()
            ]
            self.store.update_status(r.POD, pod, {**pod["status"], "conditions": conditions})
            self.recorder.event(pod, "Warning", "NodeNotReady", "Node is not ready")
        self._unreachable = asyncio.get_running_loop().call_later(self.timing.unreachable, self._report_unreachable)

    def recover(self) -> None:
        """Bring the node back: report the containers that were killed, and restart those that should run."""
        if self._unreachable:
            self._unreachable.cancel()
        self._write(reachable=True)
        self.online.set()

    def _report_unreachable(self) -> None:
        """Delete the pods of a lost node. They stay Terminating, because the kubelet is offline."""
        for pod in self._pods():
            self.recorder.event(pod, "Normal", "TaintManagerEviction", "Marking for deletion Pod")
            self.store.delete(r.POD, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _pods(self) -> list[Obj]:
        pods = self.store.list(r.POD)
        return [pod for pod in pods if pod["spec"].get("nodeName") == self.name and not has_ended(pod)]

    def _write(self, *, reachable: bool) -> None:
        node = nodes.changed(self.store.get(r.NODE, None, self.name), reachable)
        self.store.update_status(r.NODE, self.store.update(r.NODE, node), node["status"])
