"""What viewers of the training page cost Airflow's API server, beside viewers of Airflow's own page of the task.

    python benchmarks/page_viewers.py [--viewers 100] [--seconds 120] [--peers 10]

A real API server, with a deferred task that has a status at its limits: 256 replicas, and 10 KB of series. The status
is rewritten every ten seconds, as a triggerer does that follows up to ten trainings. Each viewer is a task of this
process that polls as the page's script does: after 5 s, after unchanged data 1.5 times later each time, up to 30 s. For
comparison, other viewers send only the request for the task instance that Airflow's own page sends every 3 s ([api]
auto_refresh_interval) while a task is active; Airflow's page also sends others. CPU is that of the API server's
processes, above what they use without viewers. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from harness import cpu, machine, quantile, table, tree
from harness.api_server import ApiServer, api_server

from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus
from airflow_provider_ktrain.core.state.steps.training_metrics import TrainingMetrics

REPLICAS = 256
FASTEST, SLOWEST, SLOWER = 5.0, 30.0, 1.5  # seconds between two requests of the page's script, and its backoff
AIRFLOW_INTERVAL = 3.0  # seconds: [api] auto_refresh_interval
REWRITE = 10.0  # seconds between two statuses
TASK = "train"
QUERY = "dag_id=bench&run_id=r&task_id=train&map_index=-1"
UPDATE = f"/ktrain/training/update?{QUERY}"
PAGE = f"/ktrain/training?{QUERY}"
OWN = "/api/v2/dags/bench/dagRuns/r/taskInstances/train"


def full_status(restarting: int) -> dict[str, Any]:
    """A status at its limits. Of so many replicas, only those that restart are shown one by one."""
    metrics = TrainingMetrics()
    for step in range(2000):
        values = {"step": step, **{f"metric_{n:02}": step * 1.2345678 / (n + 1) for n in range(32)}}
        metrics.read_line("Master 0", f"KTRAIN_METRIC {json.dumps(values)}", time.time())
    now = time.time()
    rows = [
        ["Worker", n, f"training-0123456789-worker-{n}", f"node-{n // 8:03}", 8, state, 0]
        for n, state in enumerate(["CrashLoopBackOff"] * restarting + ["Running"] * (REPLICAS - restarting))
    ]
    return TrainingStatus(
        job={"kind": "PyTorchJob", "namespace": "default", "name": "training-0123456789", "uid": "u"},
        try_number=1, written_at=now, host="trigger", phases=[("Queued", now - 900), ("Running", now - 600)],
        rows=rows, last_lines={f"Worker {n}": "x" * 120 for n in range(16)}, metrics=metrics,
        usage={"held": 1e6, "wasted": 1e4, "queued": 900.0, "requested": 2048.0},
    ).to_dict()  # fmt: skip


class Viewers:
    """Viewers of one page, and what they got."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.answers: Counter[int] = Counter()
        self.sizes: Counter[int] = Counter()
        self.took: dict[int, list[float]] = {}

    def forget(self) -> None:
        for counts in (self.answers, self.sizes, self.took):
            counts.clear()

    async def get(self, path: str, tag: str = "") -> tuple[int, str]:
        began = time.monotonic()
        headers = {"If-None-Match": tag} if tag else {}
        async with self.http.get(path, headers=headers) as response:
            size = len(await response.read())
        self.answers[response.status] += 1
        self.sizes[response.status] += size
        self.took.setdefault(response.status, []).append(time.monotonic() - began)
        return response.status, response.headers.get("ETag", "")

    async def ours(self) -> None:
        """As page.js polls."""
        await asyncio.sleep(random.uniform(0, FASTEST))
        tag, delay = "", FASTEST
        while True:
            status, tag = await self.get(UPDATE, tag)
            delay = FASTEST if status == 200 else min(delay * SLOWER, SLOWEST)
            await asyncio.sleep(delay)

    async def airflows(self) -> None:
        """One of the requests that Airflow's page sends."""
        await asyncio.sleep(random.uniform(0, AIRFLOW_INTERVAL))
        while True:
            await self.get(OWN)
            await asyncio.sleep(AIRFLOW_INTERVAL)

    async def nobody(self) -> None:
        await asyncio.sleep(3600)


HEAD = [
    "page", "viewers", "load", "requests/min", "of these unchanged (304)", "MB/min", "CPU ms/min", "CPU ms/request",
    "response p50 ms", "p99 ms",
]  # fmt: skip


