"""An embedded cluster for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_provider_ktrain.local.cluster import EmbeddedCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[EmbeddedCluster]:
    """One cluster for a whole session: use names of your own, and leave no fault behind."""
    with EmbeddedCluster(images={"busybox": None, "demo": None, "python": None}, gpus_per_node=4) as embedded:
        yield embedded
