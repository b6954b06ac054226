"""The cost of the embedded cluster with many jobs: memory and CPU of its server, and the delay of watch events.

    python benchmarks/scale.py [--jobs 2000] [--watchers 100]

Creates suspended PyTorchJobs while watchers follow all of them, then leaves the server idle, then changes one job.
Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp

from ktrain_embedded import EmbeddedCluster

JOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
REST = 10  # seconds


def job(name: str) -> dict[str, Any]:
    container = {"name": "pytorch", "image": "none:1", "command": ["true"]}
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    spec = {"runPolicy": {"suspend": True}, "pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def memory(pid: int) -> dict[str, int]:
    """MiB of a process that are in memory: now, and its maximum so far."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: round(int(status[key].split()[0]) / 1024) for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))}


def cpu(pid: int) -> float:
    """CPU seconds used by a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watcher:
    """Counts the events of a watch of all jobs."""

    def __init__(self) -> None:
        self.suspended: set[bytes] = set()
        self.noted = asyncio.Event()
        self.all = asyncio.Event()

    async def run(self, session: aiohttp.ClientSession, jobs: int) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with session.get(f"{JOBS}?watch=1&allowWatchBookmarks=true", timeout=timeout) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if b'"Suspended"' in line:
                        self.suspended.add(line[line.index(b'"name":"job-') :][:20])
                    if b'"noted"' in line:
                        self.noted.set()
                if len(self.suspended) == jobs:
                    self.all.set()


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    with EmbeddedCluster(images={}, nodes=1) as cluster:
        context = ssl.create_default_context(cafile=str(cluster.ca_file))
        headers = {"Authorization": f"Bearer {cluster.token}"}
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(cluster.url, connector=connector, headers=headers) as session:
            pid = cluster.pid
            empty = memory(pid)
            watchers = [Watcher() for _ in range(args.watchers)]
            watching = [asyncio.create_task(w.run(session, args.jobs)) for w in watchers]
            began, used = time.perf_counter(), cpu(pid)
            slots = asyncio.Semaphore(8)

            async def create(i: int) -> None:
                async with slots, session.post(JOBS, json=job(f"job-{i:08}")) as response:
                    response.raise_for_status()

            await asyncio.gather(*(create(i) for i in range(args.jobs)))
            created = time.perf_counter()
            await asyncio.gather(*(w.all.wait() for w in watchers))
            finished, after = time.perf_counter(), cpu(pid)
            await asyncio.sleep(REST)
            rested = cpu(pid)
            listing = time.perf_counter()
            async with session.get(JOBS) as response:
                size = len(await response.read())
            listed = time.perf_counter()
            patch = {"metadata": {"annotations": {"noted": "yes"}}}
            merge = {"Content-Type": "application/merge-patch+json"}
            async with session.patch(f"{JOBS}/job-00000000", data=json.dumps(patch), headers=merge) as response:
                response.raise_for_status()
            await asyncio.gather(*(w.noted.wait() for w in watchers))
            noted = time.perf_counter()
            result = {
                "jobs": args.jobs,
                "watchers": args.watchers,
                "all created after s": round(created - began, 1),
                "all watchers have all events after s": round(finished - began, 1),
                "server CPU s until then": round(after - used, 1),
                "server CPU % at rest": round(100 * (rested - after) / REST, 1),
                "list of all jobs, ms": round(1000 * (listed - listing)),
                "list of all jobs, MiB": round(size / 2**20, 1),
                "one change reaches all watchers after ms": round(1000 * (noted - listed)),
                "server MiB empty": empty["now"],
                "server MiB afterwards": memory(pid)["now"],
                "server MiB peak": memory(pid)["peak"],
            }
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--watchers", type=int, default=100)
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
