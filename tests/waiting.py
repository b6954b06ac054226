"""Reports the tests that wait for more than `LONG` of real time, although `WAITS` has no reason for their file.

A plugin of pytest, on Linux: `make waits`. A wait is time in which neither a thread of the process nor a child process
computes, and the main thread doesn't wait for a CPU. On a busy machine other threads wait for a CPU, too, and count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

LONG = 0.5  #: Seconds.
SCHEDULING = Path("/proc/thread-self/schedstat")
WAITED = "waited"
#: The beginning of a test's path, and what such tests wait for.
WAITS: Mapping[str, str] = {
    "embedded_cluster/tests/": "the embedded cluster: `kubectl`, and programs that run in pods",
    "tests/cli/": "`ktrain` in a process of its own, and programs that run in pods",
    "tests/core/test_check_cli.py": "`ktrain check` in a process of its own",
    "tests/core/test_code.py": "a container's shell script",
    "tests/core/test_program.py": "a function that runs in a process of its own",
    "tests/core/test_starter.py": "the starter of a container, and programs that it stops",
    "tests/e2e/": "Airflow's processes",
    "tests/engine/test_log_socket.py": "a socket of Airflow's supervisor that is full",
    "tests/engine/test_phases.py": "programs that run in pods",
    "tests/engine/test_rbac.py": "a cluster with a Role",
    "tests/engine/test_stack_reader.py": "a kubelet that doesn't answer",
    "tests/hooks/": "exec plugins, and a TLS server",
    "tests/job_control/": "programs that run in pods",
    "tests/operators/test_code.py": "programs that run in pods",
    "tests/operators/test_mpi_functions.py": "`mpirun`",
    "tests/operators/test_parse_checks.py": "an import in a process of its own",
    "tests/operators/test_pod_manager.py": "Airflow's PodManager, which polls",
    "tests/operators/test_pod_override.py": "programs that run in pods",
    "tests/operators/test_results.py": "functions that run in pods",
    "tests/operators/test_secrets.py": "a program that prints all characters",
    "tests/operators/test_trainjob_functions.py": "`torchrun`",
    "tests/operators/test_trigger.py": "signals, and a program that floods its log",
    "tests/operators/test_trigger_unread_log.py": "Airflow's triggerer and its supervisor",
    "tests/operators/test_weak_evidence.py": "a function that runs in a pod",
    "tests/plugin/": "Airflow's API server",
    "tests/test_horovod_stand_in.py": "the stand-in for horovodrun",
    "tests/test_captured.py": "pytest in a process of its own",
    "tests/test_import.py": "an import in a process of its own",
    "tests/test_leaks.py": "pytest in a process of its own",
    "tests/test_public.py": "an import in a process of its own",
    "tests/test_pytest_plugin.py": "pytest in a process of its own",
    "tests/test_repeated_runs.py": "pytest in a process of its own",
    "tests/test_wheels.py": "the build of the wheels",
}


class Times(NamedTuple):
    """Seconds."""

    clock: float
    in_queue: float  # the main thread waits for a CPU
    computing: float  # all threads, and child processes that have ended

    @classmethod
    def now(cls) -> Times:
        used = os.times()
        return cls(time.perf_counter(), int(SCHEDULING.read_text().split()[1]) / 1e9, sum(used[:4]))

    def waited_since(self, before: Times) -> float:
        return self.clock - before.clock - (self.in_queue - before.in_queue) - (self.computing - before.computing)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    before = Times.now()
    try:
        return (yield)
    finally:
        if (waited := Times.now().waited_since(before)) > LONG and not item.nodeid.startswith(tuple(WAITS)):
            item.user_properties.append((WAITED, waited))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, seconds in getattr(report, "user_properties", ()):
                if name == WAITED and report.when == "call":
                    terminalreporter.write_line(f"waited {seconds:.1f} s: {report.nodeid}")
