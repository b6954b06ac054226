"""The cost of waiting for a thousand jobs, and the delay until their end is noticed: our trigger and polling triggers.

    python benchmarks/waiting.py [--jobs 1000] [--seconds 10] [--changes 100] [--only NAME ...]

Each contender waits in a separate process and event loop for idle jobs on the same embedded cluster. First the jobs
don't change for `--seconds`. Then `--changes` of the jobs succeed, one after the other.

CPU, memory and requests are those of the contender's process while the jobs don't change. The CPU of a process in which
nothing waits is subtracted. Detection is the time from before the change is sent until the trigger fires, so it
includes the server's own work. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import aiohttp
from harness import Contender, Json, answers, contender, credentials, machine, memory, quantile, session, table

from ktrain_embedded import EmbeddedCluster

NAMESPACE = "default"
PROBE = 0.005  # seconds between measurements of the loop lag
SETTLE = 12.0  # seconds from the start of the triggers to the start of the measurement: ours fires no event before 10 s
SLOW_START = 60.0  # seconds within which each polling trigger must have requested each job once
POLL = 10.0  # poll interval of the plain poller in seconds
PATIENCE = 30.0  # seconds after the last change; a trigger that has not fired by then counts as missed
TRAINING = ("/apis/kubeflow.org/v1/namespaces/default/pytorchjobs", "PyTorchJob", "kubeflow.org/v1")
JOB = ("/apis/batch/v1/namespaces/default/jobs", "Job", "batch/v1")
POD = ("/api/v1/namespaces/default/pods", "Pod", "v1")


# contenders: coroutines that wait for one job, or for all jobs, and call `fired` with its name

Fired = Callable[[str], None]


async def ours(parameters: Json, name: str, uid: str, fired: Fired) -> None:
    """TrainingJobTrigger with the operator's arguments. The job is kept, as by KubernetesJobOperator."""
    from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction
    from airflow_provider_ktrain.engine.follow.options import Options
    from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

    ref = JobRef("PyTorchJob", "v1", NAMESPACE, name, uid, owner=name, deployment="bench", submission=name)
    options = Options(on_finish_action=OnFinishAction(parameters["finish"]))
    trigger = TrainingJobTrigger(job=ref.to_dict(), options=options.to_dict(), kubernetes_conn_id="kubernetes_default")
    await first(trigger.run())
    fired(name)


async def job_trigger(parameters: Json, name: str, uid: str, fired: Fired) -> None:
    from airflow.providers.cncf.kubernetes.triggers.job import KubernetesJobTrigger

    trigger = KubernetesJobTrigger(
        job_name=name,
        job_namespace=NAMESPACE,
        pod_names=[],
        pod_namespace=NAMESPACE,
        base_container_name="pytorch",
        kubernetes_conn_id="kubernetes_default",
        get_logs=False,
    )
    await first(trigger.run())
    fired(name)


async def pod_trigger(parameters: Json, name: str, uid: str, fired: Fired) -> None:
    from airflow.providers.cncf.kubernetes.triggers.pod import KubernetesPodTrigger

    trigger = KubernetesPodTrigger(
        pod_name=name,
        pod_namespace=NAMESPACE,
        trigger_start_time=datetime.datetime.now(datetime.UTC),
        base_container_name="pytorch",
        kubernetes_conn_id="kubernetes_default",
        get_logs=False,
        log_events_on_startup=False,
    )
    await first(trigger.run())
    fired(name)


async def first(events: AsyncIterator[object]) -> None:
    async for _ in events:
        return


def ended(obj: Json) -> bool:
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return any(c["type"] == "Succeeded" and c["status"] == "True" for c in conditions)


async def poller(parameters: Json, name: str, uid: str, fired: Fired) -> None:
    """A hand-written poller: one client for all jobs, and a request for each job every ten seconds."""
    while True:
        async with parameters["session"].get(f"{TRAINING[0]}/{name}") as response:
            if ended(await response.json()):
                return fired(name)
        await asyncio.sleep(POLL)


