"""`make chaos`: what is killed, stalled or taken away while a task trains, and what is left of its job then.

After each: as many jobs as there should be were ever created, no pod of a finished task holds a GPU within a minute
(or it is said that the reaper's next run frees it), the task's state is right, and its log tells the truth.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.conftest import DAGS
from tests.e2e.kube import Kube
from tests.e2e.stage import Stage, Watcher

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("e2e")]
Begin = Callable[..., Stage]
AWAY = 60  # seconds without an API server


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster(gpus=64) as reached:
        yield reached


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Its own, which notices within seconds what Airflow notices within minutes by default."""
    dags = tmp_path_factory.mktemp("dags")
    (dags / "chaos.py").symlink_to(DAGS / "chaos.py")
    with running(
        tmp_path_factory.mktemp("airflow"), cluster, dags,
        AIRFLOW__KTRAIN__WORKER_SECONDS="2",
        AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD="8",
        AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC="2",
        AIRFLOW__SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL="2",
        AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT="20",
        AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL="5",
    ) as started:  # fmt: skip
        yield started


@pytest.fixture
def begin(airflow: Airflow, cluster: TestCluster) -> Iterator[Begin]:
    kube = Kube(str(cluster.kubeconfig), cluster.namespace)
    with Watcher(kube) as watcher:
        yield lambda dag, **conf: Stage(airflow, cluster, kube, watcher, dag).start(**conf)


@pytest.fixture
def second(airflow: Airflow) -> Iterator[Airflow]:
    """A second triggerer, and afterwards one that works."""
    airflow.run("triggerer", "triggerer-2")
    wait_for("the second triggerer starts", lambda: b"Trigger" in (airflow.home / "triggerer-2.out").read_bytes())
    yield airflow
    airflow.signal("triggerer-2", signal.SIGKILL)
    airflow.signal("triggerer", signal.SIGKILL)
    airflow.run("triggerer")


def kill_worker(stage: Stage, number: signal.Signals = signal.SIGKILL) -> None:
    (process,) = wait_for("the task's process", stage.airflow.task_processes)
    os.kill(process, number)


def count(seconds: int) -> list[str]:
    return [f"line {i}" for i in range(seconds)]


# the worker


def test_worker_killed_before_the_create(begin: Begin) -> None:
    cluster = begin.__closure__  # noqa: F841
