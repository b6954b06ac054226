"""An executor whose events come late: Airflow fails a deferred task for the end of the worker that has deferred it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.clusters import TestCluster
from tests.e2e.airflow import ROOT, Airflow
from tests.e2e.chaos import begin, chaos_airflow, check_end, cluster
from tests.e2e.scenario import Begin

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
MISMATCH = "finished with state success, but the task instance's state attribute is"


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    settings = {
        "AIRFLOW__CORE__EXECUTOR": "tests.e2e.delayed_executor.DelayedExecutor",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    with chaos_airflow(cluster, tmp_path_factory, **settings) as started:
        yield started


def mismatches(airflow: Airflow) -> int:
    return (airflow.home / "scheduler.out").read_text().count(MISMATCH)


def test_retry_takes_the_job_of_a_try_that_a_late_event_has_failed(begin: Begin, airflow: Airflow) -> None:
    before = mismatches(airflow)
    stage = begin("chaos_deferred_retries", seconds=5)
    check_end(stage, "success", try_number=2)
    assert mismatches(airflow) > before, "the event was not late"
    stage.check_lines(5)


def test_success_that_a_late_event_has_failed_is_not_lost_without_a_word(begin: Begin, airflow: Airflow) -> None:
    """No retry is left: the log shows that the training has succeeded."""
    before = mismatches(airflow)
    stage = begin("chaos_deferred", seconds=5)
    check_end(stage, "failed")
    assert mismatches(airflow) > before, "the event was not late"
    stage.check_lines(5)
    assert "succeeded" in stage.log()
