"""The kubelet of one node. It runs the pods that are bound to the node, with one pod worker for each pod."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

from ktrain_embedded.events import EventRecorder
from ktrain_embedded.node import admission, nodes
from ktrain_embedded.node.exec import serve
from ktrain_embedded.node.images import Images
from ktrain_embedded.node.podworker import EVICTION_GRACE, PodWorker, Timing
from ktrain_embedded.node.storage import STORAGE
from ktrain_embedded.node.volumes import MountError, Token
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.pods import has_ended, qos_class
from ktrain_embedded.objects.quantity import parse
from ktrain_embedded.objects.store import Change, Obj, Store, at, now

SHUTDOWN_SECONDS = 0.5  #: Time from the condition NotReady to SIGTERM for the pods.
SHUTDOWN_MESSAGE = "Pod was terminated in response to imminent node shutdown."
SHUTTING_DOWN = "NodeShutdown", "Pod was rejected as the node is shutting down."
UNDER_PRESSURE = "Evicted", "The node had condition: [DiskPressure]. "
DISK_SHARE = 0.1  # of the disk: the kubelet's eviction threshold nodefs.available


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
        self.recorder = EventRecorder(store, "kubelet", host=name)
        self.online = asyncio.Event()
        self._workers: dict[str, PodWorker] = {}
        self._addresses = itertools.count(2)
        self.node = store.get(r.NODE, None, name)  # the last known object; the node may be deleted
        self._rejected: set[str] = set()  # uids of pods that will fail in a moment
        self._next_rejection = 0.0  # the earliest time, as that of the event loop
        self._devices = ""  # why devices can't be allocated
        self._refusal: tuple[str, str] | None = None  # reason and message of the rejection of all pods
        self._pressure: asyncio.TimerHandle | None = None  # until the condition DiskPressure
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
        if pod["spec"].get("nodeName") != self.name or not self.online.is_set():
            return
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if change.type == "DELETED":
            if worker:
                worker.delete(0)
        elif worker:
            worker.changed(pod)
        elif not has_ended(pod) and not self._reject(pod):
            worker = self._workers[uid] = PodWorker(self, pod, *self._addresses_of())
            worker.task.add_done_callback(lambda _: self._workers.pop(uid))
            worker.changed(pod)

    def _reject(self, pod: Obj) -> bool:
        """Reject a pod that doesn't fit on the node: phase Failed, without any container. False if it fits."""
        uid = pod["metadata"]["uid"]
        if uid in self._rejected:
            return True
        admitted = [p for p in self.store.list(r.POD) if p["metadata"]["uid"] in self._workers and not has_ended(p)]
        found = self._refusal or admission.refusal(pod, self.node, admitted, self._devices)
        if found is None:
            return False
        self._rejected.add(uid)
        loop = asyncio.get_running_loop()
        due = max(self._next_rejection, loop.time())
        self._next_rejection = due + self.timing.reject
        loop.call_at(due, self._fail, pod["metadata"], *found)
        return True

    def _fail(self, meta: Obj, reason: str, message: str) -> None:
        """Set the phase of a rejected pod to Failed, unless it doesn't exist any more."""
        self._rejected.discard(meta["uid"])
        pod = self.store.find(r.POD, meta["namespace"], meta["name"])
        if pod is None or pod["metadata"]["uid"] != meta["uid"] or not self.online.is_set():
            return
        self.recorder.event(pod, "Warning", reason, message)
        generation = pod["metadata"].get("generation", 1)
        failed = {
            "observedGeneration": generation, "phase": "Failed", "message": f"Pod was rejected: {message}",
            "reason": reason, "startTime": now(), "qosClass": qos_class(pod),
        }  # fmt: skip
        self.store.update_status(r.POD, pod, failed)
        if "deletionTimestamp" in pod["metadata"]:
            self.store.delete(r.POD, meta["namespace"], meta["name"], grace=0, uid=meta["uid"])

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
        if node["metadata"]["name"] != self.name or change.type == "DELETED":
            return
        self.node = node
        if change.type == "MODIFIED" and self.online.is_set() and status["allocatable"] != status["capacity"]:
            self.store.update_status(r.NODE, node, {**status, "allocatable": dict(status["capacity"])})

    def _addresses_of(self) -> tuple[str, str]:
        """Return the addresses of a new pod and of the node. They aren't reachable: all processes share loopback."""
        subnet = self.node["spec"]["podCIDR"].rpartition(".")[0]
        return f"{subnet}.{next(self._addresses)}", self.node["status"]["addresses"][0]["address"]

    # faults

    def evict(self, pod: Obj, message: str) -> None:
        """Evict a pod, as under node pressure: phase Failed, reason Evicted. KeyError if it doesn't run here."""
        self._workers[pod["metadata"]["uid"]].end("Warning", "Evicted", message, grace=0, disrupted=True)

    async def run_out_of_disk(self) -> None:
        """Evict the pod that uses most of the disk, and reject new pods until `recover`.

        The condition DiskPressure follows some seconds later, and with it the taint: until then, pods are still bound
        to this node.
        """
        self._refusal = UNDER_PRESSURE
        self.recorder.event(self.node, "Warning", "EvictionThresholdMet", "Attempting to reclaim ephemeral-storage")
        running = {uid: worker for uid, worker in self._workers.items() if not worker.facts.finished}
        used = {uid: await asyncio.to_thread(worker.disk_usage) for uid, worker in running.items()}
        if used:
            uid = max(used, key=lambda uid: sum(used[uid].values()))
            message = pressure_message(running[uid].pod, used[uid], shutil.disk_usage(self.root).total)
            running[uid].end("Warning", "Evicted", message, EVICTION_GRACE, disrupted=True)
        if self._pressure is None:
            delay, loop = self.timing.pressure, asyncio.get_running_loop()
            self._pressure = loop.call_later(delay, self._set_disk_pressure, nodes.NO_DISK)

    def break_devices(self, message: str) -> None:
        """Reject new pods that request devices, such as GPUs, until `recover`."""
        self._devices = message

    def lose(self) -> None:
        """Simulate the loss of the node: kill all its processes, and report nothing until `recover`."""
        for worker in self._workers.values():
            worker.kill_all()
        self.silence(0)

    def silence(self, unreachable: float | None = None) -> None:
        """Report nothing and notice nothing until `recover`. The containers run on.

        :param unreachable: seconds until the node counts as unreachable; None for the time of a real cluster.
        """
        self.online.clear()
        delay = self.timing.unreachable if unreachable is None else unreachable
        if delay:
            self._unreachable = asyncio.get_running_loop().call_later(
                delay, self._set_condition, "Ready", nodes.UNKNOWN
            )
        else:
            self._set_condition("Ready", nodes.UNKNOWN)

    def shut_down(self) -> None:
        """Shut the node down gracefully: its pods end as Failed (Terminated), and it is not ready until `recover`."""
        self._refusal = SHUTTING_DOWN
        self._set_condition("Ready", nodes.SHUTDOWN)
        asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, self._end_pods)

    def _end_pods(self) -> None:
        """End the pods of a node that shuts down. Its taints are set by then, as in recordings 105c."""
        if self._refusal == SHUTTING_DOWN:
            for worker in self._workers.values():
                worker.end("", "Terminated", SHUTDOWN_MESSAGE, disrupted=True)

    def recover(self) -> None:
        """End all faults of the node: report what has happened, and process what has changed meanwhile.

        Containers that were killed are restarted if they should run. Pods that no longer exist are ended. A deleted
        node is registered again.
        """
        if self._unreachable:
            self._unreachable.cancel()
        self._devices, self._refusal = "", None
        if self._pressure:
            self._pressure.cancel()
            self._pressure = None
            self._set_disk_pressure(nodes.ENOUGH_DISK)
        if self.store.find(r.NODE, None, self.name) is None:
            spec = {k: v for k, v in self.node["spec"].items() if k not in ("taints", "unschedulable")}
            meta = {k: self.node["metadata"][k] for k in ("name", "labels")}
            self.store.create(r.NODE, {**self.node, "metadata": meta, "spec": spec})
        self._set_condition("Ready", nodes.READY)
        if self.online.is_set():
            return
        self.online.set()
        present = {pod["metadata"]["uid"]: pod for pod in self.store.list(r.POD)}
        for uid, worker in list(self._workers.items()):
            worker.report()
            if uid not in present:
                worker.delete(math.inf)
        for pod in present.values():
            self._pod(Change(0, "MODIFIED", r.POD, pod))

    def _set_condition(self, type_: str, condition: Mapping[str, str]) -> None:
        node = self.store.find(r.NODE, None, self.name)
        if node is not None:
            self.store.update_status(r.NODE, node, nodes.with_condition(node, type_, condition))

    def _set_disk_pressure(self, condition: Mapping[str, str]) -> None:
        self._set_condition("DiskPressure", condition)
        reason = condition["reason"].replace("Kubelet", "Node")
        self.recorder.event(self.node, "Normal", reason, f"Node {self.name} status is now: {reason}")


def pressure_message(pod: Obj, used: Mapping[str, int], disk: int) -> str:
    """The kubelet's message about a pod that it evicts because its node is low on disk.

    :param used: bytes by container.
    :param disk: bytes of the node's disk. The available space is simulated: half of the threshold.
    """
    threshold = int(disk * DISK_SHARE)
    text = f"Threshold quantity: {threshold}, available: {threshold // 2048}Ki. "
    for container in pod["spec"]["containers"]:
        request = at(container, "resources.requests", {}).get(STORAGE, "0")
        if (size := used[container["name"]]) > parse(request):
            name, kilobytes = container["name"], f"{-(-size // 1024)}Ki"
            text += (
                f"Container {name} was using {kilobytes}, request is {request}, "
                "has larger consumption of ephemeral-storage. "
            )
    return f"The node was low on resource: ephemeral-storage. {text}"
