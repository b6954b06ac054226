"""The end of a training after its triggerer was lost, by the lines that were written since the deferral.

    python benchmarks/takeover.py [--lines 0 10000 100000] [--jobs 20] [--seconds 15]
    python benchmarks/takeover.py --cluster [--minutes 4] [--rate 15] [--jobs 20] [--seconds 15]

A new triggerer of Airflow gets trainings that were deferred an hour ago and have written that many lines in all since
then, in front of a stand-in for the Kubernetes API. After `--seconds`, all of them end. The time begins before the
request that ends them.

With `--cluster`, all processes of Airflow run trainings on the embedded cluster, each of which writes `--rate` lines a
second. After `--minutes`, the triggerer is killed, and its log files are deleted, as if its disk was lost with it. Then
another one starts. `--seconds` after that one follows all trainings, all programs end: the time begins there, and ends
when Airflow has the trigger's event, which the trigger sends after the verdict and the release.

With KTRAIN_TEST_DATABASE=postgresql, Airflow uses a PostgreSQL server. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sqlalchemy
from harness import machine, quantile, table
from harness.database import database, version
from harness.standin import job_name
from harness.triggerer import Airflow, StandIn, deferred, triggerer, wait_for

from tests import clusters
from tests.e2e import airflow as whole
from tests.e2e.chaos import QUICK

AGE = 3600.0  # seconds since the deferral
LINE = re.compile(rb"\[Master 0\] line (\d{8})")
LEFT = re.compile(rb"(?:Missing: )?([\d,]+) lines? of \S+(?: between \S+ and \S+ are not logged again)?")
HEAD = [
    "lines since the deferral", "jobs", "load", "end to event p50 s", "max s", "lines logged again until the end",
    "until the event", "counted as not logged", "lines repeated",
]  # fmt: skip
CLUSTER_HEAD = [
    "trainings", "lines/s", "load", "lines", "of them since the deferral", "end to event p50 s", "max s", "logged",
    "counted as not logged", "neither", "repeated by one process",
]  # fmt: skip
DAG_ID = "takeover"
# it writes until a file exists, and then how many lines it has written, and when it has ended
PROGRAM = """
import os, sys, time
folder, name, rate = sys.argv[1:]
number, began = 0, time.monotonic()
while not os.path.exists(f"{folder}/end"):
    print(f"line {number:08} " + "x" * 80, flush=True)
    number += 1
    time.sleep(max(began + number / float(rate) - time.monotonic(), 0))
with open(f"{folder}/ended-{name}", "w") as file:
    file.write(f"{number} {time.time()}")
"""
DAG = """
import pendulum
from airflow.sdk import DAG
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG("takeover", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), max_active_tasks=1000):
    PyTorchJobOperator.partial(task_id="train", image="scratch", gpus=1).expand(command={commands!r})
