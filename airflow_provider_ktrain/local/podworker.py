"""One pod's life on its node, from the binding to the last sign of it: what the kubelet's pod worker does.

`_work` is the straight way: volumes, init containers one by one, then all containers with their restarts. Whatever ends
a pod early (deletion, eviction, deadline) cancels that, stops what runs and reports the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from airflow_provider_ktrain.local import environment, podstatus
from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.environment import ConfigError, Paths, Ports
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.exec import Tools
from airflow_provider_ktrain.local.images import ImageNotFound, Images
from airflow_provider_ktrain.local.node import GPU, Gpus
from airflow_provider_ktrain.local.podstatus import ContainerFacts
from airflow_provider_ktrain.local.quantity import parse
from airflow_provider_ktrain.local.runtime import Ended, Run, RunSpec, StartError
from airflow_provider_ktrain.local.scheduler import requests
from airflow_provider_ktrain.local.store import Obj, Store, now
from airflow_provider_ktrain.local.volumes import MountError, Token, Volumes

EPOCH = "1970-01-01T00:00:00Z"
MESSAGE_BYTES, MESSAGE_LOG_BYTES, MESSAGE_LOG_LINES = 4096, 2048, 80
DEADLINE_MESSAGE = "Pod was active on the node longer than the specified deadline"
FORCED_GRACE = 1.0  # seconds for a pod whose object is already gone


@dataclass(frozen=True)
class Timing:
    """The kubelet's clocks in seconds, with the real ones as defaults but for `pull_error`."""

    backoff: float = 10.0  # before a container's second restart and an image's second pull; doubles each time
    backoff_max: float = 300.0
    sync: float = 10.0  # between tries to create a container whose configuration is wrong
    mount: float = 0.5  # before the second try to mount; doubles each time
    mount_max: float = 122.0
    pull_error: float = 2.0  # for which ErrImagePull is shown before ImagePullBackOff; with the real one, up to `sync`
    cleanup: float = 0.2  # from the end of a pod that is being deleted until it is gone: the real one needs about 0.7
    keep_logs: float = 10.0  # for which the directory of a pod outlives its object
    unreachable: float = 300.0  # after which the pods of a lost node are deleted


@dataclass(frozen=True)
class Surroundings:
    """What a pod finds on its node."""

    store: Store
    recorder: EventRecorder
    node: str
    root: Path
    images: Images
    ports: Ports
    gpus: Gpus
    timing: Timing
    token: Token | None
    tools: Tools
    online: asyncio.Event = field(default_factory=asyncio.Event)


def backoff(failures: int, timing: Timing) -> float:
    """Seconds to wait before restart number `failures`: none before the first, then 10, 20, 40, ..."""
    return min(timing.backoff * 2 ** (failures - 2), timing.backoff_max) if failures > 1 else 0.0


