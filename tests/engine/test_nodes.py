"""Nodes are read when a failure is diagnosed and while a job runs. Without the right to, everything else works."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.disruptions import DisruptionReporter
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.host import Host
from tests.apiserver import ApiServer, Object, connected, stamp
from tests.engine.staged import NAME, Staged, staged
from tests.engine.tasks import Lines

pytestmark = pytest.mark.virtual_time

KILLED = "Worker 0 was killed from outside by SIGKILL (exit code 137)"
BROKEN = "Node node-1: AcceleratedHardwareReady is False since"


def condition(status: str = "False", since: float = 30.0) -> Object:
    return {
        "type": "AcceleratedHardwareReady", "status": status, "reason": "NvidiaXID79Error",
        "message": "GPU has fallen off the bus", "lastTransitionTime": stamp(since),
    }  # fmt: skip


def put_node(api: ApiServer, name: str, *conditions: Object) -> None:
    api.put("nodes", {"metadata": {"name": name}, "spec": {}, "status": {"conditions": list(conditions)}})


def reads(api: ApiServer) -> list[str]:
    return [line.rpartition("/")[2] for line in api.requests if "/api/v1/nodes/" in line]


async def cause_of_kill(training: Staged) -> dict[str, Any]:
    training.pod(0, "Failed", state={"terminated": {"exitCode": 137, "finishedAt": stamp()}})
    training.pod(1, node="node-2")
    training.ended("Failed")
    outcome = await training.follow(Options(drain_timeout=0.5))
    return dict(outcome.cause or {})


async def test_node_of_the_failed_pod_is_named() -> None:
    async with staged() as training:
        put_node(training.api, "node-1", condition())
        cause = await cause_of_kill(training)
        assert cause["summary"].startswith(BROKEN)
        assert cause["summary"].endswith(f"(NvidiaXID79Error). {KILLED}")
        assert (cause["category"], list(cause["failed_nodes"])) == ("infrastructure", ["node-1"])
        assert sorted(reads(training.api)) == ["node-1", "node-2"]


@pytest.mark.parametrize("status", [401, 403, 404, 500])
async def test_cause_without_the_nodes(status: int) -> None:
    async with staged() as training:
        put_node(training.api, "node-1", condition())
        training.api.fail("GET", "/api/v1/nodes/", status, count=100)
        cause = await cause_of_kill(training)
        assert (cause["summary"], cause["failed_nodes"]) == (KILLED, {})


async def test_condition_from_before_the_job_is_no_cause() -> None:
    async with staged() as training:
        put_node(training.api, "node-1", condition(since=3600))
        cause = await cause_of_kill(training)
        assert (cause["summary"], cause["failed_nodes"]) == (KILLED, {})
        assert "before the job started: GPU has fallen off the bus" in cause["detail"]


async def look(reporter: DisruptionReporter) -> None:
    await asyncio.sleep(1.0)
    await reporter.observe()


async def test_unhealthy_node_of_a_running_job_is_logged_once_and_shown() -> None:
    async with staged() as training, connected(training.url) as api:
        for index in range(2):
            training.pod(index, node=f"node-{index}")
        training.running()
        put_node(training.api, "node-0", condition("True"))
        put_node(training.api, "node-1", condition())
        state, log = JobState(training.ref, Handover()), Lines()
        state.job = training.api.objects[PYTORCHJOB.plural][NAME]
        pods = training.api.objects["pods"].values()
        state.pods.update({pod["metadata"]["uid"]: pod for pod in pods}, (), timing.utc_now())
        state.enter(Phase.RUNNING)
        reporter = DisruptionReporter(FollowContext(api, state, log, host=Host(node_seconds=0)))
        for _ in range(6):
            await look(reporter)
        assert reads(training.api) == ["node-0", "node-1"] * 3
        assert len(log.messages) == 1
        assert log.messages[0].startswith(BROKEN)
        assert reporter.notice.startswith(BROKEN)
        put_node(training.api, "node-1", condition("True"))
        await look(reporter)
        await look(reporter)
        assert reporter.notice == ""
        training.api.fail("GET", "/api/v1/nodes/", 401, count=2)
        await look(reporter)
        training.api.fail("GET", "/api/v1/nodes/", 403, count=100)
        for _ in range(3):
            await look(reporter)
        assert len(reads(training.api)) == 11, "without the right, nodes are not read again"
        assert len(log.messages) == 1
