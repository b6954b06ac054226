from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_provider_ktrain.local.cluster import EmbeddedCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[EmbeddedCluster]:
    """A cluster that serves PyTorchJob and MPIJob v1, for all tests here; each uses names of its own."""
    with EmbeddedCluster(images={"scratch": None}, gpus_per_node=8) as embedded:
        yield embedded


@pytest.fixture(scope="session")
def cluster_v2() -> Iterator[EmbeddedCluster]:
    """One that serves MPIJob v2beta1."""
    with EmbeddedCluster(images={"scratch": None}, mpi_api="v2beta1") as embedded:
        yield embedded
