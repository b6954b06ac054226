"""The cost and the exactness of following logs: our LogFollower, PodManager, kubectl and a raw reader.

    python benchmarks/logs.py [--lines 200000] [--seconds 15] [--only burst inspect steady cuts flood streams]

burst    a container has written --lines lines and ended: lines per second until all are read
inspect  the same, only ours: without inspecting the lines, with keeping those that a diagnosis needs, and with all; by
         turns, and also for five times as many lines, most of which are dropped as a flood
steady   2,000 lines a second for --seconds, all contenders at once; then the same with a cut of every connection
         each second: lines lost and repeated
cuts     five containers, ten cuts a second, only ours: at least a thousand cuts of streams
flood    a container that writes 50 MB/s and one that writes a line every 10 ms: memory, and the delay of the second
streams  300 streams in one process: the delay of a watch event and the duration of a delete at the same time

Each contender runs in a separate process. "To a list" doesn't include the logger. "To Airflow's logger" writes what a
task process writes to its supervisor; a separate process reads it with Airflow's own code and writes it to a file.
Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
from harness import Contender, Json, answers, contender, credentials, machine, memory, quantile, session, table

from ktrain_embedded import EmbeddedCluster

NAMESPACE = "default"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
RATE = 2000  # lines per second of the steady writer
WRITER = """
import os, sys, time
lines, rate, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
began, block = time.monotonic(), max(1, min(1000, int(rate / 100)))
for first in range(0, lines, block):
    now = time.monotonic()
    if (wait := began + first / rate - now) > 0:
        time.sleep(wait)
    numbers = range(first, min(first + block, lines))
    text = "".join([f"line {n:08} {time.monotonic():.6f} ".ljust(size - 1, "x") + "\\n" for n in numbers])
    data = memoryview(text.encode())
    while data:
        data = data[os.write(1, data):]
"""


# contenders: each reads the logs of one pod's containers and returns its measurements


async def raw(parameters: Json) -> Json:
    """The upper limit: reads bytes and counts line ends."""
    lines = 0
    async with (
        session(parameters["cluster"], read_bufsize=1 << 20) as http,
        http.get(f"{PODS}/{parameters['pod']}/log", params={"follow": "1", "timestamps": "1"}) as response,
    ):
        with contextlib.suppress(aiohttp.ClientError):
            async for chunk in response.content.iter_any():
                lines += chunk.count(b"\n")
    return {"lines": lines}


async def kubectl(parameters: Json) -> Json:
    """`kubectl logs -f`; its output is only counted."""
    command = ["kubectl", "--kubeconfig", parameters["cluster"]["kubeconfig"], "logs", "-f", parameters["pod"]]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, limit=1 << 20
    )
    assert process.stdout is not None
    lines = 0
    while chunk := await process.stdout.read(1 << 20):
        lines += chunk.count(b"\n")
    await process.wait()
    return {"lines": lines}


async def pod_manager(parameters: Json) -> Json:
    """PodManager, called as KubernetesPodOperator calls it."""
    from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
    from airflow.providers.cncf.kubernetes.utils.pod_manager import PodManager

    client = KubernetesHook(conn_id="kubernetes_default").core_v1_client
    manager = PodManager(kube_client=client)
    texts: list[str] = []
    if not parameters["logger"]:
        manager._log = Recorder(texts)
    pod = client.read_namespaced_pod(parameters["pod"], NAMESPACE)
    await asyncio.to_thread(manager.fetch_requested_container_logs, pod=pod, containers="main", follow_logs=True)
    return {"texts": texts}


class Recorder:
    """A logger that only keeps the lines of the container that PodManager logs."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def log(self, level: int, text: str) -> None:
        self._texts.append(text)

    def info(self, *args: object) -> None:
        pass

    debug = warning = exception = error = info


