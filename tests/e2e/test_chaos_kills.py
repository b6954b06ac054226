"""`make chaos`: SIGTERM with and without a kill: a training ends only if the task has ended in Airflow."""

from __future__ import annotations

import contextlib
import signal

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.chaos import airflow, begin, check_end, check_reaped, cluster, triggerers
from tests.e2e.scenario import Begin, Stage

__all__ = ["airflow", "begin", "cluster", "triggerers"]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def check_adopted(stage: Stage, seconds: int) -> None:
    """The retry followed the only job to its end, and no training was repeated."""
    check_end(stage, "success", try_number=2)
    stage.check_lines(seconds, try_number=2)
    assert "Adopting it." in stage.log(2)


def answers(airflow: Airflow) -> bool:
    with contextlib.suppress(OSError):
        return bool(airflow.call("GET", "/api/v2/monitor/health"))
    return False


def test_sigterm_to_a_worker_that_is_retried(begin: Begin) -> None:
    """A rolling deployment: the task is still running in Airflow."""
    stage = begin("chaos_worker_retries", seconds=40)
    stage.wait_line("[Worker 0] line 3")
    stage.kill_task(signal.SIGTERM)
    check_adopted(stage, 40)
    assert "runs on for the next try" in stage.log(1)


def test_api_server_of_airflow_away_until_the_worker_is_stopped(begin: Begin, airflow: Airflow) -> None:
    """After three failed heartbeats Airflow's supervisor terminates the task, and can't answer why.

    The retry comes a minute later: Airflow fails a try that starts without its API server, before our code runs.
    """
    stage = begin("chaos_retry_in_a_minute", seconds=200)
    stage.wait_line("[Worker 0] line 3")
    (process,) = airflow.task_processes()
    airflow.end("api-server")
    wait_for("the worker is stopped", lambda: process not in airflow.task_processes())
    assert stage.gpus() == 2, "the job trains on"
    airflow.run("api-server")
    wait_for("Airflow's API server answers", lambda: answers(airflow))
    check_adopted(stage, 200)


def test_marked_failed_while_running_with_a_retry(begin: Begin) -> None:
    """A kill by a user ends the training although a retry is left."""
    stage = begin("chaos_worker_retries", seconds=600)
    stage.wait_line("[Worker 0] line 3")
    stage.set_state("failed")
    check_end(stage, "failed")
    assert "The task was killed (failed)" in stage.log(1)


def test_marked_failed_before_the_retry(begin: Begin) -> None:
    """The job was kept for a retry that never comes: the reaper's next run releases it."""
    stage = begin("chaos_retry_in_an_hour", seconds=600)
    stage.wait_line("[Worker 0] line 3")
    stage.kill_task(signal.SIGTERM)
    stage.wait_state("up_for_retry")
    stage.set_state("failed")
    stage.wait_state("failed")
    check_reaped(stage)
