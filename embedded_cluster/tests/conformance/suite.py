"""Runs scenarios side by side and leaves each result in a file: `python -m conformance.suite FOLDER NAME...`.

A process of its own: what pytest does meanwhile must not make it slow to see what the cluster does. It ends when its
standard input does: whoever started it has ended then, however that was.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .driver import Cluster
from .scenario import Scenario, load_all

REAL = os.path.expanduser(os.environ.get("KTRAIN_TEST_KUBECONFIG", ""))
IMAGE = os.environ.get("KTRAIN_TEST_IMAGE", "conformance:1")
# what the cluster can run: versions of MPIJob, `mpirun` and `torch` if the image has them, `trainer`
EMBEDDED = "any,v1,v2beta1,mpirun,trainer,faults" + (",torch" if importlib.util.find_spec("torch") else "")
SERVES = os.environ.get("KTRAIN_TEST_SERVES", "any,v1" if REAL else EMBEDDED).split(",")
NODE_TIMES = 0.05  # a silent node is unreachable after 2 s, and its pods are deleted after 15 s more
# scenarios at a time: they mostly wait
PARALLEL = int(os.environ.get("KTRAIN_TEST_PARALLEL", "4" if REAL else "16"))


def runnable() -> list[Scenario]:
    """The scenarios that the cluster can run, less those that type kubectl where there is none."""
    can, typed = {*SERVES, ""}, shutil.which("kubectl") is not None
    scenarios = [s for s in load_all() if s.api in can and can.issuperset(s.needs.split())]
    scenarios = [s for s in scenarios if not REAL or can.issuperset(s.gates.split())]
    return [s for s in scenarios if typed or not any("kubectl" in step for step in s.steps)]


class Suite:
    """Scenarios, and the folder for `<scenario>.json`: a list of what was not as expected."""

    def __init__(self, folder: Path, scenarios: Iterable[Scenario]) -> None:
        self.folder = folder
        # the longest first, so that the last to end began early
        self.scenarios = sorted(scenarios, key=lambda s: s.seconds, reverse=True)

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
        """Each scenario on the cluster that serves its version of MPIJob (any: v1) and has its feature gates on."""
        by_api: dict[tuple[str, str, bool], list[Scenario]] = {}
        for scenario in self.scenarios:
            api = scenario.api.replace("any", "v2beta1" if scenario.nodes else "v1")
            served = ("real", "", False) if REAL else (api, scenario.gates, bool(scenario.nodes))
            by_api.setdefault(served, []).append(scenario)
        async with asyncio.TaskGroup() as clusters:
            for (api, gates, nodes), scenarios in by_api.items():
                clusters.create_task(self.run_on(api, gates, nodes, scenarios))

    async def run_on(self, api: str, gates: str, nodes: bool, scenarios: list[Scenario]) -> None:
        with contextlib.ExitStack() as stack:
            if REAL:
                kubeconfig = Path(REAL)
            else:
                from ktrain_embedded import EmbeddedCluster

                image = self.folder / "image"
                image.mkdir(exist_ok=True)
                options: dict[str, Any] = {"mpi_api": api, "trainer_status": gates == "TrainJobStatus"}
                if nodes:
                    options |= {"nodes": 2 * PARALLEL, "node_times": NODE_TIMES, "resources": {"cpu": "2"}}
                started = EmbeddedCluster(images={IMAGE: None if nodes else image}, gpus_per_node=0, **options)
                kubeconfig = stack.enter_context(started).kubeconfig
            async with Cluster(kubeconfig, IMAGE, parallel=PARALLEL).connected() as cluster:
                alone = [s for s in scenarios if s.alone and cluster.embedded]
                beside = [s for s in scenarios if s not in alone]
                await asyncio.gather(*(self.run_one(cluster, s) for s in beside))
                for scenario in alone:
                    await self.run_one(cluster, scenario)

    async def run_one(self, cluster: Cluster, scenario: Scenario) -> None:
        try:
            found = await cluster.run(scenario)
        except Exception:
            found = [traceback.format_exc()]
        self.report(scenario, found)


def end_with_stdin() -> None:
    """Interrupt this process when its standard input ends, so that it stops its clusters."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)  # to stop them
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_stdin()
    names = set(sys.argv[2:])
    Suite(Path(sys.argv[1]), (s for s in runnable() if s.name in names)).run()