"""


def logged(paths: Iterable[Path]) -> tuple[Counter[tuple[str, bytes]], int]:
    """How often each line was logged, by log file, and how many were counted as not logged."""
    found: Counter[tuple[str, bytes]] = Counter()
    left = 0
    for path in paths:
        if "task_id=train" in str(path):
            data = path.read_bytes()
            found.update((str(path), number) for number in LINE.findall(data))
            left += sum(int(count.replace(b",", b"")) for count in LEFT.findall(data))
    return found, left


def ended(airflow: Airflow, stand_in: StandIn, lines: int, jobs: int, seconds: float) -> list[Any]:
    """The row of one triggerer."""
    time.sleep(seconds)
    before, _ = logged(airflow.logs())
    began, load = time.time(), os.getloadavg()[0]
    stand_in.ask("/end")
    events = wait_for(
        "all events",
        lambda: found if len(found := [s["event"] for s in airflow.steps().values() if "event" in s]) == jobs else None,
    )
    time.sleep(2.0)  # the last lines are read
    after, left = logged(airflow.logs())
    took = [at - began for at in events]
    return [
        lines, jobs, f"{load:.0f}", quantile(took, 0.5), max(took), len(before), len(after), left,
        after.total() - len(after),
    ]  # fmt: skip


def on_the_cluster(args: argparse.Namespace) -> list[Any]:
    """The row of all of Airflow's processes and the embedded cluster."""
    with (
        tempfile.TemporaryDirectory(prefix="ktrain-bench-") as folder,
        clusters.cluster(gpus=args.jobs) as cluster,
        database() as sql,
    ):
        home, dags, files = (Path(folder, name) for name in ("airflow", "dags", "files"))
        for path in (home, dags, files):
            path.mkdir()
        commands = [["python3", "-c", PROGRAM, str(files), str(n), str(args.rate)] for n in range(args.jobs)]
        (dags / "takeover.py").write_text(DAG.format(commands=commands))
        airflow = whole.Airflow(home, cluster, dags, sql, **QUICK)
        airflow.triggerers = ("triggerer",)
        try:
            airflow.start()
            return _taken_over(airflow, files, args)
        finally:
            airflow.stop()


def _taken_over(airflow: whole.Airflow, files: Path, args: argparse.Namespace) -> list[Any]:
    engine = sqlalchemy.create_engine(airflow.sql)
    states = sqlalchemy.text("SELECT map_index, state FROM task_instance WHERE dag_id = :dag AND task_id = 'train'")

    def tasks(state: str) -> set[int]:
        with engine.connect() as connection:
            return {index for index, now in connection.execute(states, {"dag": DAG_ID}) if now == state}

    def logs(suffix: str) -> list[Path]:
        return sorted((airflow.home / "logs" / f"dag_id={DAG_ID}").glob(f"**/attempt=*.log{suffix}"))

    airflow.trigger(DAG_ID)
    everything = set(range(args.jobs))
    wait_for("all tasks are deferred", lambda: tasks("deferred") == everything)
    wait_for("a triggerer follows all", lambda: len(logs(".trigger.*")) == args.jobs)
    by_workers, _ = logged(logs(""))
    time.sleep(60 * args.minutes)
    airflow.end("triggerer")
    for path in logs(".trigger.*"):
        path.unlink()
    airflow.run("triggerer", "triggerer-2")
    wait_for("another triggerer follows all", lambda: len(logs(".trigger.*")) == args.jobs)
    time.sleep(args.seconds)
    load, events = os.getloadavg()[0], dict[int, float]()
    (files / "end").touch()
    while events.keys() != everything:
        for index in everything - tasks("deferred") - events.keys():
            events[index] = time.time()
        time.sleep(0.05)
    wait_for("all tasks have succeeded", lambda: tasks("success") == everything)
    reports = {index: (files / f"ended-{index}").read_text().split() for index in everything}
    took = [events[index] - float(at) for index, (_, at) in reports.items()]
    found, left = logged(logs("*"))
    lines, distinct = sum(int(count) for count, _ in reports.values()), len({(_task(p), n) for p, n in found})
    return [
        args.jobs, args.rate * args.jobs, f"{load:.0f}", lines, lines - len(by_workers), quantile(took, 0.5), max(took),
        distinct, left, lines - distinct - left, found.total() - len(found),
    ]  # fmt: skip


def _task(path: str) -> str:
    return str(Path(path).parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, nargs="+", default=[0, 10_000, 100_000], help="of all jobs together")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15, help="from the takeover to the end")
    parser.add_argument("--cluster", action="store_true", help="all of Airflow's processes, and the embedded cluster")
    parser.add_argument("--minutes", type=float, default=4, help="with --cluster: from the deferral to the kill")
    parser.add_argument("--rate", type=float, default=15, help="with --cluster: lines a second of each training")
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}; {version()}\n", flush=True)
    if args.cluster:
        print(table(CLUSTER_HEAD, [on_the_cluster(args)]))
        return
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
