from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

from tests import clusters
from tests.clusters import TestCluster
from tests.e2e.airflow import ROOT, Airflow, running
from tests.e2e.kube import Kube

DAGS = pathlib.Path(__file__).parent / "dags"
FEATURES = "test_features.py"  #: The only tests that `make test` runs of those that need Airflow.
EXAMPLES = {  # image -> its directory below examples/
    "pytorch-demo": "demo",
    "pytorch-mnist": "mnist",
    "mpi-pi": "mpi",
    "horovod/horovod": os.environ.get("KTRAIN_TEST_HOROVOD", "horovod"),  # the real one: `make test-horovod`
    "registry.sensetime.com/share/platform/pytorch/pytorch": "allreduce",
}

PATIENCE = {  # on a loaded machine, a process may send no heartbeat for longer than Airflow's default of 30 s
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "300",
    "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "300",
    "AIRFLOW__TRIGGERER__RUNNER_HEALTH_CHECK_THRESHOLD": "300",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DAGS.parent in item.path.parents:
            if item.get_closest_marker("e2e") and item.path.name != FEATURES:
                item.add_marker(pytest.mark.thorough)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(1500))


@pytest.fixture(scope="package")
def cluster() -> Iterator[TestCluster]:
    images = {name: ROOT / "examples" / directory for name, directory in EXAMPLES.items()}
    resources = {"cpu": "64", "memory": "256Gi", "rdma/hca": "8"}
    with clusters.cluster(images=images, nodes=4, gpus=8, resources=resources) as reached:
        yield reached


@pytest.fixture(scope="package")
def airflow(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow's own processes, with the example DAGs and those of the tests.

    With pytest-xdist, the groups `e2e-1` to `e2e-4` of about equal length have an Airflow each. It ends with the last
    of these tests: an idle one uses an eighth of a core.
    """
    dags = tmp_path_factory.mktemp("dags")
    for folder in (ROOT / "example_dags", DAGS):
        (dags / folder.parent.name).mkdir(exist_ok=True)
        (dags / folder.parent.name / folder.name).symlink_to(folder)
    settings = {
        **PATIENCE,
        "TEST_CHECKPOINTS": str(tmp_path_factory.mktemp("checkpoints")),
        "KTRAIN_CHECKPOINTS": str(tmp_path_factory.mktemp("ktrain") / "daily"),
        "KTRAIN_MODELS": str(tmp_path_factory.mktemp("ktrain") / "models"),
        "KTRAIN_SWEEPS": str(tmp_path_factory.mktemp("ktrain") / "sweeps"),
        "KTRAIN_REAPER_DRY_RUN": "false",
        "KTRAIN_REAPER_CONFIRM_AFTER": "2",
    }
    with running(tmp_path_factory.mktemp("airflow"), cluster, dags, **settings) as started:
        yield started


@pytest.fixture
def kube(cluster: TestCluster) -> Kube:
    return Kube(str(cluster.kubeconfig), cluster.namespace)
