"""The end of a training after its triggerer was lost, by the lines that were written since the deferral.

    python benchmarks/takeover.py [--lines 0 10000 100000] [--jobs 20] [--seconds 15]

A new triggerer of Airflow gets trainings that were deferred an hour ago and have written that many lines in all since
then, in front of a stand-in for the Kubernetes API. After `--seconds`, all of them end. The time begins before the
request that ends them. With KTRAIN_TEST_DATABASE=postgresql, the triggerer uses a PostgreSQL server. Prints a Markdown
table.
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
from typing import Any

from harness import machine, quantile, table
from harness.database import database, version
from harness.standin import job_name
from harness.triggerer import Airflow, StandIn, deferred, triggerer, wait_for

AGE = 3600.0  # seconds since the deferral
LINE = re.compile(rb"\[Master 0\] line (\d{8})")
LEFT = re.compile(rb"not logged again after the takeover: (?:at least )?([\d,]+) line")
HEAD = [
    "lines since the deferral", "jobs", "load", "end to event p50 s", "max s", "lines logged again until the end",
    "until the event", "counted as not logged", "lines repeated",
]  # fmt: skip


def logged(airflow: Airflow) -> tuple[Counter[tuple[str, bytes]], int]:
    """How often each line was logged, by task, and how many were counted as not logged."""
    found: Counter[tuple[str, bytes]] = Counter()
    left = 0
    for path in airflow.logs():
        if "task_id=train" in str(path):
            data = path.read_bytes()
            found.update((str(path), number) for number in LINE.findall(data))
            left += sum(int(count.replace(b",", b"")) for count in LEFT.findall(data))
    return found, left


def ended(airflow: Airflow, stand_in: StandIn, lines: int, jobs: int, seconds: float) -> list[Any]:
    """The row of one triggerer."""
    time.sleep(seconds)
    before, _ = logged(airflow)
    began, load = time.time(), os.getloadavg()[0]
    stand_in.ask("/end")
    events = wait_for(
        "all events",
        lambda: found if len(found := [s["event"] for s in airflow.steps().values() if "event" in s]) == jobs else None,
    )
    time.sleep(2.0)  # the last lines are read
    after, left = logged(airflow)
    took = [at - began for at in events]
    return [
        lines, jobs, f"{load:.0f}", quantile(took, 0.5), max(took), len(before), len(after), left,
        after.total() - len(after),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, nargs="+", default=[0, 10_000, 100_000], help="of all jobs together")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15, help="from the takeover to the end")
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}; {version()}\n", flush=True)
    rows: list[list[Any]] = []
    for lines in args.lines:
        parameters = {"jobs": args.jobs, "running": args.jobs, "age": AGE, "lines": lines // args.jobs}
        names = [job_name(number) for number in range(args.jobs)]
        tasks = [deferred(name, f"uid-{name}", map_index=n, age=AGE) for n, name in enumerate(names)]
        with database() as sql, triggerer(parameters, tasks, sql) as (airflow, _, stand_in, _):
            rows.append(ended(airflow, stand_in, lines, args.jobs, args.seconds))
        print(json.dumps(dict(zip(HEAD, rows[-1], strict=False))), file=sys.stderr, flush=True)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
