"""What the statuses for the training page cost a triggerer, its supervisor and its runner: 300 and 1,000 trainings.

    python benchmarks/page_writes.py [--jobs 300 1000] [--seconds 120] [--kills 10] [--logs DIRECTORY]

Each contender is a triggerer of Airflow with its supervisor and its runner, in front of a stand-in for the Kubernetes
API: once without trainings, and for each number of trainings once without and once with statuses. All run at the same
time, so that the machine's other load is the same for all. The jobs run; each has two replicas, and its primary reports
four metrics every ten seconds. CPU is measured while nothing else changes. Then tasks are marked failed in Airflow's
database, one after the other, of all contenders at the same time: a kill takes from then until the pods are gone, which
end half a second after the deletion. With statuses, the trigger then stores the last one and the summary. Prints a
Markdown table; the p99 of less than 100 kills is their maximum.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import sqlite3
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import machine, quantile, table
from harness.triggerer import Airflow, Component, ProbeFile, StandIn, task, triggerer, wait_for

from airflow_provider_ktrain.core.formats import SUMMARY_XCOM

HEAD = [
    "trainings", "statuses", "load", "runner CPU s/min", "supervisor CPU s/min", "runner MiB", "supervisor MiB",
    "writes/min", "status KB", "oldest s", "CPU ms of the loop in 5 ms, p99", "loop lag p99 ms",
    "watch p50 ms", "p99 ms", "kill p50 s", "p99 s", "max s",
]  # fmt: skip
RATE = 0.1  # lines per second of each replica
LINES = 100_000
SLOW_KILL = 20.0  # seconds: after which the times of a kill's steps are printed


def statuses(airflow: Airflow) -> list[tuple[float, int]]:
    """When each status was written, in epoch seconds, and its size."""
    query = "SELECT value FROM xcom WHERE key = 'ktrain_status'"
    with contextlib.closing(sqlite3.connect(airflow.database, timeout=60)) as database:
        texts = [row[0] for row in database.execute(query)]
    found = []
    for text in texts:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
        found.append((float(value["written_at"]), len(json.dumps(value))))
    return found


def kill(airflow: Airflow, stand_in: StandIn, number: int) -> float:
    """Seconds from the mark in the database until the pods of a job are gone."""
    name = f"job-{number:05}"
    began = time.time()
    airflow.mark_failed([number])
    gone = wait_for("the pods are gone", lambda: stand_in.ask("/stats")["deletions"].get(name, {}).get("gone"))
    if gone - began > SLOW_KILL:
        steps = {step: round(at - began, 1) for step, at in airflow.steps().get(name, {}).items()}
        print(f"{name} took {gone - began:.1f} s: {steps}", file=sys.stderr, flush=True)
    return float(gone) - began


@dataclass
class Contender:
    """A running triggerer, and what it had used at the beginning of the measurement."""

    jobs: int
    state: str
    airflow: Airflow
    component: Component
    stand_in: StandIn
    probe: ProbeFile
    began: dict[str, float] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)

    def start(self) -> None:
        self.began = {"monotonic": time.monotonic(), "time": time.time(), **self.component.cpu()}

    def found(self) -> list[Any]:
        """What it has used since then: the columns between the load and the kills."""
        now = self.component.cpu()
        ended, minutes = time.monotonic(), (time.monotonic() - self.began["monotonic"]) / 60
        memory, lag = self.component.memory(), self.probe.between(self.began["monotonic"], ended)
        written = statuses(self.airflow)
        recent = [size for when, size in written if when >= self.began["time"]]
        return [
            *((now[name] - self.began[name]) / minutes for name in ("runner", "supervisor")),
            memory["runner"], memory["supervisor"],
            len(recent) / minutes if written else None,
            quantile([size / 1000 for _, size in written], 0.5),
            time.time() - min(when for when, _ in written) if written else None,
            *(lag[key] for key in ("busy p99", "lag p99", "watch p50", "watch p99")),
        ]  # fmt: skip

    def keep_logs(self, directory: Path) -> None:
        """Copy what the triggerer has written, and the times of the kills' steps."""
        target = directory / f"{self.jobs}-{self.state}"
        shutil.copytree(self.airflow.home / "logs", target / "logs", dirs_exist_ok=True)
        for name in ("triggerer.out", "kills.jsonl"):
            if (self.airflow.home / name).exists():
                shutil.copy(self.airflow.home / name, target)


def begin(stack: contextlib.ExitStack, jobs: int, state: str) -> Contender:
    parameters = {"jobs": jobs, "replicas": 2, "running": jobs, "rate": RATE, "metrics": True}
    summary = {"version": 1, "try_number": 1, "state": "running", "parameters": {f"p{n}": "x" * 40 for n in range(12)}}
    tasks = [{**task(n), "xcoms": {SUMMARY_XCOM: summary}} for n in range(jobs)]
    running = stack.enter_context(triggerer(parameters, tasks, BENCH_STATUS=state))
    if jobs:
        running[2].ask(f"/begin?lines={LINES}")
    print(f"{jobs} trainings, statuses {state}: running", file=sys.stderr, flush=True)
    return Contender(jobs, state, *running)


def kill_some(contender: Contender, kills: int) -> None:
    """Kill tasks one after the other."""
    for number in range(kills):
        contender.kills.append(kill(contender.airflow, contender.stand_in, number))
        print(contender.state, f"{contender.kills[-1]:.1f}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[300, 1000])
    parser.add_argument("--seconds", type=float, default=120, help="duration of the measurement")
    parser.add_argument("--settle", type=float, default=60, help="seconds before it")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--logs", type=Path, help="a directory into which the logs of the triggerers are copied")
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    cases = [(0, "-"), *((jobs, state) for jobs in args.jobs for state in ("off", "on"))]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(cases)) as pool:
            contenders = list(pool.map(lambda case: begin(stack, *case), cases))
        time.sleep(args.settle)
        load = [os.getloadavg()[0]]
        for contender in contenders:
            contender.start()
        time.sleep(args.seconds)
        found = [contender.found() for contender in contenders]
        load.append(os.getloadavg()[0])
        print(table(HEAD[:2] + HEAD[3:-3], [[c.jobs, c.state, *f] for c, f in zip(contenders, found, strict=True)]))
        try:
            with ThreadPoolExecutor(len(cases)) as pool:
                list(pool.map(partial(kill_some, kills=args.kills), filter(lambda c: c.jobs, contenders)))
        finally:
            for contender in contenders if args.logs else ():
                contender.keep_logs(args.logs)
        loads = f"{min(load):.0f} to {max(load):.0f}"
        rows = [
            [c.jobs, c.state, loads, *f, *(quantile(c.kills, q) for q in (0.5, 0.99)), max(c.kills, default=None)]
            for c, f in zip(contenders, found, strict=True)
        ]
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
