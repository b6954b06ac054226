"""The clusters that the scenarios run on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from .driver import Cluster
from .scenario import Scenario, load_all

REAL = os.environ.get("KTRAIN_TEST_KUBECONFIG")
IMAGE = os.environ.get("KTRAIN_TEST_IMAGE", "conformance:1")
# scenarios at a time: they mostly wait
PARALLEL = int(os.environ.get("KTRAIN_TEST_PARALLEL", "4" if REAL else "16"))


class Suite:
    """All chosen scenarios at once, on as many clusters as it takes, in a thread with an event loop of its own."""

    def __init__(self, scenarios: list[Scenario], scratch: Path) -> None:
        # the longest first, so that the last to end began early
        self.scenarios = sorted(scenarios, key=lambda s: s.seconds, reverse=True)
        self.scratch = scratch
        self.results: dict[str, Future[list[str]]] = {s.name: Future() for s in scenarios}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.run()))

    async def run(self) -> None:
        """Each scenario on the cluster that serves its version of MPIJob; where it does not matter on v1."""
        by_api: dict[str, list[Scenario]] = {}
        for scenario in self.scenarios:
            by_api.setdefault(REAL or (scenario.api if scenario.api != "any" else "v1"), []).append(scenario)
        try:
            async with asyncio.TaskGroup() as clusters:
                for api, scenarios in by_api.items():
                    clusters.create_task(self.run_on(api, scenarios))
        except BaseException as e:
            for result in self.results.values():
                if not result.done():
                    result.set_exception(e)

    async def run_on(self, api: str, scenarios: list[Scenario]) -> None:
        with contextlib.ExitStack() as stack:
            if REAL:
                kubeconfig = Path(REAL)
            else:
                from airflow_provider_ktrain.local.cluster import EmbeddedCluster

                started = EmbeddedCluster(images={IMAGE: self.scratch}, nodes=1, gpus_per_node=0, mpi_api=api)
                kubeconfig = stack.enter_context(started).kubeconfig
            async with Cluster(kubeconfig, IMAGE, embedded=not REAL, parallel=PARALLEL).connected() as cluster:
                await asyncio.gather(*(self.run_one(cluster, scenario) for scenario in scenarios))

    async def run_one(self, cluster: Cluster, scenario: Scenario) -> None:
        result = self.results[scenario.name]
        try:
            result.set_result(await cluster.run(scenario))
        except Exception as e:
            result.set_exception(e)


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Runs the scenarios of all tests that are to run, side by side."""
    chosen = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    suite = Suite([s for s in load_all() if s.name in chosen], tmp_path_factory.mktemp("image"))
    suite.thread.start()
    yield suite
    suite.thread.join()


def serves() -> set[str]:
    """What the cluster can run: versions of MPIJob, and `mpirun` if the image has it."""
    if not REAL:
        return {"any", "v1", "v2beta1", "", *(["mpirun"] if shutil.which("mpirun") else [])}
    served: set[str] = set(os.environ.get("KTRAIN_TEST_SERVES", "any,v1").split(","))
    return served | {""}


def pytest_generate_tests(metafunc: Any) -> None:
    if metafunc.function.__name__ == "test_scenario":
        can = serves()
        names = [s.name for s in load_all() if s.api in can and s.needs in can]
        metafunc.parametrize("name", names)
