"""A cluster that serves Kueue: the embedded one without a queue controller, or a real one with Kueue."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.engine.api.client import Api
from tests.clusters import IMAGE, REAL, TestCluster, cluster
from tests.engine.tasks import Task, api_of

from .driver import POLL, Driver
from .library import recording
from .recording import Obj, Recording

Replay = Callable[..., Driver]
REPLAYS = {"replay", "replays", "raw"}  # fixtures that play recordings
ROUND_TRIPS = 8  # more than the requests that a follower makes when a Workload has changed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replays last as long as what was recorded: only `make test-all` runs them."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents and REPLAYS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session")
def kueue() -> Iterator[TestCluster]:
    with cluster(kueue=True, mpi_api="v2beta1") as started:
        yield started


@pytest.fixture
async def api(kueue: TestCluster) -> AsyncIterator[Api]:
    async with api_of(kueue) as api:
        yield api


@pytest.fixture
async def task(kueue: TestCluster, api: Api, request: pytest.FixtureRequest) -> AsyncIterator[Task]:
    """A task whose job isn't controlled by a recording; `of_each_kind` sets its class."""
    made = getattr(request, "param", Task)(api, kueue.namespace)
    yield made
    await made.delete()


@pytest.fixture
def replay(kueue: TestCluster) -> Replay:
    """A function that makes a driver of a recording from its name and the arguments of `Driver`."""

    def make(name: str, **options: Any) -> Driver:
        return driver(kueue.kubeconfig, recording(name), **options)

    return make


def round_trips(api: Api) -> Callable[[threading.Event], None]:
    """Waits in the thread of a `Driver`, until the running event loop has handled what the cluster has reported.

    A number of requests, one after the other, takes longer than what a change causes there, however slow the machine
    is: the cluster has sent the change before it answers the first one.
    """
    loop = asyncio.get_running_loop()

    async def request() -> None:
        for _ in range(ROUND_TRIPS):
            await api.request("GET", "/version")

    def settle(stop: threading.Event) -> None:
        requesting = asyncio.run_coroutine_threadsafe(request(), loop)
        while not requesting.done() and not stop.is_set():
            concurrent.futures.wait([requesting], POLL)
        requesting.cancel()

    return settle


def driver(kubeconfig: Path, recording: Recording, **options: Any) -> Driver:
    return Driver(kubeconfig, recording, prepare=with_test_image, real=bool(REAL), **options)


def with_test_image(recorded: Obj) -> Obj:
    """A recorded object in whose containers the image of the tests is set."""
    prepared = copy.deepcopy(recorded)
    _set_image(prepared)
    return prepared


def _set_image(value: Any) -> None:
    if isinstance(value, dict):
        for key, of in value.items():
            if key in ("containers", "initContainers"):
                for container in of:
                    container["image"] = IMAGE
            elif key == "trainer" and "image" in of:
                of["image"] = IMAGE
            _set_image(of)
    elif isinstance(value, list):
        for of in value:
            _set_image(of)
