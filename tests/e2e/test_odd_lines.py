"""Odd and long lines through Airflow's own supervisor, which reads them slowly, and which is stopped for a while."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of
from tests.e2e.loop_probe import STOP, lag
from tests.e2e.odd_lines import check_lines, odd_lines, read_log, trigger_logs

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.embedded("its programs see the files of this machine"),
    pytest.mark.xdist_group("e2e-2"),
]
DAG, TASK = "chaos_odd_lines", "train"
STOPPED = 30.0  # seconds


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """These processes don't run."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_odd_lines_while_the_supervisor_is_stopped(airflow: Airflow, kube: Kube, tmp_path: pathlib.Path) -> None:
    probe = tmp_path / "probe"
    supervisor, *others = (airflow.processes[name].pid for name in airflow.triggerers)
    with stopped(*others):  # the same triggerer runs the probe
        run = airflow.trigger(DAG, {"probe": str(probe), "seconds": STOPPED + 2})
        wait_for("the probe runs", probe.exists)
        (file,) = wait_for("a triggerer follows", lambda: trigger_logs(airflow, DAG, run))
        began = time.time()
        with stopped(supervisor):
            kube.let_go(selector_of(DAG, run), 1)
            wait_for("the time has passed", lambda: time.time() - began > STOPPED)
        airflow.wait_state(DAG, run, TASK, "success")
        ended = time.time()
        pathlib.Path(f"{probe}{STOP}").touch()
        airflow.wait_state(DAG, run, "probe", "success")
    assert lag(probe, 0.99, since=began, until=ended) < 0.05
    logged = read_log(file)
    check_lines(logged.lines, [line for block in odd_lines() for line in block], missing=logged.counted)
    assert not logged.again
