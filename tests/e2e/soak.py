"""`make soak`: short trainings with a real Airflow while its processes and the API server are killed at random.

    python -m tests.e2e.soak --trainings 200 --seed 7

No task is killed by a user, so each training must succeed, run only once, and leave no objects. A watch of all jobs
counts the results from outside. Exits with 1 if a training was repeated, a job was deleted alive, a GPU is still held,
or a task has not succeeded. In this case the logs and the processes' output are kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import logging
import math
import pathlib
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.identity import PREFIX
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from tests import clusters
from tests.e2e import database
from tests.e2e.airflow import ROOT, Airflow, running
from tests.e2e.chaos import QUICK
from tests.e2e.conftest import DAGS
from tests.e2e.disturbances import Disturbances
from tests.e2e.kube import Kube
from tests.e2e.scenario import UNAVAILABLE, Watcher, terminal

KINDS = (PYTORCHJOB, MPIJOB, TRAINJOB)
DAG_IDS = tuple(f"soak_{kind.plural}_{host}" for kind in KINDS for host in ("deferred", "worker"))
FREED_WITHIN = 120.0  # seconds from the end of the last task until no pod may hold a GPU
CHECK_INTERVAL = 3.0  # seconds between two checks of the tasks
SETTINGS = {
    **QUICK,
    "AIRFLOW__CORE__PARALLELISM": "6",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "45",  # longer than the API server is unavailable
    # a worker that is killed before it has started its task leaves the task queued
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "60",
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__NUM_STUCK_IN_QUEUED_RETRIES": "30",
}
LABELS = tuple(f"{PREFIX}/{name}" for name in ("dag-id", "run-id", "task-id", "map-index"))


@dataclass
class Count:
    """The results of the trainings; `repeated`, `deleted_alive` and `failed` name the jobs and tasks."""

    created: int = 0
    repeated: list[str] = field(default_factory=list)
    deleted_alive: list[str] = field(default_factory=list)
    gpus: int = 0
    states: collections.Counter[str] = field(default_factory=collections.Counter)
    tries: int = 0

    def clean(self) -> bool:
        only_successes = set(self.states) == {"success"}
        return not self.repeated and not self.deleted_alive and not self.gpus and only_successes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=200, help="how many, rounded up to 6; default: 200")
    parser.add_argument("--seed", type=int, default=None, help="of the random disturbances; default: a new one")
    parser.add_argument("--minutes", type=float, default=None, help="limit; default: 5 + half a minute per training")
    options = parser.parse_args()
    if reason := database.missing():
        print(f"skipped: {reason}")
        return 0
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # retries while the API server is unavailable
    trainings = math.ceil(options.trainings / len(DAG_IDS)) * len(DAG_IDS)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    minutes = options.minutes or 5 + trainings / 2
    print(f"soak: {trainings} trainings on {database.version()}, seed {seed}", flush=True)
    home = pathlib.Path(tempfile.mkdtemp(prefix="ktrain-soak-"))
    count, disturbances, seconds = soak(home, trainings, seed, minutes * 60)
    print(table(trainings, seed, seconds, count, disturbances.done))
    for title, names in (("trained twice", count.repeated), ("deleted alive", count.deleted_alive)):
        for name in names:
            print(f"{title}: {name}")
    if count.clean():
        shutil.rmtree(home, ignore_errors=True)
        return 0
    print(f"FAILED. Logs and the output of all processes: {home}")
    return 1


def soak(home: pathlib.Path, trainings: int, seed: int, limit: float) -> tuple[Count, Disturbances, float]:
    """Run all trainings to their end. Returns the counts, the disturbances, and the duration in seconds."""
    dags = home / "dags"
    dags.mkdir()
    (dags / "soak.py").symlink_to(DAGS / "soak.py")
    (home / "airflow").mkdir()
    settings = {**SETTINGS, "SOAK_TRAININGS": str(trainings // len(DAG_IDS))}
    with (
        clusters.cluster(gpus=64, mpi_api="v2beta1") as cluster,
        running(home / "airflow", cluster, dags, **settings) as airflow,
        contextlib.ExitStack() as stack,
    ):
        kubes = [Kube(str(cluster.kubeconfig), cluster.namespace, kind) for kind in KINDS]
        watchers = [stack.enter_context(Watcher(kube)) for kube in kubes]
        started = time.monotonic()
        runs = {dag_id: airflow.trigger(dag_id) for dag_id in DAG_IDS}
        disturbances = Disturbances(airflow, cluster, random.Random(seed))
        tasks = _disturb_until_ended(airflow, runs, trainings, disturbances, started + limit)
        seconds = time.monotonic() - started
        disturbances.end()
        jobs = [watcher.jobs[uid] for watcher in watchers for uid in watcher.order]
        count = counted(jobs, set().union(*(watcher.deleted for watcher in watchers)), tasks)
        count.gpus = gpus_left(kubes[0])
        return count, disturbances, seconds


def _disturb_until_ended(
    airflow: Airflow, runs: dict[str, str], trainings: int, disturbances: Disturbances, end: float
) -> list[dict[str, Any]]:
    """Disturb at random until each task has ended or the time is up; returns the tasks."""
    next_check = report = time.monotonic()
    tasks: list[dict[str, Any]] = []
    while time.monotonic() < end:
        disturbances.next()
        if time.monotonic() < next_check:
            continue
        next_check = time.monotonic() + CHECK_INTERVAL
        with contextlib.suppress(OSError, AssertionError):  # Airflow's API server was killed or isn't ready yet
            tasks = [task for dag_id, run in runs.items() for task in airflow.tasks(dag_id, run)]
        states = collections.Counter(str(task["state"]) for task in tasks)
        if time.monotonic() > report:
            print(f"  {time.strftime('%H:%M:%S')} {dict(states)}; last: {disturbances.last}", flush=True)
            report = time.monotonic() + 30
        if len(tasks) >= trainings and states["success"] + states["failed"] == len(tasks):
            break
    return tasks


def counted(jobs: Iterable[dict[str, Any]], deleted: Collection[str], tasks: list[dict[str, Any]]) -> Count:
    """The results of the trainings.

    :param jobs: all jobs ever created, in their last state, those of one training in order of creation.
    :param deleted: the uids of deleted jobs.
    :param tasks: as Airflow's API returns them.
    """
    count = Count()
    by_training = collections.defaultdict(list)
    for job in jobs:
        count.created += 1
        labels = job["metadata"].get("labels") or {}
        by_training[tuple(labels.get(name) for name in LABELS)].append(job)
        if job["metadata"]["uid"] in deleted and not terminal(job):
            count.deleted_alive.append(_described(job))
    for of_one in by_training.values():
        succeeded = [terminal(job) == "Succeeded" for job in of_one]
        # any job created after a successful one repeats its training
        count.repeated += [_described(job) for n, job in enumerate(of_one) if any(succeeded[:n])]
    count.states.update(str(task["state"]) for task in tasks)
    count.tries = sum(task["try_number"] for task in tasks)
    return count


def _described(job: dict[str, Any]) -> str:
    labels = job["metadata"].get("labels") or {}
    return f"{job['metadata']['name']} of {'/'.join(str(labels.get(name)) for name in LABELS)}"


def gpus_left(kube: Kube) -> int:
    """GPUs that pods still hold after the time that they have to end."""
    end = time.monotonic() + FREED_WITHIN
    held = 0
    while time.monotonic() < end:
        try:
            held = kube.gpus_held()
        except UNAVAILABLE:
            held = -1
        if held == 0:
            return 0
        time.sleep(1)
    return held


def table(trainings: int, seed: int, seconds: float, count: Count, done: dict[str, int]) -> str:
    """The report in the format of docs/contributing/guarantees-tests.md."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    rows = {
        "date, commit": f"{datetime.date.today()}, {commit.strip() or 'unknown'}",
        "database, triggerers": f"{database.version()}, {1 if database.selected() == database.SQLITE else 2}",
        "trainings: deferrable, in workers": f"{trainings // 2}, {trainings // 2}",
        "of them PyTorchJobs, MPIJobs, TrainJobs": ", ".join([str(trainings // len(KINDS))] * len(KINDS)),
        "seed, minutes": f"{seed}, {seconds / 60:.0f} (Python {platform.python_version()})",
        "disturbances": f"{sum(done.values())}: " + ", ".join(f"{n} × {what}" for what, n in sorted(done.items())),
        "tasks by state": ", ".join(f"{n} {state}" for state, n in sorted(count.states.items())),
        "tries": str(count.tries),
        "jobs created": str(count.created),
        "**trained twice**": str(len(count.repeated)),
        "**deleted alive**": str(len(count.deleted_alive)),
        "**GPUs left**": str(count.gpus),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