async def ours(parameters: Json) -> Json:
    """LogFollower, which gets changes of pods from an informer, as in `follow`."""
    from airflow_provider_ktrain.engine.watch.object_keys import by_name
    from airflow_provider_ktrain.engine.watch.wakeup import Wakeup

    news = Wakeup()
    texts: list[str] = []
    notices: list[str] = []
    alone = "containers" not in parameters
    options = {key: parameters[key] for key in ("inspector",) if key in parameters}

    def keep(line: Any) -> None:
        (notices if line.notice else texts).append(line.text if alone else f"{line.container} {line.text}")

    async with (
        follower(to_logger() if parameters["logger"] else keep, **options) as (follow, pods, api),
        pods.subscribe(key=by_name(parameters["pod"]), news=news) as subscription,
    ):
        while True:
            for pod, deleted in await changed(subscription, news):
                follow.observe(pod, deleted=deleted)
            phases = {pod["status"]["phase"] for pod in subscription.objects.values()}
            if phases & {"Succeeded", "Failed"}:
                break
        report = await follow.drain(300)
        requests = api.stats["logs"]
    return {"texts": texts, "notices": notices, "unread": len(report.unread), "requests": requests}


INSPECTED = ("no", "the last lines are kept", "and causes are looked for")


async def inspected(parameters: Json) -> Json:
    """LogFollower to a list, by turns with and without what a diagnosis inspects: CPU seconds of each round."""
    emitter: Any = importlib.import_module("airflow_provider_ktrain.engine.logs.emitter")
    collector: Any = importlib.import_module("airflow_provider_ktrain.engine.follow.evidence_collector")
    cursors = importlib.import_module("airflow_provider_ktrain.core.logs.cursor")
    collector.JobEvents = lambda context: None
    looks = {module: vars(module)[name] for module, name in ((emitter, "count_plain"), (collector, "is_report"))}
    see = collector.CauseScanner.see
    used: dict[str, list[float]] = {kind: [] for kind in INSPECTED}
    for _ in range(parameters["rounds"]):
        for kind in INSPECTED:
            is_whole = kind == INSPECTED[-1]
            emitter.count_plain = looks[emitter] if is_whole else lambda block, lines: 0
            collector.is_report = looks[collector] if is_whole else lambda text: False
            collector.CauseScanner.see = see if is_whole else lambda *args: None
            context = SimpleNamespace(api=None, state=None, cursor=cursors.Cursor(), log=None)
            recorder = collector.EvidenceCollector(context).recorder
            began = cpu_seconds()
            await ours(parameters | ({} if kind == "no" else {"inspector": recorder}))
            used[kind].append(cpu_seconds() - began)
    return {"used": used, "lines": parameters["lines"]}


async def changed(subscription: Any, news: Any) -> list[tuple[Any, bool]]:
    """The changed objects of a subscription that sets `news`, as soon as there are some, and whether it was deleted."""
    while (deleted := subscription.take()) is None:
        await news.wait()
    uids = [uid for uid in subscription.take_changed() if uid in subscription.objects]
    return [*((pod, True) for pod in deleted), *((subscription.objects[uid], False) for uid in uids)]


@contextlib.asynccontextmanager
async def follower(sink: Callable[[Any], None], **options: Any) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A LogFollower and the informer of the namespace's pods, both on one Api, and this Api, as in a triggerer."""
    from airflow_provider_ktrain.core.kinds import PYTORCHJOB
    from airflow_provider_ktrain.engine.logs.follower import LogFollower
    from airflow_provider_ktrain.engine.watch.informer import shared_informer
    from airflow_provider_ktrain.hooks.training import TrainingHook

    async with TrainingHook().api() as api:
        following = LogFollower(api, sink, kind=PYTORCHJOB, **options)
        try:
            yield following, shared_informer(api, PODS), api
        finally:
            await following.close()


def to_logger() -> Callable[[Any], None]:
    """The sink with which a task logs the lines of its replicas."""
    import structlog

    from airflow_provider_ktrain.compat import storable_log
    from airflow_provider_ktrain.core.kinds import PYTORCHJOB
    from airflow_provider_ktrain.engine.logs.line_logger import LineLogger

    return LineLogger(storable_log(structlog.get_logger("airflow.task.operators.train")), PYTORCHJOB)


async def logger_alone(parameters: Json) -> Json:
    """Airflow's logger with the same records, without a cluster."""
    import structlog

    log, padding = structlog.get_logger("airflow.task.operators.train"), "x" * 60
    for n in range(parameters["lines"]):
        written = f"2026-11-23T10:00:00.{n:06}Z"
        log.info(f"[Worker 0] line {n:08} {0:.6f} {padding}", logger="Worker 0", timestamp=written)
    return {}


