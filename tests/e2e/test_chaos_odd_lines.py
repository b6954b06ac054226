"""`make chaos`: the supervisor of a triggerer is killed while it reads odd and long lines; another one takes over."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import time

import pytest

from tests.e2e.airflow import Airflow, descendants, wait_for
from tests.e2e.chaos import airflow, begin, check_end, cluster, triggerers
from tests.e2e.loop_probe import STOP, lag
from tests.e2e.odd_lines import check_lines, odd_lines, read_log, trigger_logs
from tests.e2e.scenario import Begin

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
READ = 500_000  # bytes of the log that are written before the supervisor is killed


def ended(pid: int) -> bool:
    """Whether a process has ended, perhaps without being waited for."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_odd_lines_while_the_supervisor_is_killed(begin: Begin, triggerers: Airflow, tmp_path: pathlib.Path) -> None:
    probe = tmp_path / "probe"
    stage = begin("chaos_odd_lines", probe=str(probe), seconds=600)
    wait_for("the probe runs", probe.exists)
    (first,) = wait_for("a triggerer follows", lambda: trigger_logs(triggerers, stage.dag, stage.run))
    runner = json.loads(probe.read_text().splitlines()[0])["pid"]
    triggerer = triggerers.processes["triggerer"]
    children = descendants(triggerer.pid)
    began = time.time()
    stage.kube.let_go(stage.selector, 1)
    wait_for("some lines are logged", lambda: first.stat().st_size > READ)
    triggerer.send_signal(signal.SIGKILL)
    wait_for("its runner has ended", lambda: ended(runner))
    killed = time.time()
    for pid in children:
        if not ended(pid):
            os.kill(pid, signal.SIGKILL)
    triggerers.run("triggerer", "triggerer-2")
    (second,) = wait_for("another one follows", lambda: trigger_logs(triggerers, stage.dag, stage.run) - {first})
    followed = time.time()
    stage.finish()
    check_end(stage, "success")
    over = time.time()
    pathlib.Path(f"{probe}{STOP}").touch()
    triggerers.wait_state(stage.dag, stage.run, "probe", "success")
    assert lag(probe, 0.99, since=began, until=killed, pid=runner) < 0.05
    assert lag(probe, 0.99, since=followed, until=over) < 0.05
    written = [line for block in odd_lines() for line in block]
    logged = read_log(first).lines
    check_lines(logged, written[: len(logged)])
    logged_again = read_log(second)
    check_lines([*logged_again.again, *logged_again.lines], written, missing=logged_again.counted)