async def watch(server: ApiServer, name: str, number: int, seconds: float, idle: float) -> tuple[list[Any], float]:
    """The row of viewers of one page, and the API server's CPU seconds per minute."""
    headers = {"Authorization": f"Bearer {server.token}"}
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, headers=headers, timeout=timeout, connector=connector) as http:
        viewers = Viewers(http)
        behave: Callable[[], Coroutine[Any, Any, None]]
        behave = {"training page": viewers.ours, "Airflow's, one request": viewers.airflows}.get(name, viewers.nobody)
        for path in (PAGE, UPDATE, OWN):  # the first request of each kind loads code
            await viewers.get(path)
        tasks = [asyncio.create_task(behave()) for _ in range(number)]
        await asyncio.sleep(20)
        viewers.forget()
        used, load, began = sum(map(cpu, tree(server.pid))), [os.getloadavg()[0]], time.monotonic()
        while time.monotonic() < began + seconds:
            await asyncio.sleep(min(REWRITE, began + seconds - time.monotonic()))
            await asyncio.to_thread(server.rewrite, TASK)
        minutes = (time.monotonic() - began) / 60
        spent = (sum(map(cpu, tree(server.pid))) - used) / minutes
        load.append(os.getloadavg()[0])
        for task in tasks:
            task.cancel()
        broken = [t for t in await asyncio.gather(*tasks, return_exceptions=True) if not _cancelled(t)]
    if broken or set(viewers.answers) - {200, 304}:
        raise RuntimeError(f"{viewers.answers}, {broken[:1]}")
    requests = viewers.answers.total()
    took = [value for values in viewers.took.values() for value in values]
    row = [
        name, number, f"{min(load):.0f} to {max(load):.0f}", requests / minutes, viewers.answers[304] / minutes,
        viewers.sizes.total() / 1e6 / minutes, 1000 * (spent - idle),
        1000 * (spent - idle) * minutes / requests if requests else None,
        *(None if not took else 1000 * (quantile(took, q) or 0) for q in (0.5, 0.99)),
    ]  # fmt: skip
    return row, spent


def _cancelled(result: object) -> bool:
    return isinstance(result, asyncio.CancelledError)


async def rounds(server: ApiServer, parts: int, document: str) -> list[list[Any]]:
    """Size, CPU time and duration of the page's parts, one request after the other."""
    rows: list[list[Any]] = []
    headers = {"Authorization": f"Bearer {server.token}"}
    async with aiohttp.ClientSession(server.url, headers=headers) as http:
        viewers = Viewers(http)
        _, tag = await viewers.get(UPDATE)
        requests = (
            ("page", PAGE, ""),
            ("update", UPDATE, ""),
            ("update, unchanged", UPDATE, tag),
            ("Airflow's", OWN, ""),
        )
        for name, path, known in requests:
            viewers.forget()
            used = sum(map(cpu, tree(server.pid)))
            for _ in range(parts):
                await viewers.get(path, known)
            spent = (sum(map(cpu, tree(server.pid))) - used) / parts
            took = [value for values in viewers.took.values() for value in values]
            rows.append(
                [document, name, viewers.sizes.total() / parts / 1000, 1000 * spent, 1000 * (quantile(took, 0.5) or 0)]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--viewers", type=int, default=100)
    parser.add_argument("--peers", type=int, default=10, help="viewers of Airflow's own page")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--parts", type=int, default=50, help="requests of each part of the page")
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    documents = {f"{n} of {REPLICAS} replicas restart": full_status(n) for n in (0, 64)}
    with api_server({TASK: next(iter(documents.values()))}) as server:
        rows, idle = [], 0.0
        pages = (("no viewers", 0), ("training page", args.viewers), ("Airflow's, one request", args.peers))
        for name, number in pages:
            row, spent = asyncio.run(watch(server, name, number, args.seconds, idle))
            idle = spent if not number else idle
            rows.append(row)
            print(json.dumps(dict(zip(HEAD, row, strict=True))), file=sys.stderr, flush=True)
        parts = []
        for name, document in documents.items():
            server.rewrite(TASK, **document)
            parts += asyncio.run(rounds(server, args.parts, name))
    print(table(HEAD, rows))
    sizes = [
        [name, len(json.dumps(found)) / 1000, len(found["series"]), sum(map(len, found["series"].values()))]
        for name, found in documents.items()
    ]
    print("\n" + table(["status", "KB", "series", "points"], sizes))
    print("\n" + table(["status", "request", "KB", "CPU ms", "response p50 ms"], parts))


if __name__ == "__main__":
    main()
