"""What an API server sees of several triggerers, and what other jobs in the namespace cost a triggerer.

    python benchmarks/fleet.py [--seconds 60] [--changes 10] [--cases 1x1000 4x250 ...]

A case `NxM` is N triggerers with M waiting jobs each, all of one Airflow; `NxM+F` adds F jobs of other owners to the
namespace. A triggerer is simulated by a process that runs M of our triggers in one event loop, without Airflow's
supervisor. The server is a stand-in for the Kubernetes API that counts requests, watches and bytes. First nothing
changes for `--seconds`. Then `--changes` jobs change each second, each in turn, those of other owners too. CPU is that
of the triggerers' processes, above an idle one. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import gc
import importlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Contender, Json, answers, contender, machine, table
from harness.standin import job_name
from harness.triggerer import StandIn, task, wait_for
from waiting import Probe

HEAD = [
    "triggerers", "jobs each", "other jobs", "load", "requests until all are followed", "MB", "watches",
    "requests/min at rest", "CPU s/min of a triggerer", "MiB above idle", "KB/s while jobs change",
    "loop lag p99 ms at rest",
]  # fmt: skip
CASES = ["1x100", "1x100+9900", "1x1000", "2x500", "4x250", "4x1000"]
IMPORTED = ("airflow_provider_ktrain.engine.training_owner", "kubernetes_asyncio")  # by the idle process, too
WATCHES = 2  # of a triggerer: jobs and pods
STARTED = 5.0  # seconds after the last request of the start


async def contend(parameters: Json) -> None:
    """The process of a triggerer: run the triggers, and answer the requests on stdin."""
    say = answers()
    for module in IMPORTED:
        importlib.import_module(module)
    from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

    logging.disable(logging.INFO)
    probe = Probe()

    async def run(kwargs: Json) -> None:
        async for _ in TrainingJobTrigger(**kwargs).run():
            return

    numbers = range(parameters["first"], parameters["first"] + parameters["jobs"])
    tasks = [asyncio.create_task(run(task(n)["kwargs"])) for n in numbers]
    await asyncio.sleep(1)
    gc.collect()
    gc.freeze()
    say({})
    while await asyncio.to_thread(sys.stdin.readline):
        if broken := [t for t in tasks if t.done()]:
            raise RuntimeError(f"a trigger has ended: {broken[0]}")
        say(probe.take())


def ask_all(processes: list[Contender]) -> list[Json]:
    return [process.ask() for process in processes]


def case(text: str, args: argparse.Namespace, folder: Path, idle: Json) -> list[Any]:
    """The row of a case; `idle` is what an idle process used per minute."""
    parsed = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+))?", text)
    assert parsed is not None, text
    number, jobs, others = (int(group or 0) for group in parsed.groups())
    ours = number * jobs
    server = StandIn({"jobs": ours + others, "ours": ours})
    try:
        kubeconfig = str(server.kubeconfig(folder / "kubeconfig"))
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(contender(__file__, {"first": t * jobs, "jobs": jobs}, {"kubeconfig": kubeconfig}))
                for t in range(number)
            ]
            before = wait_for("all follow their jobs", lambda: settled(server, WATCHES * number))
            began = ask_all(processes)
            load = [os.getloadavg()[0]]
            time.sleep(args.seconds)
            rest, after = server.ask("/stats"), ask_all(processes)
            turns = max(1, round(args.seconds * args.changes))
            for turn in range(turns):
                server.ask("/touch", [job_name(turn * 7919 % (ours + others))])
                time.sleep(1 / args.changes)
            changed, last = server.ask("/stats"), ask_all(processes)
            load.append(os.getloadavg()[0])
    finally:
        server.end()
    seconds = after[0]["at"] - began[0]["at"]
    used = [(b["cpu"] - a["cpu"]) / seconds * 60 - idle["cpu"] for a, b in zip(began, after, strict=True)]
    busy = last[0]["at"] - after[0]["at"]
    requests = [sum(found["requests"].values()) for found in (before, rest)]
    return [
        number, jobs, others, f"{min(load):.0f} to {max(load):.0f}", requests[0],
        before["bytes"].get("lists", 0) / 1e6, rest["watches"], (requests[1] - requests[0]) / seconds * 60,
        sum(used) / number, sum(p["rss"] for p in after) / number - idle["rss"],
        (changed["bytes"].get("watches", 0) - rest["bytes"].get("watches", 0)) / busy / 1000,
        max(1000 * p["lag p99"] for p in after),
    ]  # fmt: skip


def settled(server: StandIn, watches: int) -> Json | None:
    """The server's counts, if all watches are open and no request has come for some seconds."""
    before = server.ask("/stats")
    time.sleep(STARTED)
    after = server.ask("/stats")
    return after if before["requests"] == after["requests"] and after["watches"] == watches else None


def idle_process(args: argparse.Namespace) -> Json:
    """CPU per minute and memory of a process without triggers."""
    with contender(__file__, {"first": 0, "jobs": 0}, {"kubeconfig": ""}) as process:
        began = process.ask()
        time.sleep(args.seconds)
        after = process.ask()
    cpu = (after["cpu"] - began["cpu"]) / (after["at"] - began["at"]) * 60
    return {"cpu": cpu, "rss": after["rss"], "lag p99": after["lag p99"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NxM[+F]")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--changes", type=float, default=10, help="changed jobs per second")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        asyncio.run(contend(json.loads(args.contender)))
        return
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    rows = []
    idle = idle_process(args)
    print(f"idle: {json.dumps(idle)}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for text in args.cases:
            rows.append(case(text, args, Path(folder), idle))
            print(json.dumps(dict(zip(HEAD, rows[-1], strict=True))), file=sys.stderr, flush=True)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
