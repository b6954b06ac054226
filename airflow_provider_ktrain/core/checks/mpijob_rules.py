"""Rules for MPIJobs only."""

from __future__ import annotations

import re
from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import ERROR, WARNING
from airflow_provider_ktrain.core.kinds.mpijob import MPIJOB

_MPIRUN = re.compile(  # -n may also be an argument of the program, after its name
    r"\b(?:mpirun|mpiexec|horovodrun)(?:[^;|&\n]*?\s(?=--?np\b)|(?:\s+--[\w-]+)*\s+)(--?np|-n)[=\s]+['\"]?(\d+)\b"
)


@rule("launcher-count", ERROR, MPIJOB)
def launcher_count(job: Job) -> Iterator[Finding]:
    """There is one Launcher."""
    launcher = job.replicas.get("Launcher")
    if job.replicas and "launcher" not in {role.lower() for role in job.replicas}:
        at = job.replica_specs["Launcher"]
        yield Finding(at, "the MPIJob has no Launcher", "nothing", "one replica", "add a Launcher")
    elif launcher and launcher.count != 1:
        replicas, found = launcher.at["replicas"], str(launcher.count)
        yield Finding(replicas, "an MPIJob must have one Launcher", found, "1", "set Launcher.replicas to 1")


@rule("worker-count", ERROR, MPIJOB)
def worker_count(job: Job) -> Iterator[Finding]:
    """There are Workers."""
    worker = job.replicas.get("Worker")
    if job.replicas and "worker" not in {role.lower() for role in job.replicas}:
        message = "the MPIJob has no Workers: the Launcher runs alone"
        yield Finding(job.replica_specs["Worker"], message, "nothing", "Worker", "add Workers", WARNING)
    elif worker and worker.count == 0:
        level = ERROR if job.operator.rejects_after_creation else WARNING
        found = str(worker.count) if worker.at["replicas"].present else "nothing, which means 0"
        message = "the MPIJob has no Workers"
        yield Finding(worker.at["replicas"], message, found, "at least 1", "set Worker.replicas", level)


@rule("mpi-processes", WARNING, MPIJOB)
def mpi_processes(job: Job) -> Iterator[Finding]:
    """mpirun and horovodrun start as many processes as there are slots."""
    worker, launcher = job.replicas.get("Worker"), job.replicas.get("Launcher")
    if not worker or not launcher or not worker.count:
        return
    per_pod = job.spec[MPIJOB.form.processes_field].number or 1
    slots = per_pod * (worker.count + bool(job.spec["runLauncherAsWorker"].value))
    low = max(launcher.numbers(r"--?min[-_]np"), default=None, key=lambda number: number[0])
    high = max(launcher.numbers(r"--?max[-_]np"), default=None, key=lambda number: number[0])
    if low and low[0] > slots:
        hint = "add Workers, or lower it"
        yield Finding(low[1], "fewer slots than --min-np", f"{slots} slots", f"at least {low[0]}", hint)
    for match in re.finditer(_MPIRUN, launcher.command_line) if low is None else ():
        if int(match[2]) > slots and "oversubscribe" not in launcher.command_line:
            at = launcher.word(match[1])
            hint = "lower it, or add Workers or slotsPerWorker"
            yield Finding(at, "mpirun refuses more processes than slots", match[2], f"at most {slots}", hint)
    if high and high[0] < slots:
        message = "more slots than --max-np: some stay unused"
        yield Finding(high[1], message, f"{slots} slots", f"at most {high[0]}", "raise it")
