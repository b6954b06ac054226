"""The time to start a program in a container, with and without the parent that prints stacks.

    python benchmarks/starter.py [--rounds 40]

Each round starts each contender once, in turn, and measures the wall time and the CPU time of all its processes. The
first round, which compiles modules, doesn't count. Prints a table.
"""

import argparse
import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from harness import table

from airflow_provider_ktrain.core.manifest.code import CodeFile, pack
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.start import ARCHIVE_DIRECTORY, CODE_DIRECTORY, run_with_code

PROGRAMS = {"python -c pass": [sys.executable, "-c", "pass"], "import torch": [sys.executable, "-c", "import torch"]}
VARIANTS = {"without a starter": None, "unpacks code, no stacks": "", "unpacks code, stacks": "ktrain-benchmark"}
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def words(command: list[str], stacks: str | None, directory: str) -> list[str]:
    """The command of a container, as it runs on this machine."""
    if stacks is None:
        return command
    built = run_with_code(build("PyTorchJob", JobOptions(image="i", command=command)), "c", stacks=stacks)
    (container,) = built["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    found = [word.replace(ARCHIVE_DIRECTORY, directory).replace(CODE_DIRECTORY, f"{directory}/code")
             for word in container["command"]]  # fmt: skip
    return [sys.executable, *found[1:]]


def measured(command: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env=ENV)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        os.mkdir(f"{directory}/code")
        with open(f"{directory}/code.tar.gz", "wb") as file:
            file.write(pack([CodeFile("train.py", b"pass")]).archive)
        contenders = {
            (program, variant): words(command, stacks, directory)
            for program, command in PROGRAMS.items()
            for variant, stacks in VARIANTS.items()
        }
        found: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            for name, command in contenders.items():
                run = measured(command)
                if number:
                    found[name].append(run)
    rows = []
    for (program, variant), runs in found.items():
        wall, cpu = zip(*runs, strict=True)
        times = min(wall), statistics.median(wall), min(cpu), statistics.median(cpu)
        rows.append([program, variant, *(round(seconds * 1000, 1) for seconds in times)])
    head = ["program", "start", "wall ms, least", "wall ms, median", "CPU ms, least", "CPU ms, median"]
    print(f"{datetime.date.today()}, {os.cpu_count()} CPUs, Python {platform.python_version()}\n\n{table(head, rows)}")


if __name__ == "__main__":
    main()
