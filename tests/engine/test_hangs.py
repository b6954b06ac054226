"""A job that hangs: its release names the replica and the line, and stacks are never lines of a log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import STACKS_ANNOTATION
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.logs.stacks import MARK
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import stamp
from tests.engine.staged import NAME, Memory, Staged, staged

pytestmark = pytest.mark.virtual_time

LOADS, WAITS = ["/ktrain/code/train.py", 5, "next_batch"], ["/ktrain/code/train.py", 8, "wait_for_peers"]
TRAIN = ["/ktrain/code/train.py", 12, "train"]


class Conclusions(Memory):
    """Keeps the summaries of all conclusions."""

    def __init__(self) -> None:
        super().__init__()
        self.summaries: list[str] = []

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        self.summaries.append(document["summary"])
        return await super().store_conclusion(document)


def hangs(training: Staged, workers: int) -> None:
    """Worker 0 waits for its data, and the others for Worker 0. They print their stacks when they are stopped."""
    annotations = {STACKS_ANNOTATION: "true"}
    training.api.change(PYTORCHJOB.plural, NAME, lambda job: job["metadata"]["annotations"].update(annotations))
    training.spec(pytorchReplicaSpecs={"Master": {"replicas": 1}, "Worker": {"replicas": workers}})
    replicas = [("Master", 0), *(("Worker", index) for index in range(workers))]
    for role, index in replicas:
        training.pod(index, role=role, grace=10)
        training.line("started", index, role=role)
    training.running()

    def print_stacks() -> None:
        for role, index in replicas:
            where = LOADS if (role, index) == ("Worker", 0) else WAITS
            record = {"pid": 7, "rank": "", "part": "rank", "main": True, "frames": [where, TRAIN], "how": "handler"}
            for entry in (record, {"end": True, "left_out": 0}):
                training.line(MARK + json.dumps(entry), index, role=role)

    training.api.on_request = lambda line: training.after(0.5, print_stacks) if line.startswith("DELETE") else None


def cause_of(outcome: Any) -> dict[str, Any]:
    assert outcome.cause is not None
    return dict(outcome.cause)


@pytest.mark.parametrize("logs", ["all", "none"])
async def test_replica_in_a_data_loader_is_named_followed_or_not(logs: str) -> None:
    """The conclusion is stored before the stacks are there, and again with them; the first error line has them."""
    async with staged(roles=("Master", "Worker")) as training:
        training.memory = memory = Conclusions()
        hangs(training, 2)
        outcome = await training.follow(Options(limits=Limits(log_stall=3), logs=logs, drain_timeout=5))
        found = cause_of(outcome)
        named = (
            "No log line for 3 s: Worker 0 is in next_batch (train.py:5), "
            "2 other replicas are in wait_for_peers (train.py:8)"
        )
        assert (found["summary"], found["category"], found["replica"]) == (named, "hang", "Worker 0")
        assert "wrote no log line for 3 s (log_stall_timeout)" in found["detail"]
        assert "next_batch [Worker 0]" in found["detail"]
        errors = [message for message in training.log.messages if "log_stall_timeout" in message or named in message]
        assert errors[0].startswith(named)
        provisional, final = memory.summaries  # on the page, until the task has ended
        assert "wrote no log line for 3 s (log_stall_timeout)" in provisional
        assert final == named
        assert outcome.status["cause"]["summary"] == named, "on the page, after that"
        assert "next_batch [Worker 0]" in outcome.status["cause"]["detail"]
        assert "Worker 0, innermost call first:\n" in "\n".join(training.log.messages)
        assert MARK not in str(training.log)
        assert not training.exists


async def test_sixteen_replicas_are_read_although_one_is_followed() -> None:
    async with staged(roles=("Master", "Worker")) as training:
        hangs(training, 15)
        outcome = await training.follow(Options(limits=Limits(log_stall=5), logs="primary", drain_timeout=5))
        found = cause_of(outcome)
        named = "Worker 0 is in next_batch (train.py:5), 15 other replicas are in wait_for_peers (train.py:8)"
        assert (found["summary"], found["replica"]) == (f"No log line for 5 s: {named}", "Worker 0")
        assert "(16 of 16 replicas read)" in found["detail"]


async def test_broken_node_of_the_replica_that_hangs_is_named() -> None:
    async with staged(roles=("Master", "Worker")) as training:
        hangs(training, 2)
        broken = {
            "type": "AcceleratedHardwareReady",
            "status": "False",
            "reason": "Xid79",
            "lastTransitionTime": stamp(),
        }
        training.api.put("nodes", {"metadata": {"name": "node-1"}, "spec": {}, "status": {"conditions": [broken]}})
        found = cause_of(await training.follow(Options(limits=Limits(log_stall=20), drain_timeout=5)))
        assert found["summary"].startswith("No log line for 20 s: Node node-1: AcceleratedHardwareReady is False since")
        assert "Worker 0 is in next_batch (train.py:5)" in found["summary"]
        assert (found["category"], found["replica"]) == ("hang", "Worker 0"), "stacks and nodes change only the text"


async def test_healthy_training_that_is_stopped_shows_no_stacks() -> None:
    """Somebody else deletes its pods: no limit of ours has passed, so the stacks are no lines of its log."""
    async with staged(roles=("Master", "Worker")) as training:
        hangs(training, 1)
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=5)))
        await asyncio.sleep(5)
        training.api.on_request("DELETE by somebody else")
        training.line("saved")
        training.after(1.0, training.end, 3)
        found = cause_of(await following)
        assert "saved" in str(training.log)
        assert MARK not in str(training.log)
        assert "where the processes were" not in str(training.log).lower()
        assert "train.py:" not in found["detail"]
