"""The pod worker of the kubelet. It runs one pod from its binding until its files are removed.

`_work` is the normal sequence: it sets up the volumes, runs the init containers one after the other, and then runs all
containers with their restarts. A deletion, an eviction or a deadline cancels it. The worker then stops the running
containers and reports the end of the pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from ktrain_embedded.events import EventRecorder
from ktrain_embedded.node import environment, podstatus, storage
from ktrain_embedded.node.environment import ConfigError, Paths, Ports
from ktrain_embedded.node.exec import REPLACED, install, open_mpi
from ktrain_embedded.node.gpus import Gpus
from ktrain_embedded.node.images import REFERENCE, ImageNotFound, Images
from ktrain_embedded.node.nodes import GPU
from ktrain_embedded.node.podstatus import ContainerFacts
from ktrain_embedded.node.runtime import Ended, Run, RunSpec, StartError
from ktrain_embedded.node.volumes import MountError, Token, Volumes
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.quantity import parse
from ktrain_embedded.objects.store import Obj, Store, now
from ktrain_embedded.scheduler import requests

EPOCH = "1970-01-01T00:00:00Z"
MESSAGE, MESSAGE_BYTES = "termination-log", 4096
LOG_LINES, LOG_BYTES = 80, 2048  # limits of a log that replaces the termination message of a failed container
DEADLINE_MESSAGE = "Pod was active on the node longer than the specified deadline"
EVICTION_GRACE = 1.0  # seconds to stop for a pod that exceeds a limit of storage
PORTS, GPUS = Ports(), Gpus()  # the nodes of this machine share them


@dataclass(frozen=True)
class Timing:
    """Times of the kubelet in seconds. The defaults are those of a real one, except `pull_error` and `cleanup`."""

    backoff: float = 10.0  # before a container's second restart and an image's second pull. Doubles each time
    backoff_max: float = 300.0
    sync: float = 10.0  # between attempts to create a container with an invalid configuration
    mount: float = 0.5  # before the second attempt to mount. Doubles each time
    mount_max: float = 122.0
    pull_error: float = 2.0  # from ErrImagePull to ImagePullBackOff. On a real kubelet, up to `sync`
    cleanup: float = 0.2  # from the end of a pod that is being deleted to its removal. On a real kubelet, about 0.7
    keep_logs: float = 10.0  # from the removal of a pod to the removal of its directory
    reject: float = 0.3  # between two rejections of a node: operators replace rejected pods without a pause
    pressure: float = 2.0  # from the eviction of a pod to the node's condition DiskPressure; recorded: 0.1 to 6
    storage: float = 10.0  # between measurements of the disk usage of a pod with limits
    unreachable: float = 45.0  # from the last report of a silent node to its condition Unknown


class Node(Protocol):
    """The attributes of the kubelet that a pod worker uses."""

    store: Store
    name: str
    root: Path
    images: Images
    timing: Timing
    token: Token | None
    hosts: Mapping[str, str]
    recorder: EventRecorder
    online: asyncio.Event
    node: Obj


def backoff(failures: int, timing: Timing) -> float:
    """Seconds to wait before restart number `failures`: 0 before the first, then 10, 20, 40, ..."""
    return min(timing.backoff * 2 ** (failures - 2), timing.backoff_max) if failures > 1 else 0.0


class PodWorker:
    """Runs one pod. `task` ends when the object is deleted, all processes have ended, and the logs are removed."""

    def __init__(self, kubelet: Node, pod: Obj, ip: str, host_ip: str) -> None:
        self.pod = pod
        self.facts = podstatus.new(pod, pod.get("status", {}).get("startTime") or now(), host_ip)
        self._kubelet = kubelet
        self._uid: str = pod["metadata"]["uid"]
        self._directory = kubelet.root / "pods" / self._uid
        self._tools = self._directory / "bin"
        self.volumes = Volumes(kubelet.store, pod, self._directory / "volumes", kubelet.token)
        self._ip = ip
        self._runs: dict[str, Run] = {}
        self._halted = False
        self._deleted = asyncio.Event()
        self._grace = float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        self._working = asyncio.create_task(self._work())
        self._measuring = asyncio.create_task(self._measure())
        self.task = asyncio.create_task(self._live())
        limit = pod["spec"].get("activeDeadlineSeconds")
        if limit is not None:
            asyncio.get_running_loop().call_later(limit, self.end, "Normal", "DeadlineExceeded", DEADLINE_MESSAGE)

    # changes from outside

    def changed(self, pod: Obj) -> None:
        """Process a change of the object. It can begin a deletion or shorten its grace period."""
        self.pod, meta = pod, pod["metadata"]
        if "deletionTimestamp" in meta:
            grace = meta.get("deletionGracePeriodSeconds") or 0
            self.delete(grace)
            if self.facts.finished and not grace and not meta.get("finalizers"):
                self._remove()

    def delete(self, grace: float) -> None:
        """End the pod within `grace` seconds, or within an earlier grace period if that is shorter."""
        if self._halted and grace < self._grace:
            for run in self._runs.values():
                run.stop(grace)
        self._grace = min(grace, self._grace)
        self._deleted.set()
        self._halt()

    def end(
        self, type_: str, reason: str, message: str, grace: float | None = None, *, disrupted: bool = False
    ) -> None:
        """End the pod by a decision of the kubelet, with an event, phase Failed, `reason` and `message`.

        :param type_: the type of the event; "" for no event.
        :param grace: seconds; None for the pod's own grace period.
        :param disrupted: set the condition DisruptionTarget.
        """
        if self._halted or self.facts.finished:
            return
        if type_:
            self._event(type_, reason, message)
        self.facts.reason, self.facts.message, self.facts.disrupted = reason, message, disrupted
        self._grace = self._grace if grace is None else grace
        self.report()  # updates the conditions now; the phase changes when all containers have ended
        self._halt()

    def disk_usage(self) -> dict[str, int]:
        """The bytes that each container uses of the node's disk; emptyDirs count for the first one."""
        return storage.usage(self.pod, self._directory, self._opened())

    def _opened(self) -> dict[str, storage.Opened]:
        """The files of this machine's /tmp and /dev/shm that the processes of each container have open."""
        folders = [self._kubelet.root, *self._kubelet.images.directories]
        mounts = [path for fact in self.facts.containers for path in self.volumes.mounts(fact.spec).values()]
        return {name: storage.opened_by(run.processes, [*folders, *mounts]) for name, run in self._runs.items()}

    def kill_all(self) -> None:
        """Kill all containers at once, as a loss of the machine does."""
        for run in self._runs.values():
            run.stop(0)

    def _halt(self) -> None:
        self._halted = True
        self._working.cancel()

    # lifecycle

    async def _live(self) -> None:
        try:
            await asyncio.wait([self._working])
            if not self._working.cancelled():
                self._working.result()
            await self._stop()
            await self._kubelet.online.wait()
            self.report()
            self.facts.finished, self.facts.sandbox = True, False
            self.report()
            GPUS.free(self._uid)
            if self._deleted.is_set():  # deleted while it ran: let operators see how it ended before it is removed
                await asyncio.sleep(self._kubelet.timing.cleanup)
            await self._deleted.wait()
            self._remove()
        finally:
            self._measuring.cancel()
            self._working.cancel()
            await asyncio.wait([self._working])
            self.kill_all()
            for run in self._runs.values():
                await run.ended()
        try:
            await asyncio.sleep(self._kubelet.timing.keep_logs)  # for clients that follow them
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _remove(self) -> None:
        meta = self.pod["metadata"]
        with contextlib.suppress(ApiError):
            self._kubelet.store.delete(r.POD, meta["namespace"], meta["name"], grace=0, uid=self._uid)

    async def _stop(self) -> None:
        """Stop the running containers within the grace period."""
        facts = [fact for fact in (*self.facts.init, *self.facts.containers) if fact.exit_code is None]
        live = [(fact, self._runs[fact.name]) for fact in facts if fact.name in self._runs]
        for fact, run in live:
            self._event("Normal", "Killing", f"Stopping container {fact.name}", fact)
            run.stop(self._grace)
        for fact, run in live:
            self._ended(fact, await run.ended())

    async def _work(self) -> None:
        kubelet = self._kubelet
        install(self._tools, kubelet.root, kubelet.name, self.pod["metadata"]["namespace"])
        self.report()
        await self._mount()
        self.facts.sandbox = True
        self.report()
        for fact in self.facts.init:
            if not await self._run(fact, init=True):
                return
        await asyncio.gather(*(self._run(fact) for fact in self.facts.containers))

    async def _measure(self) -> None:
        """Evict the pod when it uses more disk than it may."""
        while storage.is_limited(self.pod):
            await asyncio.sleep(self._kubelet.timing.storage)
            if self.facts.finished or not self._kubelet.online.is_set():
                continue
            if message := await asyncio.to_thread(self._exceeded):
                self.end("Warning", "Evicted", message, EVICTION_GRACE)
                return

    def _exceeded(self) -> str | None:
        return storage.exceeded(self.pod, self._directory, self._opened())

    async def _mount(self) -> None:
        delay = self._kubelet.timing.mount
        while True:
            try:
                self.volumes.set_up()
                return
            except MountError as error:
                self._event("Warning", "FailedMount", str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, self._kubelet.timing.mount_max)

    async def _run(self, fact: ContainerFacts, init: bool = False) -> bool:
        """Run a container, with its restarts, until it has ended for good. Returns whether it succeeded."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        policy = "OnFailure" if init and policy == "Always" else policy
        failures, timing = 0, self._kubelet.timing
        while True:
            image = await self._image(fact)
            began = time.monotonic()
            code = await self._once(fact, image)
            await self._kubelet.online.wait()
            self.report()
            if policy == "Never" or (policy == "OnFailure" and code == 0):
                return code == 0
            failures = 1 if time.monotonic() - began > 2 * timing.backoff_max else failures + 1
            if delay := backoff(failures, timing):
                await self._back_off(fact, delay)

    async def _back_off(self, fact: ContainerFacts, delay: float) -> None:
        pod = f"{self.pod['metadata']['name']}_{self.pod['metadata']['namespace']}({self._uid})"
        self._event("Warning", "BackOff", f"Back-off restarting failed container {fact.name} in pod {pod}", fact)
        fact.last_state = fact.state
        message = f"back-off {_duration(delay)} restarting failed container={fact.name} pod={pod}"
        self._wait_for(fact, "CrashLoopBackOff", message)
        await asyncio.sleep(delay)

    async def _image(self, fact: ContainerFacts) -> Path | None:
        """The image's directory, or None for an empty one. Doesn't return if the name isn't mapped."""
        image = fact.spec["image"]
        try:
            directory = self._kubelet.images.directory(image)
        except ImageNotFound as error:
            await self._pull(fact, str(error))
        pulled = f'Container image "{image}" already present on machine and can be accessed by the pod'
        if fact.spec.get("imagePullPolicy") == "Always":
            self._event("Normal", "Pulling", f'Pulling image "{image}"', fact)
            pulled = f'Successfully pulled image "{image}" in 0s (0s including waiting)'
        self._event("Normal", "Pulled", pulled, fact)
        return directory

    async def _pull(self, fact: ContainerFacts, why: str) -> NoReturn:
        """Retry until cancelled, as a real kubelet does. This never succeeds, because the mapping doesn't change."""
        image, timing, tries = fact.spec["image"], self._kubelet.timing, 1
        event = reason = message = ""
        if not REFERENCE.fullmatch(image):
            event, reason = "InspectFailed", "InvalidImageName"
            why = f'couldn\'t parse image name "{image}": invalid reference format'
            message = f'Failed to apply default image tag "{image}": {why}'
        elif fact.spec.get("imagePullPolicy") == "Never":
            event = reason = "ErrImageNeverPull"
            message = f'Container image "{image}" is not present with pull policy of Never'
        while reason:  # these reasons don't lead to a pull
            self._event("Warning", event, message, fact)
            self._event("Warning", "Failed", f"Error: {reason}", fact)
            self._wait_for(fact, reason, message)
            await asyncio.sleep(timing.sync)
        backing_off = f'Back-off pulling image "{image}"'
        while True:
            tries += 1
            delay = backoff(tries, timing)
            shown = min(timing.pull_error, delay / 2)
            self._event("Normal", "Pulling", f'Pulling image "{image}"', fact)
            self._event("Warning", "Failed", f'Failed to pull image "{image}": {why}', fact)
            self._event("Warning", "Failed", "Error: ErrImagePull", fact)
            self._wait_for(fact, "ErrImagePull", why)
            await asyncio.sleep(shown)
            self._event("Normal", "BackOff", backing_off, fact)
            self._event("Warning", "Failed", "Error: ImagePullBackOff", fact)
            self._wait_for(fact, "ImagePullBackOff", f"{backing_off}: ErrImagePull: {why}")
            await asyncio.sleep(delay - shown)

    async def _once(self, fact: ContainerFacts, image: Path | None) -> int:
        """Run a container once, from its creation to its end, and return its exit code."""
        spec = await self._configured(fact, image)
        if fact.container_id:
            fact.restarts += 1
            fact.last_state = fact.state if fact.exit_code is not None else fact.last_state
        fact.container_id = podstatus.container_id(self._uid, fact.name, fact.restarts)
        self._event("Normal", "Created", "Container created", fact)
        run = self._runs[fact.name] = Run(spec)
        try:
            await run.started()
        except StartError as error:
            self._event("Warning", "Failed", f"Error: {error}", fact)
            del self._runs[fact.name]
            self._terminated(fact, 128, "StartError", str(error), EPOCH)
            return 128
        self._event("Normal", "Started", "Container started", fact)
        fact.state = {"running": {"startedAt": now()}}
        self.facts.ip = self._ip
        self.report()
        ended = await run.ended()
        self._ended(fact, ended)
        return ended.code

    async def _configured(self, fact: ContainerFacts, image: Path | None) -> RunSpec:
        """Wait until everything that the container references exists, and return what to run."""
        while True:
            try:
                return self._spec(fact, image)
            except ConfigError as error:
                self._event("Warning", "Failed", f"Error: {error}", fact)
                self._wait_for(fact, error.reason, str(error))
            await asyncio.sleep(self._kubelet.timing.sync)

    def _spec(self, fact: ContainerFacts, image: Path | None) -> RunSpec:
        kubelet, home = self._kubelet, self._directory / fact.name
        home.mkdir(parents=True, exist_ok=True)
        container = kubelet.images.entrypoint(fact.spec, image)
        if image is None:
            image = home / "root"
            image.mkdir(exist_ok=True)
        number = fact.restarts + bool(fact.container_id)
        for old in home.glob(f"{number - 2}.log*"):
            old.unlink()
        (home / MESSAGE).write_bytes(b"")
        message = container.get("terminationMessagePath", "/dev/termination-log")
        replaced = {path: self._tools / tool for path, tool in REPLACED.items()}
        paths = Paths({**replaced, message: home / MESSAGE, **self.volumes.mounts(container)}, image)
        paths.write(home)
        env = environment.declared(kubelet.store, self.pod, container, kubelet.node)
        env = environment.on_this_machine(env, PORTS.of(self.pod), kubelet.hosts)
        hostname = self.pod["spec"].get("hostname") or self.pod["metadata"]["name"]
        base = environment.base(hostname, self._tools, image)
        env = {**base, **env}
        argv = environment.command(container, env, paths.rewrite)
        if not argv:
            raise ConfigError("no command specified", "CreateContainerError")
        env = {k: v if k == "PATH" else paths.rewrite(v) for k, v in env.items()}
        devices = GPUS.take(self._uid, int(requests(self.pod)[GPU]))
        limit = (container.get("resources") or {}).get("limits", {}).get("memory")
        workdir = Path(paths.locate(container.get("workingDir") or "/"))
        return RunSpec(
            argv=argv, env=open_mpi({**env, **devices}, home),
            cwd=str(workdir if container.get("workingDir") and workdir.is_dir() else image),
            log=str(home / f"{number}.log"), dir=str(home), memory=int(parse(limit)) if limit else None,
            session={**base, **devices}, environment=str(image / "etc" / "environment"),
        )  # fmt: skip

    # status and events

    def _ended(self, fact: ContainerFacts, ended: Ended) -> None:
        """Record the end of a run, with the container's termination message."""
        message = b""
        with contextlib.suppress(OSError):
            message = (self._directory / fact.name / MESSAGE).read_bytes()[:MESSAGE_BYTES]
        if not message and ended.code and fact.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = tail(self._directory / fact.name / f"{fact.restarts}.log")
        reason = "OOMKilled" if ended.oom else "Error" if ended.code else "Completed"
        began = fact.state.get("running", {}).get("startedAt") or now()
        self._terminated(fact, ended.code, reason, message.decode(errors="replace"), began)

    @staticmethod
    def _terminated(fact: ContainerFacts, code: int, reason: str, message: str, began: str) -> None:
        fact.state = {"terminated": {
            "exitCode": code, "reason": reason, **({"message": message} if message else {}),
            "startedAt": began, "finishedAt": now(), "containerID": fact.container_id,
        }}  # fmt: skip

    def _wait_for(self, fact: ContainerFacts, reason: str, message: str) -> None:
        fact.state = {"waiting": {"reason": reason, "message": message}}
        self.report()

    def report(self) -> None:
        """Write the status, unless the node is lost or the pod is deleted."""
        store, meta = self._kubelet.store, self.pod["metadata"]
        current = store.find(r.POD, meta["namespace"], meta["name"])
        if self._kubelet.online.is_set() and current and current["metadata"]["uid"] == self._uid:
            store.update_status(r.POD, current, podstatus.build(current, self.facts, now()))

    def _event(self, type_: str, reason: str, message: str, fact: ContainerFacts | None = None) -> None:
        if self._kubelet.online.is_set():
            kind = "initContainers" if any(fact is f for f in self.facts.init) else "containers"
            path = f"spec.{kind}{{{fact.name}}}" if fact else ""
            self._kubelet.recorder.event(self.pod, type_, reason, message, path)


def tail(log: Path) -> bytes:
    """The end of a container's log as a termination message: at most 80 lines and 2048 bytes."""
    output = b""
    with contextlib.suppress(OSError):
        for record in log.read_bytes().splitlines()[-LOG_LINES:]:
            _, _, tag, content = (*record.split(b" ", 3), b"", b"", b"")[:4]
            output += content + (b"\n" if tag == b"F" else b"")
    return output[-LOG_BYTES:]


def _duration(seconds: float) -> str:
    """Format a duration as Go does: 10s, 1m20s, 5m0s."""
    minutes, rest = divmod(seconds, 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{rest:g}s"
