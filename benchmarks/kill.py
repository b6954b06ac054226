"""How long a deferred task that is marked failed keeps its pods: the first kills of a new triggerer.

    python benchmarks/kill.py [--rounds 3] [--kills 2] [--busy 0 4]

Airflow's own processes and the embedded cluster run on this machine. Each round starts a new triggerer. `--busy` is the
number of additional processes that use all the CPU time they get. The time begins before the request that marks the
task failed, and ends when no pod of the job holds a GPU. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import machine, quantile, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests import clusters
from tests.e2e.airflow import running, wait_for
from tests.e2e.chaos import CHAOS_DAGS
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


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="number of new triggerers")
    parser.add_argument("--kills", type=int, default=2, help="kills per triggerer")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4], help="numbers of processes that use a CPU each")
    args = parser.parse_args()
    print(f"{datetime.date.today()}; {machine()}\n", flush=True)
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        dags, home = Path(folder, "dags"), Path(folder, "airflow")
        dags.mkdir()
        home.mkdir()
        for dag in CHAOS_DAGS:
            (dags / dag.name).symlink_to(dag)
        with (
            clusters.cluster(gpus=8) as cluster,
            running(home, cluster, dags, **SETTINGS) as airflow,
            beginning(airflow, cluster) as begin,
        ):
            for number in args.busy:
                took: list[list[float]] = [[] for _ in range(args.kills)]
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


if __name__ == "__main__":
    main()
