"""An embedded cluster for the tests of this directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktrain_embedded.cluster import EmbeddedCluster
from tests.isolation import directory_of_pods


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where containers of the image `workshop` work: what they wait for, a test puts there."""
    return tmp_path_factory.mktemp("workshop")


@pytest.fixture(scope="session")
def cluster(workshop: Path) -> Iterator[EmbeddedCluster]:
    """One cluster for a whole session: use names of your own, and leave no fault behind."""
    images = {"busybox": None, "demo": None, "python": None, "workshop": workshop}
    with contextlib.ExitStack() as stack:
        with directory_of_pods():
            embedded = stack.enter_context(EmbeddedCluster(images=images, gpus_per_node=4))
        yield embedded
