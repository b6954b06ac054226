"""How long a deferred task that is marked failed keeps its pods.

    python benchmarks/kill.py first [--rounds 3] [--kills 2] [--busy 0 4]
    python benchmarks/kill.py many [--waiting 1000] [--kills 100] [--burst 50]

Airflow's own processes and the embedded cluster run on this machine. The time begins before the request that marks the
task failed, and ends when no pod of the job holds a GPU. Prints Markdown tables.

first   the first kills of new triggerers. Each round starts one. `--busy` is the number of additional processes that
        use all the CPU time they get
many    kills in a triggerer that also follows `--waiting` suspended jobs, one after the other, then `--burst` at once,
        and where the time goes. Instead of the embedded cluster, a stand-in for the Kubernetes API runs, whose pods end
        half a second after the deletion. KTRAIN_TEST_DATABASE=postgresql runs it on a PostgreSQL server of its own
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import machine, quantile, table
from harness.api_server import on_free_port
from harness.database import database, version
from harness.standin import job_name
from harness.triggerer import Airflow, StandIn, task, triggerer
from harness.triggerer import wait_for as wait

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests import clusters
from tests.e2e.airflow import running, wait_for
from tests.e2e.conftest import DAGS
from tests.e2e.scenario import Begin, beginning

HEAD = ["busy processes", "load", "kill", "n", "pods gone p50 s", "max s"]
PATIENCE = 600.0  # seconds
SETTINGS = {"AIRFLOW__KTRAIN__WORKER_SECONDS": "2", "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2"}


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Processes that use all the CPU time they get."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def kill(begin: Begin) -> float:
    """Seconds from the request that marks a deferred task failed until its pods are gone."""
    stage = begin("chaos_deferred", seconds=3600)
    stage.wait_followed()
    began = time.monotonic()
    stage.set_state("failed")
    wait_for("the pods are gone", lambda: not stage.gpus(), PATIENCE)
    return time.monotonic() - began


def first_kills(args: argparse.Namespace) -> None:
    """Measure the first kills of new triggerers and print the table."""
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        dags, home = Path(folder, "dags"), Path(folder, "airflow")
        dags.mkdir()
        home.mkdir()
        for dag in sorted(DAGS.glob("chaos*.py")):
            (dags / dag.name).symlink_to(dag)
        with (
            clusters.cluster(gpus=8) as cluster,
            running(home, cluster, dags, **SETTINGS) as airflow,
            beginning(airflow, cluster, []) as begin,
        ):
            for number in args.busy:
                took: list[list[float]] = [[] for _ in range(args.kills or 2)]
                loads = []
                with busy(number):
                    for _ in range(args.rounds):
                        airflow.set_triggerers("triggerer")
                        for times in took:
                            times.append(kill(begin))
                            loads.append(os.getloadavg()[0])
                            print(
                                f"busy {number}, load {loads[-1]:.1f}: {times[-1]:.1f} s", file=sys.stderr, flush=True
                            )
                load = f"{min(loads):.0f} to {max(loads):.0f}"
                rows += [
                    [number, load, n, len(times), quantile(times, 0.5), max(times)] for n, times in enumerate(took, 1)
                ]
    print(table(HEAD, rows))


# many kills

STEPS = {
    "Airflow's API server": ("sent", "answered"),
    "until the triggerer calls on_kill": ("answered", "cancelled"),
    "the task's state, by the supervisor": ("cancelled", "decided"),
    "our release, until the deletion is requested": ("decided", "requested"),
    "the pods' end": ("requested", "gone"),
    "all": ("sent", "gone"),
}


def many_kills(args: argparse.Namespace) -> None:
    """Measure kills beside many waiting jobs and print the table."""
    kills = args.kills or 100
    running = kills + args.burst
    url, settings = on_free_port()
    parameters = {"jobs": running + args.waiting, "running": running}
    tasks = [task(number) for number in range(running + args.waiting)]
    tasks[:running] = [{**t, "task_id": f"kill-{n}", "map_index": -1} for n, t in enumerate(tasks[:running])]
    with database() as sql, triggerer(parameters, tasks, sql, **settings) as (airflow, _, stand_in, _probe):
        airflow.run("api-server")
        token = wait("the API server answers", lambda: _send(f"{url}/auth/token", "GET"))["access_token"]
        rows: list[dict[str, float]] = []
        for number in range(kills):
            rows += _timed(airflow, stand_in, url, token, [number])
            times = {k: round(v - rows[-1]["sent"], 2) for k, v in rows[-1].items() if k != "load"}
            print(json.dumps({"load": rows[-1]["load"], **times}), file=sys.stderr, flush=True)
        burst = _timed(airflow, stand_in, url, token, list(range(kills, running)))
    loads = [row["load"] for row in rows + burst]
    print(f"{version()}; {args.waiting} jobs wait, load {min(loads):.0f} to {max(loads):.0f}\n")
    for name, found in ((f"{kills} kills, one by one, s", rows), (f"{args.burst} kills at once, s", burst)):
        shown: list[list[Any]] = []
        for step, (began, ended) in STEPS.items():
            took = [row[ended] - row[began] for row in found]
            shown.append([step, *(quantile(took, q) for q in (0.5, 0.9, 0.99)), max(took, default=None)])
        print(table([name, "p50", "p90", "p99", "max"], shown) + "\n")


def _timed(airflow: Airflow, stand_in: StandIn, url: str, token: str, numbers: list[int]) -> list[dict[str, float]]:
    """Mark tasks failed; the times of each kill's steps in epoch seconds."""

    def mark(number: int) -> dict[str, float]:
        path = f"{url}/api/v2/dags/bench/dagRuns/r/taskInstances/kill-{number}"
        sent = time.time()
        wait("the task is marked failed", lambda: _send(path, "PATCH", token, {"new_state": "failed"}))
        return {"load": os.getloadavg()[0], "sent": sent, "answered": time.time()}

    with ThreadPoolExecutor(16) as pool:
        marked = dict(zip(map(job_name, numbers), pool.map(mark, numbers), strict=True))

    def freed() -> dict[str, dict[str, float]] | None:
        deletions = stand_in.ask("/stats")["deletions"]
        return deletions if all("gone" in deletions.get(name, {}) for name in marked) else None

    deletions, steps = wait("the pods are gone", freed), airflow.steps()
    found = []
    for name, times in marked.items():
        row = {**times, **{k: steps[name][k] for k in ("cancelled", "decided")}, **deletions[name]}
        row["answered"] = min(row["answered"], row["cancelled"])  # the triggerer may be faster than the response
        found.append(row)
    return found


def _send(url: str, method: str, token: str = "", body: Any = None) -> Any:
    """The JSON of a response, also if the task already has the state (409); None while the server doesn't answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    with contextlib.suppress(OSError):
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:  # an OSError
            if error.code == 409:  # an earlier request was carried out, although its response was an error
                return json.load(error)
    return None


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["first", "many"], default="first")
    parser.add_argument("--rounds", type=int, default=3, help="number of new triggerers")
    parser.add_argument("--kills", type=int, help="kills per triggerer; default: 2, and 100 with `many`")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="numbers of processes that use a CPU each")
    parser.add_argument("--burst", type=int, default=10, help="kills at once, with `many`; SQLite can't carry 20")
    parser.add_argument("--waiting", type=int, default=1000, help="jobs that wait in the same triggerer")
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    (many_kills if args.what == "many" else first_kills)(args)


if __name__ == "__main__":
    main()