async def bare_watch(parameters: Json, names: dict[str, str], fired: Fired) -> None:
    """The lower limit: only one watch of all jobs."""
    seen: set[str] = set()
    async with parameters["session"].get(TRAINING[0], params={"watch": "1", "allowWatchBookmarks": "true"}) as response:
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                obj = json.loads(line)["object"]
                name = obj["metadata"].get("name")
                if name not in seen and ended(obj):
                    seen.add(name)
                    fired(name)


async def nothing(parameters: Json, names: dict[str, str], fired: Fired) -> None:
    """An idle loop."""


EACH: dict[str, Callable[[Json, str, str, Fired], Coroutine[Any, Any, None]]] = {
    "TrainingJobTrigger": ours,
    "TrainingJobTrigger, deletes": ours,
    "KubernetesJobTrigger": job_trigger,
    "KubernetesPodTrigger": pod_trigger,
    "plain poller": poller,
}
ALL: dict[str, Callable[[Json, dict[str, str], Fired], Coroutine[Any, Any, None]]] = {
    "idle loop": nothing,
    "bare watch": bare_watch,
}
POLLING = ("KubernetesJobTrigger", "KubernetesPodTrigger", "plain poller")
CONTENDERS = ["idle loop", "bare watch", *EACH]
WAITS_FOR = {"KubernetesJobTrigger": JOB, "KubernetesPodTrigger": POD}


IMPORTED = (
    "airflow.providers.cncf.kubernetes.triggers.job",
    "airflow.providers.cncf.kubernetes.triggers.pod",
    "airflow_provider_ktrain.triggers.training",
)  # imported by every contender, also by the idle one: their memory is the baseline


class Probe:
    """The resource usage of a contender's process since the previous call."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.fired: dict[str, float] = {}
        self._late: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._look()
        self._count_requests()

    def _look(self) -> None:
        now = self._loop.time()
        self._late.append(now - self._due)
        self._due = now + PROBE
        self._loop.call_at(self._due, self._look)

    def _count_requests(self) -> None:
        """Count the requests of aiohttp, which the clients of all contenders use."""
        send = aiohttp.ClientSession._request

        async def counted(client: aiohttp.ClientSession, method: str, *args: Any, **kwargs: Any) -> Any:
            self.requests[method] += 1
            return await send(client, method, *args, **kwargs)

        setattr(aiohttp.ClientSession, "_request", counted)  # noqa: B010

    def take(self) -> Json:
        late, self._late = self._late, []
        return {
            "at": time.monotonic(),
            "cpu": time.process_time(),
            "rss": memory(),
            "requests": self.requests.total(),
            "lag p50": quantile(late, 0.5),
            "lag p99": quantile(late, 0.99),
            "lag max": max(late, default=None),
            "fired": len(self.fired),
        }


async def contend(parameters: Json) -> None:
    """The process of a contender: start, then answer the requests on stdin."""
    say = answers()
    for module in IMPORTED:
        importlib.import_module(module)
    logging.disable(logging.INFO)
    name, jobs = parameters["name"], parameters["jobs"]
    parameters["finish"] = "delete_job" if name.endswith("deletes") else "keep_job"
    async with session(parameters["cluster"]) as parameters["session"]:
        probe = Probe()

        def fired(job: str) -> None:
            probe.fired[job] = time.monotonic()

        if name in ALL:
            tasks = [asyncio.create_task(ALL[name](parameters, jobs, fired))]
        else:
            tasks = [asyncio.create_task(EACH[name](parameters, job, uid, fired)) for job, uid in jobs.items()]
        await asyncio.sleep(SETTLE)
        until = time.monotonic() + SLOW_START
        while name in POLLING and probe.requests.total() < len(jobs) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        gc.collect()
        gc.freeze()  # a triggerer may not do this; for all contenders, it removes the pauses that their imports cause
        say({})
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            if broken := [t for t in tasks if t.done() and t.exception()]:
                raise broken[0].exception()  # type: ignore[misc]
            if "wait for" in command:
                until = time.monotonic() + PATIENCE
                while not set(command["wait for"]) <= probe.fired.keys() and time.monotonic() < until:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                say(probe.fired)
            else:
                say(probe.take())


# the stage


def body(kind: tuple[str, str, str], name: str) -> Json:
    _, kind_name, api_version = kind
    container = {"name": "pytorch", "image": "none:1", "command": ["true"]}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    meta: Json = {"name": name, "namespace": NAMESPACE}
    if kind is POD:
        # no node matches this selector, so no kubelet runs the pod and this script can write its status
        spec: Json = {**template["spec"], "nodeSelector": {"nobody": "here"}}
    elif kind is JOB:
        spec = {"suspend": True, "template": template}
    else:
        replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
        spec = {"runPolicy": {"suspend": True}, "pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}
        key = {"deployment": "bench", "dag_id": "d", "task_id": name, "run_id": "r", "map_index": -1}
        owner = json.dumps({**key, "try_number": 1, "ti_id": name})
        meta["labels"] = {"ktrain.airflow/deployment": "bench", "ktrain.airflow/submission": name}
        meta["annotations"] = {"ktrain.airflow/owner": owner}
    return {"apiVersion": api_version, "kind": kind_name, "metadata": meta, "spec": spec}


def master(job: str) -> Json:
    """The Master's pod of a training, which no kubelet runs. Without an owner: the operator would suspend it."""
    made = body(POD, f"{job}-master-0")
    labels = {"job-name": job, "replica-type": "master", "replica-index": "0", "job-role": "master"}
    made["metadata"]["labels"] = {
        "ktrain.airflow/deployment": "bench",
        "ktrain.airflow/submission": job,
        **{f"training.kubeflow.org/{key}": value for key, value in labels.items()},
    }
    return made


