"""The requests of many jobs whose pods find no node: our trigger, in the minutes after it has started.

    python benchmarks/pending.py [--jobs 100] [--pods 4] [--seconds 60]

The triggers run in a separate process and event loop. The requests of that process are counted by kind, from the start
of the triggers on. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib
import json
import sys
import time
from typing import Any

import aiohttp
from harness import Contender, Json, answers, contender, credentials, machine, session, table
from waiting import IMPORTED, NAMESPACE, TRAINING, Probe, body, ours

from ktrain_embedded import EmbeddedCluster

SLOTS = 16  # requests at the same time that create jobs


def pending(name: str, pods: int) -> Json:
    """A PyTorchJob whose pods request more GPUs than a node has."""
    made = body(TRAINING, name)
    made["spec"]["runPolicy"] = {}
    for role, replicas in (("Master", 1), ("Worker", pods - 1)):
        replica = json.loads(json.dumps(made["spec"]["pytorchReplicaSpecs"][role])) | {"replicas": replicas}
        replica["template"]["metadata"] = {"labels": made["metadata"]["labels"]}
        replica["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 1000}}
        made["spec"]["pytorchReplicaSpecs"][role] = replica
    return made


async def contend(parameters: Json) -> None:
    """The process of the triggers: start them when asked, then answer with the number of requests."""
    say = answers()
    for module in IMPORTED:
        importlib.import_module(module)
    probe = Probe()
    say({})
    tasks: list[asyncio.Task[Any]] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        if json.loads(line).get("start"):
            parameters["finish"] = "keep_job"
            tasks = [
                asyncio.create_task(ours(parameters, name, uid, lambda name: None))
                for name, uid in parameters["jobs"].items()
            ]
        assert not any(task.done() for task in tasks), "a trigger has ended"
        say(probe.take())


async def create(http: aiohttp.ClientSession, names: list[str], pods: int) -> dict[str, str]:
    """The uids of new jobs, by name, once all their pods exist."""
    uids, slots = {}, asyncio.Semaphore(SLOTS)

    async def one(name: str) -> None:
        async with slots, http.post(TRAINING[0], json=pending(name, pods)) as response:
            assert response.status == 201, await response.text()
            uids[name] = (await response.json())["metadata"]["uid"]

    await asyncio.gather(*map(one, names))
    while True:
        async with http.get(f"/api/v1/namespaces/{NAMESPACE}/pods") as response:
            if len((await response.json())["items"]) >= len(names) * pods:
                return uids
        await asyncio.sleep(1)


async def run(args: argparse.Namespace) -> None:
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    rows = []
    with EmbeddedCluster(nodes=1) as cluster:
        reach = credentials(cluster)
        async with session(reach) as http:
            jobs = await create(http, [f"job-{n:05}" for n in range(args.jobs)], args.pods)
        with contender(__file__, {"jobs": jobs}, reach) as process:
            counts = await asyncio.to_thread(measure, process, args.seconds)
        rows.append([args.jobs, args.pods, args.seconds, counts])
    print(table(["jobs", "pods of each", "seconds", "requests"], rows))


def measure(process: Contender, seconds: float) -> int:
    """The requests in the first seconds of the triggers."""
    before = process.ask(start=True)["requests"]
    time.sleep(seconds)
    return int(process.ask()["requests"] - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--pods", type=int, default=4, help="pods of each job, at least 2")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    asyncio.run(contend(json.loads(args.contender)) if args.contender else run(args))


if __name__ == "__main__":
    main()
