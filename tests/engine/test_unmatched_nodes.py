"""A pod that no node can match ends the job after ten minutes, unless that is not known or a node may be created."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow import startup
from airflow_provider_ktrain.engine.follow.deferral import Handover
from tests.apiserver import connected, stamp
from tests.engine.staged import NAME, Memory, Staged, staged
from tests.engine.tasks import follow
from tests.until import until

pytestmark = pytest.mark.virtual_time

NO_MATCH = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
INSUFFICIENT = "0/1 nodes are available: 1 Insufficient nvidia/gpu."


def unmatched(training: Staged, **what: Any) -> None:
    """No node has what the pod asks for."""
    training.condition("Created")
    message = INSUFFICIENT if "limits" in what else NO_MATCH
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod = training.pod(0, "Pending", node="", **(what or {"nodeSelector": {"pool": "a100"}}))
    conditions = [condition | {"lastTransitionTime": stamp(3600)}]
    training.api.change("pods", pod, lambda pod: pod["status"].update(conditions=conditions))
    training.api.put("nodes", {"metadata": {"name": "node-1", "labels": {}}, "status": {"capacity": {}}})


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"nodeSelector": {"pool": "none"}}, "no node matches nodeSelector pool=none"),
        ({"limits": {"nvidia/gpu": "1"}}, "no node has the resource nvidia/gpu"),
    ],
    ids=["selector", "resource"],
)
async def test_job_that_no_node_can_take_is_given_up(what: dict[str, Any], text: str) -> None:
    async with staged() as training:
        unmatched(training, **what)
        outcome = await training.follow()
        assert text in (outcome.cause or {})["summary"]
        assert (outcome.cause or {})["category"] == "scheduling"
        assert 600.0 <= training.decided_after < 620.0, "ten minutes after a read that showed it"
        assert not training.exists


class Page(Memory):
    """Keeps the limits of each status that is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[dict[str, Any]] = []

    def offer(self, build: Any, *, urgent: bool) -> None:
        self.limits += build()()["limits"]


def claim_missing(training: Staged) -> None:
    """The scheduler says so of a pod."""
    training.condition("Created")
    message = '0/4 nodes are available: persistentvolumeclaim "data" not found.'
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    training.api.change(
        "pods", training.pod(0, "Pending", node=""), lambda pod: pod["status"].update(conditions=[condition])
    )


@pytest.mark.parametrize(
    ("stage", "name", "seconds"), [(unmatched, "no matching node", 600.0), (claim_missing, "missing claim", 30.0)]
)
async def test_page_shows_when_such_a_job_is_given_up(
    stage: Callable[[Staged], None], name: str, seconds: float
) -> None:
    async with staged() as training:
        stage(training)
        page = training.memory = Page()
        following = asyncio.ensure_future(training.follow())
        await until(lambda: page.limits)
        (limit,) = page.limits
        assert (limit["name"], limit["seconds"]) == (name, seconds)
        left = limit["due"] - timing.epoch()
        began = timing.now()
        await following
        assert left <= page.stored_at - began <= left + 5.0


def without_right(training: Staged) -> None:
    training.api.fail("GET", "/api/v1/nodes", 403, 10**6)


def without_events(training: Staged) -> None:
    training.api.fail("GET", "/events", 403, 10**6)


def with_autoscaler(training: Staged) -> None:
    training.event("TriggeredScaleUp", "pod triggered scale-up", about=f"{NAME}-{training.role.lower()}-0")
    training.api.change("events", f"event-{NAME}-triggeredscaleup", lambda event: event.update(type="Normal"))


@pytest.mark.parametrize(
    ("cluster_has", "request_made"),
    [
        (without_right, "GET /api/v1/nodes"),
        (without_events, "fieldSelector=involvedObject.uid"),
        (with_autoscaler, "fieldSelector=involvedObject.uid"),
    ],
)
async def test_job_is_kept_where_it_is_not_certain_that_no_node_can_take_it(
    cluster_has: Callable[[Staged], None], request_made: str
) -> None:
    async with staged() as training:
        unmatched(training)
        cluster_has(training)
        await training.hand_over(7200.0)
        assert sum(request_made in line for line in training.api.requests) >= 4
        assert not training.api.writes()


async def test_nodes_are_read_again_before_a_job_is_given_up() -> None:
    """A node is added after they were read for another job, and before this job is given up, 615 s after its start."""
    node = {"metadata": {"name": "node-2", "labels": {"pool": "a100"}}, "status": {"capacity": {}}}
    async with staged() as training, connected(training.url) as api:
        unmatched(training)
        until = timing.now() + 900.0
        following = asyncio.ensure_future(follow(training.ref, api, log=training.log, until=until))
        await asyncio.sleep(550.0)
        assert await startup.read_nodes(api)
        training.api.put("nodes", node)
        assert isinstance(await following, Handover)
        assert not training.api.writes()


async def test_waiting_jobs_share_one_read_of_the_nodes() -> None:
    async with staged() as training, connected(training.url) as api:
        training.api.put("nodes", {"metadata": {"name": "node-1", "labels": {}}, "status": {"capacity": {}}})
        found = await asyncio.gather(*(startup.read_nodes(api) for _ in range(5)))
        assert len(training.api.requests) == 1
        assert all(found[0] == other and other for other in found)
        await asyncio.gather(*(startup.read_nodes(api, fresh=True) for _ in range(5)))
        assert len(training.api.requests) <= 3  # a read that had begun before may be too old for the others
