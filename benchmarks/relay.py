"""Logs through a real triggerer, its supervisor included, to the log files: 1,440 lines/s from 300 and 4,800 streams.

    python benchmarks/relay.py [--lines 1440] [--seconds 60] [--only few many]

few    300 jobs of one replica: as many streams as the budget allows at a time
many   300 jobs of 16 replicas: 4,800 logs take turns of five seconds over the same budget

Each runs in a new triggerer of Airflow, in front of a stand-in for the Kubernetes API; a triggerer without trainings
runs at the same time for comparison of the loop lag. This process reads the log files every quarter of a second: the
delay of a line is from when its container wrote it until it is in the file. With KTRAIN_TEST_DATABASE=postgresql, the
triggerer uses a PostgreSQL server, and its transactions are counted. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import machine, quantile, table
from harness.database import database, transactions, version
from harness.triggerer import Airflow, Component, ProbeFile, StandIn, task, triggerer

JOBS = 300
REPLICAS = {"few": 1, "many": 16}
LOOK = 0.25  # seconds between two looks at the files
LINE = re.compile(rb"\[(\w+ \d+)\] line (\d{8}) (\d+\.\d+)")
HEAD = [
    "streams", "lines/s", "load", "lines", "lost", "repeated", "delay p50 s", "p99 s", "max s",
    "runner CPU s/s", "supervisor CPU s/s", "runner CPU ms per 1,000 lines", "supervisor, same", "runner MiB",
    "supervisor MiB", "log requests/s", "transactions/s", "CPU ms of the loop in 5 ms, p99", "loop lag p99 ms",
    "idle loop p99 ms",
]  # fmt: skip


class Files:
    """The growing log files of a triggerer."""

    def __init__(self, airflow: Airflow) -> None:
        self.paths = [path for path in airflow.logs() if "task_id=train" in str(path)]
        self.counted: Counter[tuple[Path, bytes, bytes]] = Counter()
        self.delays: list[float] = []
        self._at: dict[Path, int] = {}

    def look(self) -> None:
        """Read what is new."""
        for path in self.paths:
            if path.stat().st_size == (at := self._at.get(path, 0)):
                continue
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            now = time.time()
            whole = data[: data.rfind(b"\n") + 1]
            self._at[path] = at + len(whole)
            for replica, number, written in LINE.findall(whole):
                self.counted[path, replica, number] += 1
                self.delays.append(now - float(written))


def relay(
    airflow: Airflow, component: Component, stand_in: StandIn, probe: ProbeFile, idle: ProbeFile, args: Any, name: str
) -> list[Any]:
    """The row of one triggerer."""
    streams = JOBS * REPLICAS[name]
    per_stream = max(1, round(args.lines * args.seconds / streams))
    expected = per_stream * streams
    time.sleep(10)
    files, load = Files(airflow), [os.getloadavg()[0]]
    requests, used = stand_in.ask("/stats")["requests"].get("log", 0), component.cpu()
    queried = transactions(airflow.sql)
    began = time.monotonic()
    stand_in.ask(f"/begin?lines={per_stream}")
    grew = began
    while len(files.counted) < expected and time.monotonic() < grew + args.patience:
        time.sleep(LOOK)
        before = len(files.counted)
        files.look()
        grew = time.monotonic() if len(files.counted) > before else grew
        if len(load) < (time.monotonic() - began) / 30:
            load.append(os.getloadavg()[0])
    if grew == began:
        raise RuntimeError(f"no line arrived within {args.patience} s")
    seconds = grew - began
    now, stats, memory = component.cpu(), stand_in.ask("/stats"), component.memory()
    queries = transactions(airflow.sql)
    time.sleep(10)  # repeated lines may follow
    files.look()
    lag, other = probe.between(began, grew), idle.between(began, grew)
    took = {key: now[key] - used[key] for key in now}
    return [
        streams, args.lines, f"{min(load):.0f} to {max(load):.0f}", len(files.counted),
        expected - len(files.counted), files.counted.total() - len(files.counted),
        quantile(files.delays, 0.5), quantile(files.delays, 0.99), max(files.delays, default=None),
        *(took[key] / seconds for key in ("runner", "supervisor")),
        *(took[key] * 1e6 / max(len(files.counted), 1) for key in ("runner", "supervisor")),
        memory["runner"], memory["supervisor"],
        (stats["requests"].get("log", 0) - requests) / seconds,
        None if queried is None or queries is None else (queries - queried) / seconds,
        lag["busy p99"], lag["lag p99"], other["lag p99"],
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=float, default=1440, help="lines per second of all streams")
    parser.add_argument("--seconds", type=float, nargs="+", default=[60, 240], help="how long each writes")
    parser.add_argument("--patience", type=float, default=120, help="seconds without a new line until it gives up")
    parser.add_argument("--only", nargs="+", choices=list(REPLICAS), default=list(REPLICAS))
    args = parser.parse_args()
    durations = args.seconds
    print(f"{datetime.date.today()}; {machine()}; {version()}\n", flush=True)
    rows: list[list[Any]] = []
    with triggerer({"jobs": 0}, []) as (_, _, _, idle):
        for number, name in enumerate(args.only):
            args.seconds = durations[min(number, len(durations) - 1)]
            rate = args.lines / (JOBS * REPLICAS[name])
            parameters = {"jobs": JOBS, "replicas": REPLICAS[name], "running": JOBS, "rate": rate}
            with database() as sql, triggerer(parameters, [task(n) for n in range(JOBS)], sql) as running:
                rows.append(relay(*running, idle, args, name))
            print(json.dumps(dict(zip(HEAD, rows[-1], strict=False))), file=sys.stderr, flush=True)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
