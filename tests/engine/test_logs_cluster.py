"""Logs of real processes over HTTP: numbered lines, while connections and streams are cut and pods come and go."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError
from airflow_provider_ktrain.engine.api.request_errors import retry_transient
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.watch.informer import Subscription, shared_informer
from tests import clusters
from tests.clusters import TestCluster
from tests.engine.tasks import api_of
from tests.until import until

from .watching import changes

pytestmark = [pytest.mark.thorough, pytest.mark.embedded("sets fault switches")]

#: Numbers its lines from 0. At SIGTERM or after a given count, it writes a last line and exits with the given code.
WRITER = """
import signal, sys, time
lines, code = int(sys.argv[1]), int(sys.argv[2])
def stop(*_):
    global lines
    lines = 0
signal.signal(signal.SIGTERM, stop)
n = 0
while n < lines:
    print("line", n, "é" * (n * 7 % 50), flush=True)
    n += 1
    time.sleep(0.005)
print("last", n, flush=True)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster(gpus=0) as reached:
        yield reached


class CollectedLines:
    """A sink that keeps the lines of each run of each container."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, int], list[str]] = defaultdict(list)
        self.notices: list[str] = []

    def __call__(self, line: LogLine) -> None:
        if line.notice:
            self.notices.append(line.text)
        else:
            self.runs[line.pod, line.restart].append(line.text)

    @property
    def lines(self) -> int:
        return sum(map(len, self.runs.values()))

    def broken(self) -> dict[tuple[str, int], list[str]]:
        """Runs with a missing, repeated or misplaced line, and the lines around that line."""
        found = {}
        for run, texts in self.runs.items():
            words = [" ".join(text.split()[:2]) for text in texts]
            expected = [*(f"line {n}" for n in range(len(texts) - 1)), f"last {len(texts) - 1}"]
            wrong = next((n for n, pair in enumerate(zip(words, expected, strict=True)) if len(set(pair)) > 1), None)
            if wrong is not None:
                found[run] = words[max(wrong - 2, 0) : wrong + 3]
        return found


class WritingPods:
    """Pods that write logs, and a follower that observes them through a watch."""

    def __init__(self, cluster: TestCluster, api: Api, test: str) -> None:
        self.cluster, self.api, self.test = cluster, api, test
        self.collected = CollectedLines()
        self.follower = LogFollower(api, self.collected, kind=PYTORCHJOB)
        self.pods: dict[str, dict[str, Any]] = {}
        self.calm = False

    async def write(self, name: str, lines: int, code: int = 0) -> None:
        """Create a pod whose container writes lines and exits with `code`. It restarts unless the code is 0."""
        labels = {"test": self.test, **{f"training.kubeflow.org/replica-{k}": v for k, v in ROLE.items()}}
        container = {
            "name": "main", "image": clusters.IMAGE, "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "-c", WRITER, str(lines), str(code)],
        }  # fmt: skip
        spec = {"restartPolicy": "OnFailure", "containers": [container]}
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        await self._ask("POST", api_paths.core(self.cluster.namespace, "pods"), body)

    async def delete(self, name: str) -> None:
        await self._ask("DELETE", api_paths.core(self.cluster.namespace, "pods", name), {})

    async def _ask(self, method: str, path: str, body: dict[str, Any]) -> None:
        now = asyncio.get_running_loop().time()
        try:
            await retry_transient(lambda: self.api.request(method, path, body=body), now + 60)
        except ApiStatusError as error:
            if (
                error.status != 409
            ):  # the response to the first request was cut, although the request had been processed
                raise

    async def observe(self, subscription: Subscription) -> None:
        async for seen in changes(subscription):
            self.pods[seen.object["metadata"]["name"]] = {} if seen.deleted else seen.object
            self.follower.observe(seen.object, deleted=seen.deleted)

    async def trouble(self, rng: random.Random) -> None:
        """Cut all connections, or each log stream after some bytes, repeatedly until `calm`."""
        while not self.calm:
            if rng.random() < 0.5:
                await self.fault("drop", seconds=0.01)
            else:
                await self.fault("cut_logs", bytes=rng.randrange(1, 200_000), count=2)
            before, more = self.collected.lines, rng.randrange(1, 100)
            with contextlib.suppress(TimeoutError):
                await until(lambda b=before, w=more: self.collected.lines >= b + w, 1)

    async def fault(self, name: str, **how: Any) -> None:
        """Set a fault switch. The previous fault may cut the request."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.cluster.admin, name, **how)

    async def clear(self) -> None:
        """Clear all faults, even if the previous fault breaks this request."""
        async with asyncio.timeout(240):
            while True:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(self.cluster.admin, "clear")
                    return
                await asyncio.sleep(0.02)

    def restarts(self, name: str) -> int:
        statuses = (self.pods.get(name) or {}).get("status", {}).get("containerStatuses") or [{}]
        return statuses[0].get("restartCount") or 0

    def phase(self, name: str) -> str:
        return (self.pods.get(name) or {}).get("status", {}).get("phase", "")


ROLE = {"type": "worker", "index": "0"}


@contextlib.asynccontextmanager
async def writing_pods(cluster: TestCluster, test: str) -> AsyncIterator[WritingPods]:
    async with api_of(cluster) as api:
        pods_here = WritingPods(cluster, api, test)
        pods = shared_informer(api, api_paths.core(cluster.namespace, "pods"), label_selector=f"test={test}")
        async with pods.subscribe() as subscription:
            observing = asyncio.create_task(pods_here.observe(subscription))
            try:
                yield pods_here
            finally:
                observing.cancel()
                await pods_here.clear()
                await pods_here.follower.close()


@pytest.mark.parametrize("seed", range(3))
async def test_every_line_of_every_run_is_read_once_and_in_order(cluster: TestCluster, seed: int) -> None:
    """Streams are cut all the time; one container restarts, one pod joins late, one is deleted while it writes."""
    rng, name = random.Random(seed), f"every-{seed}"
    steady, restarts, late, deleted = (f"{name}-{what}" for what in ("steady", "restarts", "late", "deleted"))
    async with writing_pods(cluster, name) as at, asyncio.timeout(240):
        trouble = asyncio.create_task(at.trouble(rng))
        await at.write(steady, 1000)
        await at.write(restarts, 600, code=1)
        await at.write(deleted, 10**6)
        await until(lambda: at.collected.runs[steady, 0] and at.collected.runs[deleted, 0])
        await at.write(late, 300)
        await until(lambda: at.restarts(restarts) >= 1 and at.collected.runs[restarts, 1])
        await until(lambda: at.phase(steady) == at.phase(late) == "Succeeded")
        at.calm = True
        await trouble
        await at.clear()
        # wait until these are followed again, because deleting the pods deletes their logs
        seen = len(at.collected.runs[deleted, 0])
        await until(lambda: len(at.collected.runs[deleted, 0]) > seen)
        last = at.restarts(restarts)  # the next run starts after 20 s or more
        await until(lambda: len(at.collected.runs[restarts, last]) == 601)
        await at.delete(deleted)
        await at.delete(restarts)
        await until(lambda: at.pods[deleted] == at.pods[restarts] == {})
        report = await at.follower.drain(30)
    assert (at.collected.broken(), at.collected.notices) == ({}, [])
    assert {run for run in at.collected.runs if run[0] != restarts} == {(steady, 0), (late, 0), (deleted, 0)}
    assert len(at.collected.runs[steady, 0]) == 1001
    assert len(at.collected.runs[late, 0]) == 301
    assert len(at.collected.runs[restarts, 0]) == 601
    assert report.unread == []
