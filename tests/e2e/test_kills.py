"""The shortest of the ways in which a task is killed, under Airflow's own processes: the job goes, and only that job."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from airflow_provider_ktrain.local.cluster import EmbeddedCluster
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube
from tests.e2e.stage import Stage, Watcher

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e")]
Begin = Callable[..., Stage]


@pytest.fixture
def begin(airflow: Airflow, cluster: EmbeddedCluster, kube: Kube) -> Iterator[Begin]:
    with Watcher(kube) as watcher:
        yield lambda dag, **conf: Stage(airflow, cluster, kube, watcher, dag).start(**conf)


def test_mark_failed_while_running(begin: Begin) -> None:
    stage = begin("chaos_worker", seconds=600)
    stage.wait_line("[Worker 0] line")
    stage.set_state("failed")
    stage.check_freed()
    stage.check_created(1)
    assert stage.wait_state("failed")["try_number"] == 1
    assert "the task was killed" in stage.log()


def test_mark_failed_while_deferred(begin: Begin) -> None:
    stage = begin("chaos_deferred", seconds=600)
    stage.wait_state("deferred")
    stage.wait_line("the triggerer follows it")
    stage.set_state("failed")
    stage.check_freed()
    stage.check_created(1)
    assert stage.wait_state("failed")["try_number"] == 1
    assert stage.job() is None


def test_clear_while_deferred_starts_anew(begin: Begin) -> None:
    """The old try's trigger is killed while the new try already runs: it must not touch the new job."""
    stage = begin("chaos_deferred", seconds=25)
    stage.wait_state("deferred")
    stage.clear()
    wait_for("the next try", lambda: stage.airflow.task(stage.dag, stage.run, "train")["try_number"] == 2)
    stage.wait_created(2)
    stage.wait_state("success")
    stage.check_freed()
    stage.check_created(2)
    assert stage.lines(2) == [f"line {i}" for i in range(25)]
