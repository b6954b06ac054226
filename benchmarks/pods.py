"""The time that a change of one pod takes in the event loop, and the longest time that a first list holds it.

    python benchmarks/pods.py [--changes 200]

A stand-in for the API server runs in the same process and event loop. `follow` runs without logs. All pods wait for
nodes first; then one pod after the other gets a node and runs, as when a large job starts. The modules of a triggerer
are imported first: how often Python's garbage collector looks at all objects depends on their number, and so does the
time that this takes. CPU time is measured, because other processes use the machine as well; that of the idle event loop
is subtracted. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import importlib
import logging
import statistics
import sys
import time
from pathlib import Path

from harness import machine, table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engine.large_job import LargeJob

TRIGGERER = (
    "airflow.jobs.triggerer_job_runner",
    "airflow.providers.cncf.kubernetes.hooks.kubernetes",
    "airflow_provider_ktrain.triggers.training",
)
SIZES = (8, 128, 512, 1024, 2048, 5000)


async def probe(longest: list[float]) -> None:
    """Note the CPU time between two turns in the event loop, if it is the longest so far."""
    while True:
        began = time.thread_time()
        await asyncio.sleep(0)
        longest[0] = max(longest[0], 1000 * (time.thread_time() - began))


async def first_list(size: int) -> float:
    """The longest time, in milliseconds of CPU, that the event loop is held until all pods are known and reported."""
    gc.collect()
    job, longest = LargeJob(size), [0.0]
    probing = asyncio.create_task(probe(longest))
    async with job.followed(logging.getLogger("quiet")):
        for _ in range(2 * size // 50):
            await job.handled()
        probing.cancel()
    return longest[0]


async def measure(size: int, changes: int) -> list[object]:
    """Milliseconds of CPU: for a change, the median and the longest; held by the first list."""
    job, milliseconds = LargeJob(size), []
    async with job.followed(logging.getLogger("quiet")):
        for _ in range(2 * size // 50):
            await job.handled()
        began = time.thread_time()
        for _ in range(20):
            await job.handled()
        idle = (time.thread_time() - began) / 20
        for number in range(changes):
            index, phase = (number // 2) % size, ("Pending", "Running")[number % 2]
            began = time.thread_time()
            job.change(index, phase, "node")
            await job.handled()
            milliseconds.append(1000 * (time.thread_time() - began - idle))
    return [size, statistics.median(milliseconds), max(milliseconds), await first_list(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--changes", type=int, default=200)
    changes = parser.parse_args().changes
    logging.getLogger("quiet").setLevel(logging.CRITICAL)
    for module in TRIGGERER:
        importlib.import_module(module)
    rows = [asyncio.run(measure(size, changes)) for size in SIZES]
    print(f"{datetime.date.today()}, {machine()}\n")
    print(
        table(["pods of the job", "CPU ms for a change, median", "longest", "longest hold by the first list, ms"], rows)
    )


if __name__ == "__main__":
    main()