def status(kind: tuple[str, str, str], *, over: bool) -> Json:
    """The status of a running or a succeeded object."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if kind is POD:
        state = {"terminated": {"exitCode": 0}} if over else {"running": {"startedAt": now}}
        ready = {"name": "pytorch", "image": "none:1", "imageID": "", "restartCount": 0, "ready": not over}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": now}
        return {
            "phase": "Succeeded" if over else "Running",
            "conditions": [scheduled],
            "containerStatuses": [{**ready, "state": state}],
        }
    types = ["SuccessCriteriaMet", "Complete"] if kind is JOB else ["Succeeded"]
    conditions = [{"type": t, "status": "True", "lastTransitionTime": now, "reason": "Done"} for t in types]
    return {"conditions": conditions, "startTime": now, "completionTime": now} if over else {}


class Stage:
    """Jobs, and the changes that end them."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._uids: dict[tuple[str, str, str], dict[str, str]] = {}

    async def jobs(self, kind: tuple[str, str, str], count: int) -> dict[str, str]:
        """The uids, by name, of this many unfinished jobs."""
        there = self._uids.setdefault(kind, {})
        slots = asyncio.Semaphore(16)

        async def create(name: str) -> None:
            async with slots:
                async with self._http.post(kind[0], json=body(kind, name)) as response:
                    assert response.status == 201, await response.text()
                    there[name] = (await response.json())["metadata"]["uid"]
                if started := status(kind, over=False):
                    await self._write(kind, name, started)

        await asyncio.gather(*(create(f"job-{n:05}") for n in range(count) if f"job-{n:05}" not in there))
        return {f"job-{n:05}": there[f"job-{n:05}"] for n in range(count)}

    async def _write(self, kind: tuple[str, str, str], name: str, written: Json) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        url = f"{kind[0]}/{name}/status"
        async with self._http.patch(url, data=json.dumps({"status": written}), headers=headers) as response:
            assert response.status == 200, await response.text()

    async def end(self, kind: tuple[str, str, str], name: str) -> float:
        """Make a job succeed; returns the time at which the request was sent. A training's pod has succeeded before."""
        if kind is TRAINING:
            async with self._http.post(POD[0], json=master(name)) as response:
                assert response.status == 201, await response.text()
            await self._write(POD, f"{name}-master-0", status(POD, over=True))
        sent = time.monotonic()
        await self._write(kind, name, status(kind, over=True))
        return sent

    async def clear(self, kind: tuple[str, str, str], names: list[str]) -> None:
        """Delete finished jobs, and their pods."""
        for name in names if kind is TRAINING else ():
            async with self._http.delete(f"{POD[0]}/{name}-master-0", params={"gracePeriodSeconds": "0"}):
                pass
        slots = asyncio.Semaphore(16)

        async def remove(name: str) -> None:
            self._uids[kind].pop(name)
            params = {"gracePeriodSeconds": "0"} if kind is POD else {}
            async with slots:
                async with self._http.delete(f"{kind[0]}/{name}", params=params):
                    pass
                while True:
                    async with self._http.get(f"{kind[0]}/{name}") as response:
                        if response.status == 404:
                            return
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(remove(name) for name in names))


