"""The end of trainings after their triggerer was lost with its log files, by the lines since the deferral.

    python benchmarks/takeover.py [--lines 0 10000 1000000] [--jobs 1 20] [--seconds 0 15] [--takeovers 1]

A triggerer of Airflow has trainings that were deferred an hour ago, have written that many lines in all since then, and
go on at this rate, in front of a stand-in for the Kubernetes API. Another triggerer runs beside it. The first one is
killed, and the other one takes over. With `--takeovers 2`, a third one runs beside that, which is killed as well, so
that the third one takes over about 11 s after the second one. `--seconds` after the last one follows all trainings, all
programs fail, each with another cause. The time begins before the request that ends them. The verdict is the record
with the cause. The trigger sends its event after the release; it has arrived when the task is no longer deferred.

The lines of each training, by number, in the log file of the last triggerer, and those that it counts as not logged
again must be all that its program has printed, without the files of the killed ones, and nobody else may count any.
What differs, and each cause that is not the right one, is printed as `wrong`.

With KTRAIN_TEST_DATABASE=postgresql, Airflow uses a PostgreSQL server. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy
from harness import machine, quantile, table
from harness.database import database, version
from harness.standin import CAUSE, job_name
from harness.triggerer import Airflow, Component, StandIn, deferred, triggerer, wait_for

AGE = 3600.0  # seconds since the deferral
APART = 11.0  # seconds between two takeovers
HEALTH = 8.0  # seconds without a heartbeat after which a triggerer counts as lost
SETTINGS = {
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": f"{HEALTH:.0f}",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
}
LINE = re.compile(rb"\[Master 0\] (?:%b )?line (\d{8})" % re.escape(CAUSE.encode()))
#: Lines that are not logged again after a takeover, or not at all.
COUNTED = re.compile(
    rb"([\d,]+) lines? (?:of \S+ between \S+ and \S+ are not logged again|of \S+\.\"|\([^)]+\) of the log)"
)
INEXACT = re.compile(
    rb"at least [\d,]+ lines?|Some lines of|lines [^\"]* may be missing|The log of \S+ may be incomplete"
)
HEAD = [
    "lines since the deferral", "trainings", "takeovers", "s apart", "s until the end", "load", "end to verdict max s",
    "end to event p50 s", "max s", "waited for a CPU s: runner", "supervisor", "right causes", "printed", "logged",
    "counted", "neither", "repeated", "only in files of killed triggerers",
]  # fmt: skip


@dataclass
class Training:
    """What triggerers have logged of one training."""

    logged: Counter[int] = field(default_factory=Counter)  # by the last triggerer: lines by number
    before: set[int] = field(default_factory=set)  # by killed ones
    counted: int = 0  # as not logged, by all of them
    inexact: list[bytes] = field(default_factory=list)  # words that make the count inexact
    verdict_at: float | None = None  # when the record with the right cause was made


def read(airflow: Airflow, last: int, printed: Sequence[int]) -> list[Training]:
    """What is in the log files.

    :param last: the number of the last triggerer.
    :param printed: the number of lines of each training.
    """
    found = [Training() for _ in printed]
    for path in airflow.logs():
        if (by := writer(path)) is None:
            continue
        number = int(path.parent.name.removeprefix("map_index="))
        data, training = path.read_bytes(), found[number]
        lines = [int(line) for line in LINE.findall(data)]
        training.counted += sum(int(count.replace(b",", b"")) for count in COUNTED.findall(data))
        training.inexact += INEXACT.findall(data)
        if by != last:
            training.before.update(lines)
            continue
        training.logged.update(lines)
        cause = f"ran out of GPU memory: {CAUSE} line {printed[number] - 1:08}".encode()
        if record := next((record for record in data.splitlines() if cause in record), None):
            training.verdict_at = datetime.datetime.fromisoformat(json.loads(record)["timestamp"]).timestamp()
    return found


def writer(path: Path) -> int | None:
    """The number of the triggerer that has written a log file; None if it isn't one of a training."""
    return int(path.name.split(".")[-2]) if "task_id=train" in str(path) else None


