"""A cluster that serves Kueue: the embedded one without a queue controller, or a real one with Kueue."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import IMAGE, REAL, TestCluster, cluster

from .driver import Driver
from .library import recording
from .recording import Obj

Replay = Callable[..., Driver]


@pytest.fixture(scope="session")
def kueue() -> Iterator[TestCluster]:
    with cluster(kueue=True, mpi_api="v2beta1") as started:
        yield started


@pytest.fixture
def replay(kueue: TestCluster) -> Replay:
    """Makes a driver of a recording: its name, and the arguments of `Driver`."""

    def make(name: str, **options: Any) -> Driver:
        return driver(kueue.kubeconfig, name, **options)

    return make


def driver(kubeconfig: Path, name: str, **options: Any) -> Driver:
    return Driver(kubeconfig, recording(name), prepare=with_test_image, real=bool(REAL), **options)


def with_test_image(job: Obj) -> Obj:
    """A recorded job whose containers have the image of the tests."""
    prepared = copy.deepcopy(job)
    for key, roles in prepared["spec"].items():
        for role in roles.values() if key.endswith("ReplicaSpecs") else ():
            for container in role["template"]["spec"]["containers"]:
                container["image"] = IMAGE
    return prepared