async def measure(stage: Stage, process: Contender, kind: tuple[str, str, str], args: argparse.Namespace) -> Json:
    ask: Callable[..., Awaitable[Json]] = lambda **command: asyncio.to_thread(process.ask, **command)  # noqa: E731
    before = await ask()
    await asyncio.sleep(args.seconds)
    after = await ask()
    minutes = (after["at"] - before["at"]) / 60
    measured = {
        **{key: after[key] for key in ("rss", "lag p50", "lag p99", "lag max")},
        "cpu": (after["cpu"] - before["cpu"]) / minutes,
        "requests": (after["requests"] - before["requests"]) / minutes,
    }
    return measured


async def detect(stage: Stage, process: Contender, kind: tuple[str, str, str], args: argparse.Namespace) -> Json:
    """Make jobs succeed, spread over more than a poll interval, and return when each was noticed."""
    names = [f"job-{n * args.jobs // args.changes:05}" for n in range(args.changes)]
    sent = {}
    for name in names:
        sent[name] = await stage.end(kind, name)
        await asyncio.sleep(POLL / args.changes)
    fired = await asyncio.to_thread(process.ask, **{"wait for": names})
    took = [fired[name] - sent[name] for name in names if name in fired]
    assert min(took, default=0.0) >= 0, "it fired before its job had ended"
    await stage.clear(kind, names)
    return {
        "detected": f"{len(took)}/{len(names)}",
        "p50": quantile(took, 0.5),
        "p99": quantile(took, 0.99),
        "max": max(took, default=None),
    }


HEAD = [
    "waits", "jobs", "CPU s/min above idle", "MiB above idle", "requests/min", "loop lag p50 ms", "p99 ms", "max ms",
    "noticed", "detection p50 s", "p99 s", "max s",
]  # fmt: skip


def row(name: str, jobs: int, found: Json, idle: Json) -> list[Any]:
    return [
        name, jobs, found["cpu"] - idle["cpu"], found["rss"] - idle["rss"], found["requests"],
        *(1000 * found[key] for key in ("lag p50", "lag p99", "lag max")),
        *(found.get(key) for key in ("detected", "p50", "p99", "max")),
    ]  # fmt: skip


async def run(args: argparse.Namespace) -> None:
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    rows: list[list[Any]] = []
    with EmbeddedCluster(nodes=1) as cluster:
        reach = credentials(cluster)
        async with session(reach) as http:
            stage = Stage(http)
            for size in args.sizes:
                args.jobs, args.changes = size, min(args.changes, size)
                idle: Json = {"cpu": 0.0, "rss": 0.0}
                for name in CONTENDERS:
                    if args.only and name not in (*args.only, "idle loop"):
                        continue
                    kind = WAITS_FOR.get(name, TRAINING)
                    jobs = await stage.jobs(kind, args.jobs)
                    parameters = {"name": name, "jobs": jobs}
                    with contender(__file__, parameters, reach) as process:
                        found = await measure(stage, process, kind, args)
                        if name == "idle loop":
                            idle = found
                        else:
                            found |= await detect(stage, process, kind, args)
                    rows.append(row(name, args.jobs, found, idle if name != "idle loop" else {"cpu": 0.0, "rss": 0.0}))
                    print(f"{name}, {args.jobs} jobs: {json.dumps(found)}", file=sys.stderr, flush=True)
    print(table(HEAD, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000], dest="sizes")
    parser.add_argument(
        "--seconds", type=float, default=10, help="idle time of each contender, at least one poll of 10 s"
    )
    parser.add_argument("--changes", type=int, default=100, help="number of jobs that succeed afterwards")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    asyncio.run(contend(json.loads(args.contender)) if args.contender else run(args))


if __name__ == "__main__":
    main()