class PodWorker:
    """Runs one pod. `task` ends when the pod's object is gone and nothing of it runs."""

    def __init__(self, here: Surroundings, pod: Obj, ip: str, host_ip: str) -> None:
        self.pod = pod
        self.directory: Path = here.root / "pods" / pod["metadata"]["uid"]
        self.volumes = Volumes(here.store, pod, self.directory / "volumes", here.token)
        self.configured = asyncio.Event()  # set when a ConfigMap or Secret of the namespace changed
        self._here = here
        self._ip = ip
        self._runs: dict[str, Run] = {}
        self._halted = asyncio.Event()
        self._removed = asyncio.Event()
        self._grace = float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        self.facts = podstatus.new(pod, pod.get("status", {}).get("startTime") or now(), host_ip)
        self.task = asyncio.create_task(self._live())
        limit = pod["spec"].get("activeDeadlineSeconds")
        if limit is not None:
            asyncio.get_running_loop().call_later(limit, self._deadline)

    # what happens to it

    def changed(self, pod: Obj) -> None:
        """The object changed: a deletion begins, or its grace period got shorter."""
        self.pod = pod
        meta = pod["metadata"]
        if "deletionTimestamp" not in meta:
            return
        grace = float(meta.get("deletionGracePeriodSeconds") or 0)
        if self._halted.is_set() and grace < self._grace:
            for run in self._runs.values():
                run.stop(grace)
        self._grace = min(grace, self._grace)
        self._removed.set()
        self._halted.set()
        if self.facts.finished and not grace and not meta.get("finalizers"):
            self._remove()

    def gone(self) -> None:
        """The object is gone, and with it the pod's right to run."""
        self._grace = min(self._grace, FORCED_GRACE)
        self._removed.set()
        self._halted.set()

    def end(self, reason: str, message: str, grace: float | None = None) -> None:
        """End the pod for a reason of the kubelet's own: phase Failed with `reason` and `message`."""
        if self._halted.is_set() or self.facts.finished:
            return
        self.facts.reason, self.facts.message = reason, message
        self._grace = self._grace if grace is None else grace
        self._report()  # the conditions tell at once, the phase when all is over
        self._halted.set()

    def _deadline(self) -> None:
        if not self._halted.is_set() and not self.facts.finished:
            self._event("Normal", "DeadlineExceeded", DEADLINE_MESSAGE)
            self.end("DeadlineExceeded", DEADLINE_MESSAGE)

    def kill_all(self) -> None:
        """What the loss of the machine does."""
        for run in self._runs.values():
            run.stop(0)

    # its life

    async def _live(self) -> None:
        work = asyncio.create_task(self._work())
        halted = asyncio.create_task(self._halted.wait())
        try:
            await asyncio.wait({work, halted}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            await _cancel(work)
            await self._stop()
            await self._here.online.wait()
            self._report()
            self.facts.finished, self.facts.sandbox = True, False
            self._report()
            self._here.gpus.free(self.pod["metadata"]["uid"])
            if self._removed.is_set():  # while it ran: operators see how it ended before it goes
                await asyncio.sleep(self._here.timing.cleanup)
            await self._removed.wait()
            self._remove()
        finally:
            await _cancel(work)
            await _cancel(halted)
            self.kill_all()
            for run in self._runs.values():
                await run.ended()
            self._here.gpus.free(self.pod["metadata"]["uid"])

    def discard(self) -> None:
        """Remove the pod's directory, logs included."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _remove(self) -> None:
        meta = self.pod["metadata"]
        with contextlib.suppress(ApiError):
            self._here.store.delete(r.POD, meta["namespace"], meta["name"], grace=0, uid=meta["uid"])

    async def _stop(self) -> None:
        """Stop what runs, within the grace period."""
        facts = [*self.facts.init, *self.facts.containers]
        live = [(f, self._runs[f.spec["name"]]) for f in facts if not f.terminated and f.spec["name"] in self._runs]
        for fact, run in live:
            if "running" in fact.state:
                self._event("Normal", "Killing", f"Stopping container {fact.spec['name']}", fact)
            run.stop(self._grace)
        for fact, run in live:
            self._terminated(fact, run, await run.ended())

    async def _work(self) -> None:
        self._here.tools.install(self.pod, self._tools)
        self._report()
        await self._mount()
        self.facts.sandbox = True
        self._report()
        for fact in self.facts.init:
            if not await self._run(fact, init=True):
                return
        for fact in self.facts.containers if self.facts.init else ():
            fact.state = {"waiting": {"reason": "PodInitializing"}}
        if self.facts.init:
            self._report()
        await asyncio.gather(*(self._run(fact) for fact in self.facts.containers))

    async def _mount(self) -> None:
        delay = self._here.timing.mount
        while True:
            try:
                self.volumes.set_up()
                return
            except MountError as error:
                self._event("Warning", "FailedMount", str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, self._here.timing.mount_max)

    async def _run(self, fact: ContainerFacts, init: bool = False) -> bool:
        """Run a container until it needs no other run: whether it succeeded."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        policy = "OnFailure" if init and policy == "Always" else policy
        failures, timing = 0, self._here.timing
        while True:
            image = await self._image(fact)
            began = time.monotonic()
            ended = await self._once(fact, image)
            await self._here.online.wait()
            self._report()
            if policy == "Never" or (policy == "OnFailure" and ended.code == 0):
                return ended.code == 0
            failures = 1 if time.monotonic() - began > 2 * timing.backoff_max else failures + 1
            await self._back_off(fact, backoff(failures, timing))

    async def _back_off(self, fact: ContainerFacts, delay: float) -> None:
        if not delay:
            return
        name = fact.spec["name"]
        pod = f"{self.pod['metadata']['name']}_{self.pod['metadata']['namespace']}({self.pod['metadata']['uid']})"
        self._event("Warning", "BackOff", f"Back-off restarting failed container {name} in pod {pod}", fact)
        fact.last_state = fact.state
        message = f"back-off {_duration(delay)} restarting failed container={name} pod={pod}"
        self._wait_for(fact, "CrashLoopBackOff", message)
        await asyncio.sleep(delay)

    async def _image(self, fact: ContainerFacts) -> Path | None:
        """The image's directory, when it is there at last."""
        image, policy = fact.spec["image"], fact.spec.get("imagePullPolicy", "IfNotPresent")
        tries, timing = 0, self._here.timing
        while True:
            try:
                directory = self._here.images.directory(image)
            except ImageNotFound as error:
                if policy == "Never":
                    message = f'Container image "{image}" is not present with pull policy of Never'
                    self._event("Warning", "ErrImageNeverPull", message, fact)
                    self._event("Warning", "Failed", "Error: ErrImageNeverPull", fact)
                    self._wait_for(fact, "ErrImageNeverPull", message)
                    await asyncio.sleep(timing.sync)
                    continue
                tries += 1
                await self._pull_failed(fact, str(error), backoff(tries + 1, timing))
                continue
            if policy == "Always":
                self._event("Normal", "Pulling", f'Pulling image "{image}"', fact)
                self._event(
                    "Normal", "Pulled", f'Successfully pulled image "{image}" in 0s (0s including waiting)', fact
                )
            else:
                present = f'Container image "{image}" already present on machine and can be accessed by the pod'
                self._event("Normal", "Pulled", present, fact)
            return directory

    async def _pull_failed(self, fact: ContainerFacts, why: str, delay: float) -> None:
        image, shown = fact.spec["image"], min(self._here.timing.pull_error, delay / 2)
        self._event("Normal", "Pulling", f'Pulling image "{image}"', fact)
        self._event("Warning", "Failed", f'Failed to pull image "{image}": {why}', fact)
        self._event("Warning", "Failed", "Error: ErrImagePull", fact)
        self._wait_for(fact, "ErrImagePull", why)
        await asyncio.sleep(shown)
        self._event("Normal", "BackOff", f'Back-off pulling image "{image}"', fact)
        self._event("Warning", "Failed", "Error: ImagePullBackOff", fact)
        self._wait_for(fact, "ImagePullBackOff", f'Back-off pulling image "{image}": ErrImagePull: {why}')
        await asyncio.sleep(delay - shown)

    async def _once(self, fact: ContainerFacts, image: Path | None) -> Ended:
        """One run of a container, from its creation to its end."""
        spec = await self._configured(fact, image)
        if fact.container_id:
            fact.restarts += 1
            fact.last_state = fact.state if fact.terminated else fact.last_state
        name = fact.spec["name"]
        spec = self._with_log(spec, fact)
        fact.container_id = podstatus.container_id(self.pod["metadata"]["uid"], name, fact.restarts)
        self._event("Normal", "Created", "Container created", fact)
        run = self._runs[name] = Run(spec)
        try:
            await run.started()
        except StartError as error:
            self._event("Warning", "Failed", f"Error: {error}", fact)
            self._runs.pop(name)
            fact.state = {"terminated": {
                "exitCode": 128, "reason": "StartError", "message": str(error), "startedAt": EPOCH,
                "finishedAt": now(), "containerID": fact.container_id,
            }}  # fmt: skip
            return Ended(128)
        self._event("Normal", "Started", "Container started", fact)
        fact.state, fact.ready = {"running": {"startedAt": now()}}, True
        self.facts.ip = self._ip
        self._report()
        ended = await run.ended()
        self._terminated(fact, run, ended)
        return ended

    async def _configured(self, fact: ContainerFacts, image: Path | None) -> RunSpec:
        """What to run, when all that it is made of is there at last."""
        while True:
            self.configured.clear()
            try:
                return self._spec(fact.spec, image)
            except ConfigError as error:
                reason, message = error.reason, str(error)
            self._event("Warning", "Failed", f"Error: {message}", fact)
            self._wait_for(fact, reason, message)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.configured.wait(), self._here.timing.sync)

    def _spec(self, container: Obj, image: Path | None) -> RunSpec:
        here, home = self._here, self.directory / container["name"]
        home.mkdir(parents=True, exist_ok=True)
        container = here.images.entrypoint(container, image)
        if image is None:
            image = home / "root"
            image.mkdir(exist_ok=True)
        message = container.get("terminationMessagePath", "/dev/termination-log")
        (home / "termination-log").write_bytes(b"")
        paths = Paths({message: home / "termination-log", **self.volumes.mounts(container)}, image)
        node = here.store.get(r.NODE, None, here.node)
        env = environment.declared(here.store, self.pod, container, node)
        env = environment.on_this_machine(env, here.ports.of(self.pod))
        hostname = self.pod["spec"].get("hostname") or self.pod["metadata"]["name"]
        env = {**environment.base(hostname, self._tools, image), **env}
        argv = environment.command(container, env, paths.rewrite)
        if not argv:
            raise ConfigError("no command specified", "CreateContainerError")
        env = {k: v if k == "PATH" else paths.rewrite(v) for k, v in env.items()}
        env["CUDA_VISIBLE_DEVICES"] = here.gpus.take(self.pod["metadata"]["uid"], self._gpus)
        env = here.tools.environment(env, home)
        limit = (container.get("resources") or {}).get("limits", {}).get("memory")
        workdir = Path(paths.locate(container.get("workingDir") or "/"))
        return RunSpec(
            argv=[here.tools.replaces(self._tools, argv[0]), *argv[1:]], env=env,
            cwd=str(workdir if container.get("workingDir") and workdir.is_dir() else image),
            log="", dir=str(home), memory=int(parse(limit)) if limit else None,
        )  # fmt: skip

    @property
    def _tools(self) -> Path:
        return self.directory / "bin"

    @property
    def _gpus(self) -> int:
        return int(requests(self.pod).get(GPU, 0))

    def _with_log(self, spec: RunSpec, fact: ContainerFacts) -> RunSpec:
        home = Path(spec.dir)
        for old in home.glob(f"{fact.restarts - 2}.log*"):
            old.unlink()
        return RunSpec(**{**vars(spec), "log": str(home / f"{fact.restarts}.log")})

    # what it says

    def _terminated(self, fact: ContainerFacts, run: Run, ended: Ended) -> None:
        began = fact.state.get("running", {}).get("startedAt") or now()
        reason = "OOMKilled" if ended.oom else "Completed" if ended.code == 0 else "Error"
        message = termination_message(fact.spec, Path(run.spec.dir, "termination-log"), Path(run.spec.log), ended.code)
        fact.ready = False
        fact.state = {"terminated": {
            "exitCode": ended.code, "reason": reason, **({"message": message} if message else {}),
            "startedAt": began, "finishedAt": now(), "containerID": fact.container_id,
        }}  # fmt: skip

    def _wait_for(self, fact: ContainerFacts, reason: str, message: str) -> None:
        fact.state, fact.ready = {"waiting": {"reason": reason, "message": message}}, False
        self._report()

    def _report(self) -> None:
        """Write the status, unless the node is cut off or the pod is gone."""
        meta = self.pod["metadata"]
        current = self._here.store.find(r.POD, meta["namespace"], meta["name"])
        if self._here.online.is_set() and current and current["metadata"]["uid"] == meta["uid"]:
            self._here.store.update_status(r.POD, current, podstatus.build(current, self.facts, now()))

    def _event(self, type_: str, reason: str, message: str, fact: ContainerFacts | None = None) -> None:
        if self._here.online.is_set():
            kind = "initContainers" if any(fact is f for f in self.facts.init) else "containers"
            path = f"spec.{kind}{{{fact.spec['name']}}}" if fact else ""
            self._here.recorder.event(self.pod, type_, reason, message, path)


def termination_message(container: Obj, file: Path, log: Path, code: int) -> str:
    """What a container left to say: its file, or under FallbackToLogsOnError the end of the log of a failure."""
    with contextlib.suppress(OSError):
        if said := file.read_bytes()[:MESSAGE_BYTES]:
            return said.decode(errors="replace")
    if code == 0 or container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        return ""
    with contextlib.suppress(OSError), log.open("rb") as records:
        records.seek(max(0, log.stat().st_size - 64 * 1024))
        lines = [record.split(b" ", 3) for record in records.read().splitlines()]
        text = b"".join(fields[3] + (b"\n" if fields[2] == b"F" else b"") for fields in lines if len(fields) == 4)
        return b"".join(text.splitlines(keepends=True)[-MESSAGE_LOG_LINES:])[-MESSAGE_LOG_BYTES:].decode(
            errors="replace"
        )
    return ""


def _duration(seconds: float) -> str:
    """As Go writes it: 10s, 1m20s, 5m0s."""
    whole = datetime.timedelta(seconds=seconds)
    minutes, rest = divmod(whole.total_seconds(), 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{rest:g}s"


async def _cancel(task: asyncio.Task[object] | asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
