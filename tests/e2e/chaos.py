"""Fixtures and checks of the chaos tests, for modules `test_chaos_*.py`. Each module has its own Airflow.

Import them by name: `from tests.e2e.chaos import airflow, begin, check_end, cluster, triggerers`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running
from tests.e2e.conftest import DAGS
from tests.e2e.scenario import Begin, Stage, beginning
from tests.e2e.soak_count import Observed, counted, read_records

QUICK = {  # Airflow notices within seconds what takes minutes by default
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
    "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
    "AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "2",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "AIRFLOW__KTRAIN__WORKER_SECONDS": "2",
}
REAPER = "chaos_reaper"  #: The DAG of the reaper.


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster(gpus=64) as reached:
        yield reached


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow with the chaos DAGs."""
    with chaos_airflow(cluster, tmp_path_factory) as started:
        yield started


@contextlib.contextmanager
def chaos_airflow(cluster: TestCluster, folders: pytest.TempPathFactory, **settings: str) -> Iterator[Airflow]:
    """An Airflow with the DAGs `dags/chaos*.py`.

    :param settings: environment variables of all components.
    """
    dags = folders.mktemp("dags")
    for dag in sorted(DAGS.glob("chaos*.py")):
        (dags / dag.name).symlink_to(dag)
    settings = {**QUICK, "CHAOS_STEPS": str(folders.mktemp("steps")), **settings}
    with running(folders.mktemp("airflow"), cluster, dags, **settings) as started:
        yield started


@pytest.fixture
def begin(airflow: Airflow, cluster: TestCluster) -> Iterator[Begin]:
    """A function that starts a run of a DAG. All fault switches are off afterwards, and the counts are checked."""
    stages: list[Stage] = []
    with beginning(airflow, cluster, stages) as function:
        try:
            yield function
        finally:
            if cluster.embedded:
                cluster.admin("clear")
    for stage in stages:  # the watches are complete
        check_counts(stage)


@pytest.fixture
def triggerers(airflow: Airflow) -> Iterator[Airflow]:
    """For tests that end or stop triggerers: begins with one named `triggerer`; the usual ones run afterwards."""
    if len(airflow.triggerers) > 1:
        airflow.set_triggerers("triggerer")
    yield airflow
    airflow.set_triggerers(*airflow.triggerers)


def check_counts(stage: Stage) -> None:
    """The test's training was not trained twice, deleted alive or set back, unless by the test, and holds no GPU."""
    watcher, prefix = stage.watcher, f"{stage.dag}.{stage.run}."
    mine = [job["metadata"]["uid"] for job in stage.created()]
    folder = stage.airflow.env.get("CHAOS_STEPS")
    steps = read_records(Path(folder)) if folder else {}
    observed = Observed(
        jobs=[watcher.objects[uid] for uid in watcher.order if uid in mine],
        deleted=watcher.deleted,
        suspended=watcher.suspended,
        pods=list(stage.pods.objects.values()),
        records={f"{stage.dag}.{n.removeprefix(prefix)}": r for n, r in steps.items() if n.startswith(prefix)},
    )
    count = counted(observed, [], stage.gpus())
    assert not count.gpus, f"pods hold {count.gpus} GPUs"
    wrong = {what: which for what, which in count.defects.items() if which and what not in stage.excused}
    assert not wrong, wrong


def check_end(stage: Stage, state: str, *, jobs: int = 1, try_number: int = 1) -> None:
    """The task has ended in this state and try, holds no GPU, and created only the expected number of jobs."""
    assert stage.wait_state(state)["try_number"] == try_number
    stage.check_freed()
    stage.check_created(jobs)


def reap(airflow: Airflow) -> str:
    """Let the reaper run; returns the id of its run."""
    run = airflow.trigger(REAPER)
    airflow.wait_state(REAPER, run, "reap", "success")
    return run


def check_reaped(stage: Stage) -> None:
    """No process was left to release the job: the reaper's next run releases it."""
    assert stage.gpus() == 2
    stage.excuse()
    reap(stage.airflow)
    assert stage.gpus() == 0
    stage.check_created(1)