async def flood(parameters: Json) -> Json:
    """Two containers; one writes more than the rate limit passes on."""
    from airflow_provider_ktrain.engine.watch.wakeup import Wakeup

    late: list[float] = []
    flooded = 0
    notices: list[str] = []

    def sink(line: Any) -> None:
        nonlocal flooded
        if line.notice:
            notices.append(line.text)
        elif line.pod == "quiet":
            late.append(time.monotonic() - float(line.text.split()[2]))
        else:
            flooded += 1

    peak = memory()
    news = Wakeup()
    async with follower(sink) as (follow, pods, _), pods.subscribe(news=news) as subscription:
        until = time.monotonic() + parameters["seconds"]
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    for pod, _ in await changed(subscription, news):
                        follow.observe(pod)
            peak = max(peak, memory())
        report = follow.report()
        tally = next(t for (pod, _), t in report.containers.items() if pod == "flood")
    return {
        "before": parameters["rss"],
        "peak": peak,
        "emitted": flooded,
        "dropped": tally.dropped,
        "dropped bytes": tally.dropped_bytes,
        "notices": notices[:3],
        "late p50": quantile(late, 0.5),
        "late p99": quantile(late, 0.99),
        "quiet lines": len(late),
    }


async def streams(parameters: Json) -> Json:
    """Enough followers for 300 streams, and a watch and deletes in the same process."""
    from airflow_provider_ktrain.core.kinds import PYTORCHJOB
    from airflow_provider_ktrain.engine.logs.follower import LogFollower
    from airflow_provider_ktrain.engine.watch.wakeup import Wakeup

    news = Wakeup()
    counted: Counter[str] = Counter()
    noticed: list[float] = []
    deleted: list[float] = []
    late: list[float] = []

    def sink(line: Any) -> None:
        counted["lines"] += 1

    async def lag() -> None:
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - due)

    async with (
        follower(sink) as (_, pods, api),
        pods.subscribe(news=news) as subscription,
        session(parameters["cluster"]) as http,
    ):
        while sum(p["status"]["phase"] == "Running" for p in subscription.objects.values()) < parameters["pods"]:
            await changed(subscription, news)
        copies = [LogFollower(api, sink, kind=PYTORCHJOB) for _ in range(parameters["copies"])]
        for copy in copies:
            for pod in subscription.objects.values():
                copy.observe(pod)
        await asyncio.sleep(3)
        probing = asyncio.create_task(lag())
        used, began, before = time.process_time(), time.monotonic(), counted["lines"]
        for n in range(30):
            spec = {"nodeSelector": {"nobody": "here"}, "containers": [{"name": "main", "image": "none:1"}]}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"probe-{n}"}, "spec": spec}
            sent = time.monotonic()
            async with http.post(PODS, json=body) as response:
                assert response.status == 201, await response.text()
            while f"probe-{n}" not in {o["metadata"]["name"] for o in subscription.objects.values()}:
                await changed(subscription, news)
            noticed.append(time.monotonic() - sent)
            sent = time.monotonic()
            await api.request("DELETE", f"{PODS}/probe-{n}")
            deleted.append(time.monotonic() - sent)
            await asyncio.sleep(0.3)
        took, used = time.monotonic() - began, time.process_time() - used
        probing.cancel()
        for copy in copies:
            await copy.close()
    return {
        "streams": api.stats["logs"],
        "lines/s": (counted["lines"] - before) / took,
        "CPU %": 100 * used / took,
        "watch p50": quantile(noticed, 0.5),
        "watch max": max(noticed),
        "delete p50": quantile(deleted, 0.5),
        "delete max": max(deleted),
        "lag p99": quantile(late, 0.99),
        "lag max": max(late),
    }


CONTENDERS: dict[str, Callable[[Json], Awaitable[Json]]] = {
    "raw aiohttp reader": raw,
    "kubectl logs -f": kubectl,
    "LogFollower": ours,
    "PodManager": pod_manager,
    "lines from a loop": logger_alone,
    "flood": flood,
    "streams": streams,
    "inspected": inspected,
}

IMPORTED = (
    "airflow.providers.cncf.kubernetes.utils.pod_manager",
    "kubernetes_asyncio",
    "structlog",
    "airflow_provider_ktrain.engine.logs.follower",
    "airflow_provider_ktrain.engine.watch.informer",
)  # imported by every contender before the measurement


