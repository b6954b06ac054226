"""`make soak`: short trainings with a real Airflow while its processes and the API server are killed at random.

    python -m tests.e2e.soak --trainings 200 --seed 7

No task is killed by a user, and all limits are longer than what a training needs but shorter than an outage of the
Kubernetes API server. Pods of some trainings are evicted, and their nodes drained; these programs save and exit with 0.
So each training must succeed, run only once, reach its last step, and leave no objects. Watches of all jobs and pods
and the programs' own records count the results from outside: see `soak_count`. Exits with 1 if a training was repeated
or set back, or has succeeded without its last step, a job was deleted alive, a GPU is still held, or a task has not
succeeded. In this case the logs, the processes' output and what was observed are kept.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
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
from typing import Any

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from tests import clusters
from tests.e2e import database
from tests.e2e.airflow import ROOT, Airflow, running
from tests.e2e.chaos import QUICK
from tests.e2e.conftest import DAGS
from tests.e2e.disturbances import EVICTED, Disturbances
from tests.e2e.kube import Kube
from tests.e2e.scenario import UNAVAILABLE, Watcher
from tests.e2e.soak_count import LIMITS, Count, Observed, counted, read_records

KINDS = (PYTORCHJOB, MPIJOB, TRAINJOB)
DAG_IDS = (
    *(f"soak_{kind.plural}_{host}" for kind in KINDS for host in ("deferred", "worker")),
    *(f"{EVICTED}{kind.plural}" for kind in KINDS),  # deferrable, except for the MPIJobs
)
FREED_WITHIN = (
    180.0  # seconds from the end of the last task until no pod may hold a GPU; an outage takes up to 60 of them
)
CHECK_INTERVAL = 3.0  # seconds between two checks of the tasks
SETTINGS = {
    **QUICK,
    "SOAK_LIMITS": json.dumps(LIMITS),
    "AIRFLOW__CORE__PARALLELISM": "6",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "45",  # longer than Airflow's API server is unavailable
    # a worker that is killed before it has started its task leaves the task queued
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "60",
    "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "10",
    "AIRFLOW__SCHEDULER__NUM_STUCK_IN_QUEUED_RETRIES": "30",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=200, help="how many, rounded up to 9; default: 200")
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
    commit = current_commit()  # before the run, in which somebody may commit
    print(f"soak: {trainings} trainings on {database.version()}, commit {commit}, seed {seed}", flush=True)
    home = pathlib.Path(tempfile.mkdtemp(prefix="ktrain-soak-"))
    count, disturbances, seconds = soak(home, trainings, seed, minutes * 60)
    print(table(commit, trainings, seed, seconds, count, disturbances.done))
    for title, names in {**count.defects, "limit passed": count.limits_passed}.items():
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
    (home / "steps").mkdir()
    settings = {**SETTINGS, "SOAK_TRAININGS": str(trainings // len(DAG_IDS)), "SOAK_STEPS": str(home / "steps")}
    with (
        clusters.cluster(gpus=128, nodes=2, mpi_api="v2beta1") as cluster,
        running(home / "airflow", cluster, dags, **settings) as airflow,
    ):
        kubes = [Kube(str(cluster.kubeconfig), cluster.namespace, kind) for kind in KINDS]
        with contextlib.ExitStack() as stack:
            pods = stack.enter_context(Watcher(kubes[0], pods=True))
            jobs = [stack.enter_context(Watcher(kube)) for kube in kubes]
            started = time.monotonic()
            runs = {dag_id: airflow.trigger(dag_id) for dag_id in DAG_IDS}
            disturbances = Disturbances(airflow, cluster, random.Random(seed))
            tasks = _disturb_until_ended(airflow, runs, trainings, disturbances, started + limit)
            seconds = time.monotonic() - started
            disturbances.end()
            gpus = gpus_left(kubes[0])
        observed = Observed(
            jobs=[watcher.objects[uid] for watcher in jobs for uid in watcher.order],
            deleted=set().union(*(watcher.deleted for watcher in jobs)),
            suspended=set().union(*(watcher.suspended for watcher in jobs)),
            pods=list(pods.objects.values()),
            records=read_records(home / "steps"),
        )
        (home / "observed.json").write_text(json.dumps(vars(observed), default=list))
        return counted(observed, tasks, gpus), disturbances, seconds


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


def current_commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


def table(commit: str, trainings: int, seed: int, seconds: float, count: Count, done: dict[str, int]) -> str:
    """The report as a table."""
    rows = {
        "date, commit": f"{datetime.date.today()}, {commit}",
        "database, triggerers": f"{database.version()}, {1 if database.selected() == database.SQLITE else 2}",
        "trainings: deferrable, in workers, of these with evictions and drains": f"{trainings * 5 // 9}, "
        f"{trainings * 4 // 9}, {trainings // 3}",
        "of them PyTorchJobs, MPIJobs, TrainJobs": ", ".join([str(trainings // len(KINDS))] * len(KINDS)),
        "seed, minutes": f"{seed}, {seconds / 60:.0f} (Python {platform.python_version()})",
        "disturbances": f"{sum(done.values())}: " + ", ".join(f"{n} × {what}" for what, n in sorted(done.items())),
        "tasks by state": ", ".join(f"{n} {state}" for state, n in sorted(count.states.items())),
        "tries": str(count.tries),
        "jobs created": str(count.created),
        "limits passed by the cluster's timestamps": str(len(count.limits_passed)),
        "**trained twice**": str(len(count.repeated)),
        "**deleted alive**": str(len(count.deleted_alive)),
        "**set back**": str(len(count.set_back)),
        "**succeeded without their last step**": str(len(count.incomplete)),
        "**GPUs left**": str(count.gpus),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
