from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from airflow_provider_ktrain.local.cluster import EmbeddedCluster
from tests.e2e.airflow import ROOT, Airflow, running
from tests.e2e.kube import Kube

DAGS = pathlib.Path(__file__).parent / "dags"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    images = {"pytorch-demo": ROOT / "examples" / "demo", "scratch": tmp_path_factory.mktemp("scratch")}
    with EmbeddedCluster(images=images, gpus_per_node=8) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def airflow(cluster: EmbeddedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """Airflow's own processes, with the example DAGs and those of the tests."""
    dags = tmp_path_factory.mktemp("dags")
    for folder in (ROOT / "example_dags", DAGS):
        (dags / folder.parent.name).mkdir(exist_ok=True)
        (dags / folder.parent.name / folder.name).symlink_to(folder)
    with running(tmp_path_factory.mktemp("airflow"), cluster.kubeconfig, dags) as started:
        yield started


@pytest.fixture
def kube(cluster: EmbeddedCluster) -> Kube:
    return Kube(str(cluster.kubeconfig))