async def contend(parameters: Json) -> None:
    """The process of a contender: prepare, wait for the start, run, and report."""
    for module in IMPORTED:
        importlib.import_module(module)
    say = answers()
    with task_logger(parameters) if parameters["logger"] else contextlib.nullcontext():
        say({})
        await asyncio.to_thread(sys.stdin.readline)
        used, began = cpu_seconds(), time.monotonic()
        answer = await CONTENDERS[parameters["name"]]({**parameters, "rss": memory()})
        answer |= {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - used, "rss": memory(key="VmHWM")}
    if parameters["logger"]:
        answer["texts"] = written(parameters["logger"])
    if "texts" in answer:
        answer |= exactness(answer.pop("texts"), parameters["lines"], parameters.get("containers", 1))
    say(answer)


def cpu_seconds() -> float:
    """CPU seconds of this process, with all its threads and the children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def exactness(texts: Iterable[str], lines: int, containers: int = 1) -> Json:
    """How many numbered lines arrived, are missing, and were repeated. Lines may begin with their container's name."""
    seen = Counter(text[: at + 13] for text in texts if (at := text.find("line ")) >= 0)
    return {
        "lines": seen.total(),
        "lost": containers * lines - len(seen),
        "repeated": seen.total() - len(seen),
    }


# Airflow's logger as in a task process


@contextlib.contextmanager
def task_logger(parameters: Json) -> Any:
    """Send log output to a process that handles it as a task's supervisor does."""
    from airflow.sdk.execution_time.supervisor import _configure_logs_over_json_channel

    ours_, theirs = socket.socketpair()
    supervisor = subprocess.Popen(
        [sys.executable, __file__, "--supervise", parameters["logger"]],
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
    )
    theirs.close()
    ours_.recv(1)  # it has finished its imports
    _configure_logs_over_json_channel(ours_.detach())
    try:
        yield
    finally:
        import structlog

        structlog.reset_defaults()
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                    socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_WR)
        supervisor.wait()


def supervise(path: str) -> None:
    """The supervisor's work for a task's log: read, unpack, mask, write to the file."""
    import structlog
    from airflow.sdk.execution_time.supervisor import make_buffered_socket_reader, process_log_messages_from_subprocess
    from airflow.sdk.log import logging_processors

    with open(path, "ab") as file, socket.socket(fileno=0) as channel:
        logger = structlog.wrap_logger(
            structlog.BytesLogger(file), processors=logging_processors(json_output=True), logger_name="task"
        ).bind()
        read, _ = make_buffered_socket_reader(
            process_log_messages_from_subprocess((logger,)), on_close=lambda sock: None
        )
        channel.send(b".")
        while read(channel):
            pass


def written(path: str) -> list[str]:
    """The texts in a task's log file."""
    return [json.loads(line)["event"] for line in Path(path).read_text().splitlines()]


# the stage


class Stage:
    """Pods that write logs on the embedded cluster."""

    def __init__(self, cluster: EmbeddedCluster, http: Any, directory: Path) -> None:
        self.cluster = cluster
        self.reach = credentials(cluster)
        self._http = http
        self._directory = directory

    async def write(
        self, pod: str, lines: int, rate: float, size: int = 100, containers: Iterable[str] = ("main",)
    ) -> None:
        """Start a pod in which each container writes this many lines, at a given rate per second."""
        command = [sys.executable, "-S", "write.py", str(lines), str(rate), str(size)]
        spec = {
            "restartPolicy": "Never",
            "containers": [
                {"name": name, "image": "writer:1", "imagePullPolicy": "IfNotPresent", "command": command}
                for name in containers
            ],
        }
        labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "0"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "labels": labels}, "spec": spec}
        async with self._http.post(PODS, json=body) as response:
            assert response.status == 201, await response.text()

    async def phase(self, pod: str, phase: str) -> None:
        """Wait for a phase of the pod, also while connections are cut."""
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with self._http.get(f"{PODS}/{pod}") as response:
                    if (await response.json()).get("status", {}).get("phase") == phase:
                        return
            await asyncio.sleep(0.1)

    async def remove(self, *pods: str) -> None:
        for pod in pods:
            async with self._http.delete(f"{PODS}/{pod}", params={"gracePeriodSeconds": "0"}):
                pass

    @contextlib.contextmanager
    def contender(self, name: str, *, logger: bool = False, **parameters: Any) -> Any:
        file = tempfile.mktemp(dir=self._directory) if logger else ""
        level = "INFO" if logger else "WARNING"
        with contender(__file__, {"name": name, "logger": file, **parameters}, self.reach, log_level=level) as process:
            yield process

    def cut(self) -> None:
        """Cut every connection."""
        self.cluster.admin("drop", seconds=0.01)


