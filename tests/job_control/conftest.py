from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests import clusters
from tests.clusters import TestCluster
from tests.job_control.jobs import Jobs


@pytest.fixture(scope="session")
def cluster() -> Iterator[TestCluster]:
    """A cluster with 8 GPUs that serves PyTorchJob and MPIJob v1, shared by all tests here; each uses unique names."""
    with clusters.cluster(gpus=8) as reached:
        yield reached


@pytest.fixture(scope="session")
def cluster_v2() -> Iterator[TestCluster]:
    """A cluster that serves MPIJob v2beta1."""
    with clusters.cluster(gpus=8, mpi_api="v2beta1") as reached:
        yield reached


@pytest.fixture
def jobs(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs in the namespace of the connection `kubernetes_default`; they are deleted at the end."""
    yield from _jobs(cluster, monkeypatch)


@pytest.fixture
def jobs_v2(cluster_v2: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    yield from _jobs(cluster_v2, monkeypatch)


def _jobs(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    extra = {"kube_config_path": str(cluster.kubeconfig), "namespace": cluster.namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    with Jobs(cluster) as made:
        yield made