def run(airflow: Airflow, stand_in: StandIn, lines: int, jobs: int, seconds: float, takeovers: int) -> list[Any]:
    """The row of one case."""
    engine = sqlalchemy.create_engine(airflow.sql or f"sqlite:///{airflow.database}")

    def ask(query: str) -> Any:
        with engine.connect() as connection:
            return connection.execute(sqlalchemy.text(query)).scalar_one()

    names = ["triggerer"]  # by the number of their job in Airflow, which begins with 1
    while len(names) <= takeovers:
        names.append(f"triggerer-{len(names) + 1}")
        airflow.run("triggerer", names[-1])
        wait_for(
            "another triggerer works",
            lambda: ask("SELECT count(*) FROM job WHERE job_type = 'TriggererJob'") == len(names),
        )
    last, at, apart = wait_for("a triggerer follows all", lambda: follower(airflow, jobs, set())), time.monotonic(), 0.0
    killed: set[int] = set()
    while len(killed) < takeovers:
        killed.add(last)
        airflow.kill(names[last - 1])
        last = wait_for("another triggerer follows all", lambda: follower(airflow, jobs, killed))
        apart, at = time.monotonic() - at, time.monotonic()
        if len(killed) < takeovers:
            time.sleep(APART - HEALTH)
    component = Component(airflow.processes[names[last - 1]].pid)
    component.find_runner()
    time.sleep(seconds)
    before = component.waited()
    began, load, events = time.time(), os.getloadavg()[0], list[float]()
    printed = list(stand_in.ask("/end", {}).values())
    while len(events) < jobs:
        left = ask("SELECT count(*) FROM task_instance WHERE task_id = 'train' AND state = 'deferred'")
        events += [time.time() - began] * (jobs - left - len(events))
        time.sleep(0.05)
    waited = [after - before[name] for name, after in component.waited().items()]
    time.sleep(2.0)  # the last records are written
    found = read(airflow, last, printed)
    logged, counted = sum(len(training.logged) for training in found), sum(training.counted for training in found)
    verdicts = [training.verdict_at - began for training in found if training.verdict_at is not None]
    neither = [lines - len(training.logged) - training.counted for lines, training in zip(printed, found, strict=True)]
    repeated = sum(training.logged.total() - len(training.logged) for training in found)
    others = sum(len(training.before - training.logged.keys()) for training in found)
    inexact = sorted({words for training in found for words in training.inexact})
    if any(neither) or repeated or inexact or len(verdicts) < jobs:
        print(f"wrong: {neither=} {repeated=} {inexact=} {verdicts=}", file=sys.stderr, flush=True)
    return [
        lines, jobs, takeovers, f"{apart:.0f}" if takeovers > 1 else None, seconds, f"{load:.0f}",
        max(verdicts, default=None), quantile(events, 0.5), max(events), *waited, len(verdicts), sum(printed), logged,
        counted, sum(map(abs, neither)), repeated, others,
    ]  # fmt: skip


def follower(airflow: Airflow, jobs: int, killed: set[int]) -> int | None:
    """The number of a triggerer that was not killed and follows all: it has said which lines may come twice."""
    follow = Counter(by for path in airflow.logs() if (by := writer(path)) and b"may be repeated" in path.read_bytes())
    return next((by for by, count in follow.items() if count == jobs and by not in killed), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--lines", type=int, nargs="+", default=[0, 10_000, 1_000_000], help="of all trainings together"
    )
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--seconds", type=float, nargs="+", default=[0, 15], help="from the takeover to the end")
    parser.add_argument("--takeovers", type=int, default=1)
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}; {version()}\n", flush=True)
    rows: list[list[Any]] = []
    for lines, jobs, seconds in itertools.product(args.lines, args.jobs, args.seconds):
        parameters = {"jobs": jobs, "running": jobs, "age": AGE, "lines": lines // jobs}
        names = [job_name(number) for number in range(jobs)]
        tasks = [deferred(name, f"uid-{name}", map_index=n, age=AGE) for n, name in enumerate(names)]
        with database() as sql, triggerer(parameters, tasks, sql, **SETTINGS) as (airflow, _, stand_in, _):
            rows.append(run(airflow, stand_in, lines, jobs, seconds, args.takeovers))
        print(json.dumps(dict(zip(HEAD, rows[-1], strict=True))), file=sys.stderr, flush=True)
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