async def go(process: Contender) -> Json:
    answer = await asyncio.to_thread(process.ask, go=True)
    print(json.dumps(answer), file=sys.stderr, flush=True)
    return answer


LOGGER = "to Airflow's logger"
HEAD = ["follower", "lines/s", "CPU s per 100,000 lines", "lost", "repeated", "peak MiB"]


def row(name: str, found: Json) -> list[Any]:
    lines = found["lines"]
    return [
        name, lines / found["seconds"], found["cpu"] / max(lines, 1) * 1e5,
        found.get("lost"), found.get("repeated"), found["rss"],
    ]  # fmt: skip


async def burst(stage: Stage, args: argparse.Namespace) -> str:
    await stage.write("burst", args.lines, 1e9)
    await stage.phase("burst", "Succeeded")
    rows = []
    for name, where in (
        ("raw aiohttp reader", ""),
        ("kubectl logs -f", ""),
        ("LogFollower", "to a list"),
        ("PodManager", "to a list"),
        ("lines from a loop", LOGGER),
        ("LogFollower", LOGGER),
        ("PodManager", LOGGER),
    ):
        with stage.contender(name, logger=where == LOGGER, pod="burst", lines=args.lines) as process:
            rows.append(row(f"{name} {where}".strip(), await go(process)))
    await stage.remove("burst")
    return f"A burst of {args.lines:,} lines of 100 bytes\n\n" + table(HEAD, rows)


