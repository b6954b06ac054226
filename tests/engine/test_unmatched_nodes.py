"""A pod that no node can match ends the job after ten minutes, unless that is not known or a node may be created."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis import unmatched_pods
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow import startup
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import stamp
from tests.clusters import TestCluster
from tests.engine.staged import NAME, Staged, staged, writes_of
from tests.engine.tasks import Task, api_of
from tests.until import until

NO_MATCH = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmatched_pods, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.3)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"node_selector": {"pool": "none"}}, "no node matches nodeSelector pool=none"),
        ({"gpu_resource": "nvidia/gpu"}, "no node has the resource nvidia/gpu"),
    ],
    ids=["selector", "resource"],
)
async def test_job_that_no_node_can_take_is_given_up(task: Task, what: dict[str, Any], text: str) -> None:
    ref = (await task.submit(**what)).ref
    outcome = await task.ended(ref)
    assert text in (outcome.cause or {})["summary"]
    assert (outcome.cause or {})["category"] == "scheduling"
    assert await task.job() is None


def unmatched(training: Staged) -> None:
    training.condition("Created")
    pod = training.pod(0, "Pending", node="")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_MATCH}

    def change(pod: dict[str, Any]) -> None:
        pod["status"]["conditions"] = [condition | {"lastTransitionTime": stamp(3600)}]
        pod["spec"]["nodeSelector"] = {"pool": "a100"}

    training.api.change("pods", pod, change)
    training.api.put("nodes", {"metadata": {"name": "node-1", "labels": {}}, "status": {"capacity": {}}})


def without_right(training: Staged) -> None:
    training.api.fail("GET", "/api/v1/nodes", 403, 10**6)


def without_events(training: Staged) -> None:
    training.api.fail("GET", "/events", 403, 10**6)


def with_autoscaler(training: Staged) -> None:
    training.event("TriggeredScaleUp", "pod triggered scale-up", about=f"{NAME}-{training.role.lower()}-0")
    training.api.change("events", "event-triggeredscaleup", lambda event: event.update(type="Normal"))


@pytest.mark.parametrize(
    ("cluster_has", "request_made"),
    [
        (without_right, "GET /api/v1/nodes"),
        (without_events, "fieldSelector=involvedObject.uid"),
        (with_autoscaler, "fieldSelector=involvedObject.uid"),
    ],
)
async def test_job_is_kept_where_it_is_not_certain_that_no_node_can_take_it(
    cluster_has: Callable[[Staged], None], request_made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "NODES_AGE_SECONDS", 0.5)
    async with staged() as training:
        unmatched(training)
        cluster_has(training)
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5)))

        def asked() -> int:
            return sum(request_made in line for line in training.api.requests)

        await until(lambda: following.done() or asked() >= 4, 60)
        assert not following.done()
        assert not writes_of(training)
        following.cancel()


async def test_waiting_jobs_share_one_read_of_the_nodes(cluster: TestCluster) -> None:
    class Counting(Api):
        asked = 0

        async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
            Counting.asked += path == api_paths.nodes()
            return await super().request(method, path, **how)

    async with api_of(cluster, Counting) as api:
        found = await asyncio.gather(*(startup.read_nodes(api) for _ in range(5)))
        assert Counting.asked == 1
        assert all(found[0] == other and other for other in found)
        await asyncio.gather(*(startup.read_nodes(api, fresh=True) for _ in range(5)))
        assert Counting.asked <= 3  # a read that had begun before may be too old for the others
