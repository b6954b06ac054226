"""The quickest ways to kill a task, with Airflow's own processes: only the task's own job is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM
from airflow_provider_ktrain.core.kinds import Kind
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.scenario import Begin, beginning, of_each_kind

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-4")]


@pytest.fixture
def begin(airflow: Airflow, cluster: TestCluster) -> Iterator[Begin]:
    with beginning(airflow, cluster, []) as function:
        yield function


@of_each_kind
def test_mark_failed_while_running(begin: Begin, kind: Kind) -> None:
    stage = begin("chaos_worker", kind, seconds=600)
    stage.wait_line(f"[{stage.replicas[1]}] line")
    stage.set_state("failed")
    stage.check_freed()
    stage.check_created(1)
    assert stage.wait_state("failed")["try_number"] == 1
    stage.wait_line("TrainingKilledError: The task was killed")


@of_each_kind
def test_mark_failed_while_deferred(begin: Begin, kind: Kind) -> None:
    stage = begin("chaos_deferred", kind, seconds=600)
    stage.wait_followed()
    stage.set_state("failed")
    stage.check_freed()
    stage.check_created(1)
    assert stage.wait_state("failed")["try_number"] == 1
    wait_for("the job is gone", lambda: stage.job() is None)
    stage.wait_line("2 GPUs released")


def test_trigger_stores_how_a_killed_training_ended(begin: Begin) -> None:
    stage = begin("chaos_deferred", seconds=600)

    def xcom(key: str) -> Any:
        return stage.airflow.xcom(stage.dag, stage.run, "train", key)

    stage.wait_followed()
    wait_for("its trigger has written a status", lambda: xcom(STATUS_XCOM)["host"] == "trigger")
    stage.set_state("failed")
    wait_for("its trigger has stored the end", lambda: xcom(SUMMARY_XCOM)["state"] == "failed")
    assert xcom(SUMMARY_XCOM)["cause"] == xcom(STATUS_XCOM)["cause"]["summary"] == "The task was killed (failed)"
    assert xcom(SUMMARY_XCOM)["usage"]["held"] > 0


@of_each_kind
def test_clear_while_deferred_creates_a_new_job(begin: Begin, kind: Kind) -> None:
    """The old try's trigger is killed while the new try already runs: it must not change the new job."""
    stage = begin("chaos_deferred", kind, seconds=15, seconds_of_first_try=600)
    stage.wait_followed()
    stage.clear()
    stage.wait_try(2)
    stage.wait_created(2)
    stage.wait_state("success")
    stage.check_freed()
    stage.check_created(2)
    stage.check_lines(15, try_number=2)
