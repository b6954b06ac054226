"""The clusters that the scenarios run on, and the running of all of them side by side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from .driver import Cluster
from .scenario import Scenario, load_all

REAL = os.path.expanduser(os.environ.get("KTRAIN_TEST_KUBECONFIG", ""))
IMAGE = os.environ.get("KTRAIN_TEST_IMAGE", "conformance:1")
# what the cluster can run: versions of MPIJob, and `mpirun` if the image has it
SERVES = os.environ.get("KTRAIN_TEST_SERVES", "any,v1" if REAL else "any,v1,v2beta1,mpirun").split(",")
# scenarios at a time: they mostly wait
PARALLEL = int(os.environ.get("KTRAIN_TEST_PARALLEL", "4" if REAL else "16"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames and "suite" in metafunc.fixturenames:
        can = {*SERVES, ""}
        metafunc.parametrize(
            "scenario", [s for s in load_all() if s.api in can and s.needs in can], ids=lambda s: s.name
        )


class Suite:
    """Runs all scenarios at once, in a thread with an event loop of its own, and leaves each result in a file.

    Files, because the processes of pytest-xdist share them: the first one runs all scenarios, the others read.
    """

    def __init__(self, folder: Path, scenarios: list[Scenario]) -> None:
        self.folder = folder
        # the longest first, so that the last to end began early
        self.scenarios = sorted(scenarios, key=lambda s: s.seconds, reverse=True)
        self.thread = threading.Thread(target=self.run)

    def result(self, scenario: Scenario) -> list[str]:
        path = self.folder / f"{scenario.name}.json"
        while not path.exists():
            time.sleep(0.1)
        found: list[str] = json.loads(path.read_text())
        return found

    def report(self, scenario: Scenario, found: list[str]) -> None:
        path = self.folder / f"{scenario.name}.json"
        if not path.exists():
            path.with_suffix(".new").write_text(json.dumps(found))
            path.with_suffix(".new").rename(path)

    def run(self) -> None:
        try:
            asyncio.run(self.run_all())
        except Exception:
            for scenario in self.scenarios:
                self.report(scenario, [traceback.format_exc()])

    async def run_all(self) -> None:
        """Each scenario on the cluster that serves its version of MPIJob, and where that does not matter on v1."""
        by_api: dict[str, list[Scenario]] = {}
        for scenario in self.scenarios:
            by_api.setdefault("real" if REAL else scenario.api.replace("any", "v1"), []).append(scenario)
        async with asyncio.TaskGroup() as clusters:
            for api, scenarios in by_api.items():
                clusters.create_task(self.run_on(api, scenarios))

    async def run_on(self, api: str, scenarios: list[Scenario]) -> None:
        with contextlib.ExitStack() as stack:
            if REAL:
                kubeconfig = Path(REAL)
            else:
                from airflow_provider_ktrain.local.cluster import EmbeddedCluster

                image = self.folder / "image"
                image.mkdir(exist_ok=True)
                started = EmbeddedCluster(images={IMAGE: image}, nodes=1, gpus_per_node=0, mpi_api=api)
                kubeconfig = stack.enter_context(started).kubeconfig
            async with Cluster(kubeconfig, IMAGE, embedded=not REAL, parallel=PARALLEL).connected() as cluster:
                alone = [s for s in scenarios if s.alone and not REAL]
                await asyncio.gather(*(self.run_one(cluster, s) for s in scenarios if s not in alone))
                for scenario in alone:
                    await self.run_one(cluster, scenario)

    async def run_one(self, cluster: Cluster, scenario: Scenario) -> None:
        try:
            self.report(scenario, await cluster.run(scenario))
        except Exception:
            self.report(scenario, [traceback.format_exc()])


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Runs the scenarios of all tests that are to run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "conformance"
    tests = [item for item in request.session.items if "suite" in getattr(item, "fixturenames", ())]
    suite = Suite(folder, [item.callspec.params["scenario"] for item in tests])
    try:
        folder.mkdir()
    except FileExistsError:
        yield suite
        return
    suite.thread.start()
    yield suite
    suite.thread.join()
