"""The kubelet of one node: sees that the pods bound to it run, each in the hands of a worker of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path

from airflow_provider_ktrain.local import node as nodes
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.environment import Ports
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.exec import Resolver, Tools
from airflow_provider_ktrain.local.images import Images
from airflow_provider_ktrain.local.node import Gpus
from airflow_provider_ktrain.local.podworker import PodWorker, Surroundings, Timing
from airflow_provider_ktrain.local.store import Change, Obj, Store, now
from airflow_provider_ktrain.local.volumes import MountError, Token

TERMINAL = ("Succeeded", "Failed")


class Kubelet:
    """One node's kubelet.

    :param root: where pods have their directories and logs (`<root>/pods/<uid>/<container>/<restarts>.log`); nodes
        share it.
    :param images: image names and their directories; None is an empty one.
    :param ports, gpus: what the nodes of one machine must share; own ones where none are given.
    :param token: makes the tokens of service accounts that pods mount.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        root: Path,
        images: Mapping[str, Path | None],
        *,
        recorder: EventRecorder | None = None,
        timing: Timing | None = None,
        ports: Ports | None = None,
        gpus: Gpus | None = None,
        token: Token | None = None,
    ) -> None:
        self.name = name
        self._store = store
        self._resolver = Resolver(store, root.absolute(), name)
        self._here = Surroundings(
            store=store,
            recorder=recorder or EventRecorder(store, "kubelet"),
            node=name,
            root=root.absolute(),
            images=Images(images),
            ports=ports or PORTS,
            gpus=gpus or GPUS,
            timing=timing or Timing(),
            token=token,
            tools=Tools(root.absolute(), self._resolver.name),
        )
        self._workers: dict[str, PodWorker] = {}
        self._addresses = itertools.count(2)
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled; then all containers are killed."""
        handlers = {r.POD: self._pod, r.NODE: self._node, r.CONFIG_MAP: self._config, r.SECRET: self._config}
        stops = [self._store.subscribe(resource, handle) for resource, handle in handlers.items()]
        self._here.online.set()
        try:
            for pod in self._store.list(r.POD):
                self._pod(Change(0, "ADDED", r.POD, pod))
            await self._resolver.run()
        finally:
            for stop in stops:
                stop()
            tasks = [worker.task for worker in self._workers.values()] + list(self._background)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # what it watches

    def _pod(self, change: Change) -> None:
        pod = change.object
        if pod["spec"].get("nodeName") != self.name:
            return
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if change.type == "DELETED":
            if worker:
                worker.gone()
        elif worker:
            worker.changed(pod)
        elif pod.get("status", {}).get("phase") not in TERMINAL:
            worker = self._workers[uid] = PodWorker(self._here, pod, *self._addresses_of())
            worker.task.add_done_callback(lambda task: self._over(uid, task))
            worker.changed(pod)

    def _over(self, uid: str, task: asyncio.Task[None]) -> None:
        """A pod and all that ran of it are gone: its logs stay for those who follow them."""
        worker = self._workers.pop(uid)
        if task.cancelled():
            return
        cleaning = asyncio.create_task(self._clean(worker))
        self._background.add(cleaning)
        cleaning.add_done_callback(self._background.discard)
        task.result()

    async def _clean(self, worker: PodWorker) -> None:
        try:
            await asyncio.sleep(self._here.timing.keep_logs)
        finally:
            worker.discard()

    def _config(self, change: Change) -> None:
        """A ConfigMap or Secret changed: the volumes that show it follow. (With a real kubelet, within a minute.)"""
        meta = change.object["metadata"]
        for worker in self._workers.values():
            if worker.pod["metadata"]["namespace"] != meta["namespace"]:
                continue
            worker.configured.set()
            if worker.facts.sandbox and (change.resource, meta["name"]) in worker.volumes.watched:
                with contextlib.suppress(MountError):
                    worker.volumes.set_up()

    def _node(self, change: Change) -> None:
        """Capacity that was patched becomes allocatable."""
        node = change.object
        if node["metadata"]["name"] == self.name and change.type == "MODIFIED" and self._here.online.is_set():
            status = node["status"]
            if status.get("allocatable") != status.get("capacity"):
                self._store.update_status(r.NODE, node, {**status, "allocatable": dict(status.get("capacity") or {})})

    def _addresses_of(self) -> tuple[str, str]:
        """A new pod's address and that of the node. They are for show: all processes share loopback."""
        node = self._store.get(r.NODE, None, self.name)
        subnet = node["spec"].get("podCIDR", "10.244.0.0/24").rpartition(".")[0]
        host = next((a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP"), "127.0.0.1")
        return f"{subnet}.{next(self._addresses)}", host

    # what happens to it

    def evict(self, pod: Obj, message: str) -> None:
        """End a pod as under pressure: phase Failed, reason Evicted. KeyError where it does not run here."""
        worker = self._workers[pod["metadata"]["uid"]]
        self._here.recorder.event(pod, "Warning", "Evicted", message)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
        worker.facts.extra_conditions.append(condition)
        worker.end("Evicted", message, grace=0)

    def lose(self) -> None:
        """Lose the node: all its processes die, and nothing is heard of it until `recover`."""
        self._here.online.clear()
        for worker in self._workers.values():
            worker.kill_all()
        self._write(nodes.lost)
        for pod in self._pods():
            status = pod["status"]
            conditions = [
                {**c, "status": "False", "lastTransitionTime": now()} if c["type"] == "Ready" else c
                for c in status.get("conditions") or ()
            ]
            self._store.update_status(r.POD, pod, {**status, "conditions": conditions})
            self._here.recorder.event(pod, "Warning", "NodeNotReady", "Node is not ready")
        task = asyncio.create_task(self._give_up())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def recover(self) -> None:
        """The node is back: what died is reported, and what should run starts again."""
        self._write(nodes.ready)
        self._here.online.set()

    async def _give_up(self) -> None:
        """Delete the pods of a lost node; without a kubelet they stay Terminating."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._here.online.wait(), self._here.timing.unreachable)
            return
        for pod in self._pods():
            with contextlib.suppress(ApiError):
                self._here.recorder.event(pod, "Normal", "TaintManagerEviction", "Marking for deletion Pod")
                self._store.delete(r.POD, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _pods(self) -> list[Obj]:
        return [
            p for p in self._store.list(r.POD)
            if p["spec"].get("nodeName") == self.name and p.get("status", {}).get("phase") not in TERMINAL
        ]  # fmt: skip

    def _write(self, change: nodes.NodeChange) -> None:
        node = self._store.get(r.NODE, None, self.name)
        spec, status = change(node)
        written = self._store.update(r.NODE, {**node, "spec": spec})
        self._store.update_status(r.NODE, written, status)


PORTS = Ports()
GPUS = Gpus()
