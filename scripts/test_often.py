"""Run pytest often, in another order each time: `test_often.py [--runs N] [--seed SEED] -- ARGUMENTS OF PYTEST`.

Every fourth run has two processes beside it that do nothing but compute. All runs are made, whatever fails; then a
table and each failure with the seed that repeats its order are printed. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUSY_RUNS, BUSY_PROCESSES = 4, 2  # each so many runs, so many processes


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of one run.

    :param passed: number of tests.
    :param failed: names of tests; a run that ends without a report has one entry, its exit status.
    """

    number: int
    seed: int
    busy: bool
    passed: int
    failed: tuple[str, ...]
    seconds: float
    cpu: float

    def __str__(self) -> str:
        beside = f"{BUSY_PROCESSES} busy processes" if self.busy else ""
        minutes = f"{self.seconds / 60:.1f} | {self.cpu / 60:.1f}"
        return f"| {self.number} | {self.seed} | {beside} | {self.passed} | {len(self.failed)} | {minutes} |"


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that only compute, and end with this one at the latest."""
    program = f"import os\nwhile os.getppid() == {os.getpid()}:\n    sum(range(1_000_000))"
    started = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(number)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def run(number: int, seed: int, arguments: Sequence[str], folder: pathlib.Path) -> Run:
    """Run pytest once. Its output goes to a file in `folder`."""
    report, busy = folder / f"{number}.xml", number % BUSY_RUNS == 0
    command = [sys.executable, "-m", "pytest", *arguments, f"--randomly-seed={seed}"]
    began = time.monotonic()
    with busy_processes(BUSY_PROCESSES if busy else 0), (folder / f"{number}.log").open("w") as log:
        before = _cpu_of_children()
        status = subprocess.run(
            [*command, f"--junitxml={report}"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ).returncode
        seconds, cpu = time.monotonic() - began, _cpu_of_children() - before
    passed, failed = results(report) if report.exists() else (0, ())
    if status and not failed:
        failed = (f"pytest ended with exit status {status}",)
    return Run(number, seed, busy, passed, failed, seconds, cpu)


def _cpu_of_children() -> float:
    """CPU seconds of the child processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def results(report: pathlib.Path) -> tuple[int, tuple[str, ...]]:
    """How many tests passed, and which failed, as a JUnit report has them."""
    passed, failed = 0, []
    for case in ET.parse(report).getroot().iter("testcase"):
        found = {child.tag for child in case}
        if found & {"failure", "error"}:
            failed.append(f"{case.get('classname', '')}::{case.get('name', '')}")
        elif "skipped" not in found:
            passed += 1
    return passed, tuple(sorted(set(failed)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=12, help="default: 12")
    parser.add_argument("--seed", type=int, help="of the first run; the next ones follow it. Default: a random one")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    asked = parser.parse_args()
    first = random.Random().getrandbits(31) if asked.seed is None else asked.seed
    folder, runs = pathlib.Path(tempfile.mkdtemp(prefix="ktrain-test-often-")), []
    for number in range(1, asked.runs + 1):
        print(
            f"[test-often] run {number} of {asked.runs}, seed {first + number - 1}: {folder}/{number}.log", flush=True
        )
        runs.append(run(number, first + number - 1, asked.arguments, folder))
    print("\n| run | seed | beside | passed | failed | minutes | CPU minutes |\n|---|---|---|---|---|---|---|")
    print("\n".join(map(str, runs)))
    failures = [(name, made) for made in runs for name in made.failed]
    for name, made in failures:
        print(f"FAILED in run {made.number}: {name} --randomly-seed={made.seed}")
    print(f"\n{len(failures)} failures in {len(runs)} runs")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