async def inspect(stage: Stage, args: argparse.Namespace) -> str:
    rows = []
    for lines, what in ((args.lines, "all logged"), (5 * args.lines, "most dropped")):
        await stage.write("inspect", lines, 1e9)
        await stage.phase("inspect", "Succeeded")
        with stage.contender("inspected", pod="inspect", lines=lines, rounds=args.rounds) as process:
            used = (await go(process))["used"]
        await stage.remove("inspect")
        for kind, found in used.items():
            shares = sorted(one / base - 1 for one, base in zip(found, used["no"], strict=True))
            cost = [quantile([one / lines * 1e5 for one in found], q) for q in (0, 0.5, 1)]
            rows.append([what, lines, kind, *cost, *(f"{100 * shares[n]:+.0f}%" for n in (0, len(shares) // 2, -1))])
    head = ["lines", "number", "inspected", "CPU s per 100,000 lines: least", "median", "most"]
    head += ["beside the same round without: least", "median", "most"]
    return f"LogFollower to a list, {args.rounds} rounds\n\n" + table(head, rows)


async def steady(stage: Stage, args: argparse.Namespace) -> str:
    sections = []
    for cuts in (False, True):
        pod, lines = f"steady-{int(cuts)}", RATE * int(args.seconds)
        with contextlib.ExitStack() as stack:
            names = ["raw aiohttp reader", "kubectl logs -f", "LogFollower", "PodManager"]
            processes = [stack.enter_context(stage.contender(name, pod=pod, lines=lines)) for name in names]
            await stage.write(pod, lines, RATE)
            await stage.phase(pod, "Running")
            running = [asyncio.create_task(go(process)) for process in processes]
            ending = asyncio.create_task(stage.phase(pod, "Succeeded"))
            while cuts and not ending.done():
                await asyncio.sleep(1)
                await asyncio.to_thread(stage.cut)
            found = await asyncio.gather(*running)
        rows = [row(name, {"lost": lines - f["lines"], **f}) for name, f in zip(names, found, strict=True)]
        how = "with a cut of every connection each second" if cuts else "without cuts"
        sections.append(f"{RATE:,} lines/s for {args.seconds:.0f} s, {how}\n\n" + table(HEAD, rows))
        await stage.remove(pod)
    return "\n\n".join(sections)


async def cuts(stage: Stage, args: argparse.Namespace) -> str:
    containers, rate, pause = 5, 400, 0.1
    count = 300  # each cuts up to five streams
    lines = int(rate * pause * count * 1.3)
    parameters: Json = {"pod": "cuts", "lines": lines, "containers": containers}
    with stage.contender("LogFollower", **parameters) as process:
        await stage.write("cuts", lines, rate, containers=[f"main-{n}" for n in range(containers)])
        await stage.phase("cuts", "Running")
        running = asyncio.create_task(go(process))
        for _ in range(count):
            await asyncio.sleep(pause)
            await asyncio.to_thread(stage.cut)
        found = await running
    await stage.remove("cuts")
    head = [
        "lines",
        "times that all connections were cut",
        "requests for logs",
        "lost",
        "repeated",
        "gaps reported",
    ]
    row = [found["lines"], count, found["requests"], found["lost"], found["repeated"], len(found["notices"])]
    return f"{containers} containers of {rate} lines/s each, {1 / pause:.0f} cuts a second\n\n" + table(head, [row])


async def flood_scene(stage: Stage, args: argparse.Namespace) -> str:
    size, rate = 1000, 50_000
    with stage.contender("flood", seconds=args.seconds) as process:
        await stage.write("quiet", 10**9, 100)
        await stage.write("flood", 10**9, rate, size)
        await stage.phase("flood", "Running")
        found = await go(process)
    await stage.remove("quiet", "flood")
    received = (found["emitted"] * size + found["dropped bytes"]) / found["seconds"] / 1e6
    head = [
        "flood MB/s received", "emitted MB/s", "lines dropped and counted", "CPU %", "MiB before", "peak MiB",
        "lines of the quiet container", "delay p50 ms", "p99 ms",
    ]  # fmt: skip
    row = [
        received, found["emitted"] * size / found["seconds"] / 1e6, found["dropped"],
        100 * found["cpu"] / found["seconds"], found["before"], found["peak"],
        found["quiet lines"], 1000 * found["late p50"], 1000 * found["late p99"],
    ]  # fmt: skip
    notice = found["notices"][0] if found["notices"] else ""
    return f"A container that writes {size * rate / 1e6:.0f} MB/s beside one that writes a line every 10 ms\n\n" + (
        f"{table(head, [row])}\n\nThe first message about dropped lines: `{notice}`"
    )


async def streams_scene(stage: Stage, args: argparse.Namespace) -> str:
    pods, containers, copies = 10, 3, 10
    names = [f"stream-{n}" for n in range(pods)]
    for name in names:
        await stage.write(name, 10**9, 10, containers=[f"main-{n}" for n in range(containers)])
    for name in names:
        await stage.phase(name, "Running")
    with stage.contender("streams", pods=pods, copies=copies) as process:
        found = await go(process)
    await stage.remove(*names)
    keys = ("watch p50", "watch max", "delete p50", "delete max", "lag p99", "lag max")
    head = ["streams", "lines/s", "CPU %", "peak MiB", *(f"{key} ms" for key in keys)]
    row = [found["streams"], found["lines/s"], found["CPU %"], found["rss"], *(1000 * found[key] for key in keys)]
    return f"{pods * containers * copies} streams in one process, 10 lines/s each\n\n" + table(head, [row])


SCENES: dict[str, Callable[[Stage, argparse.Namespace], Awaitable[str]]] = {
    "burst": burst, "inspect": inspect, "steady": steady, "cuts": cuts, "flood": flood_scene, "streams": streams_scene,
}  # fmt: skip


async def run(args: argparse.Namespace) -> None:
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "write.py").write_text(WRITER)
        with EmbeddedCluster(images={"writer:1": directory}, resources={"pods": "500", "cpu": "500"}) as cluster:
            async with session(credentials(cluster)) as http:
                for name in args.only or SCENES:
                    print(await SCENES[name](Stage(cluster, http, Path(directory)), args), end="\n\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=200_000, help="lines of the burst")
    parser.add_argument("--rounds", type=int, default=7, help="of the scene inspect")
    parser.add_argument("--seconds", type=float, default=15, help="duration of the steady writers and the flood")
    parser.add_argument("--only", nargs="+", choices=SCENES)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--supervise", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.supervise:
        supervise(args.supervise)
    else:
        asyncio.run(contend(json.loads(args.contender)) if args.contender else run(args))


if __name__ == "__main__":
    main()
