"""The memory that a waiting job takes in the process that follows it, by what allocated it.

    python benchmarks/memory.py [--jobs 300]

`follow` runs for many suspended jobs, as in a triggerer: they share two watches. A stand-in for the API server runs in
the same process. The jobs are as large as in production: 16 environment variables, volumes, tolerations, managed
fields. Prints a table.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
from pathlib import Path

from harness import machine, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.engine.waiting_jobs import memory_of_jobs  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=300)
    jobs = parser.parse_args().jobs
    found = asyncio.run(memory_of_jobs(jobs))
    rows: list[list[object]] = [["all", found.total() / 1024]]
    for name, size in found.most_common(14):
        rows.append(["/".join(Path(name).parts[-3:]), size / 1024])
    print(f"{datetime.date.today()}, {machine()}\n")
    print(table([f"allocated by, {jobs:,} waiting jobs", "KiB for each job"], rows))


if __name__ == "__main__":
    main()
