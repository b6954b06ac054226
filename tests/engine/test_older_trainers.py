"""TrainJobs on Trainer 2.0 and 2.1: without runtimePatches, so their pods don't have the labels of the task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from airflow_provider_ktrain.engine.api.job_calls import job_pods
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, TrainTask, api_of, until

RESULT = """echo "line of $PET_NODE_RANK"; echo 'KTRAIN_RESULT {"loss": 0.5}'"""


@pytest.fixture
async def task(older: TestCluster) -> AsyncIterator[TrainTask]:
    async with api_of(older) as api:
        task = TrainTask(api, older.namespace)
        try:
            yield task
        finally:
            await task.delete()


async def test_all_nodes_are_followed_to_the_end(task: TrainTask) -> None:
    ref = (await task.submit(1, RESULT, workers=1)).ref
    outcome = await task.ended(ref)
    assert outcome.succeeded
    assert outcome.result == {"loss": 0.5}
    assert {"[node 0] line of 0", "[node 1] line of 1"} <= set(task.log.messages)
    assert await task.job() is None
    assert await job_pods(task.api, ref) == []


async def test_failed_job_has_a_cause_and_is_released(task: TrainTask) -> None:
    ref = (await task.submit(1, "echo no such file >&2; exit 3", workers=1)).ref
    outcome = await task.ended(ref)
    assert outcome.cause is not None
    assert "exit code 3" in outcome.cause["summary"]
    assert await task.job() is None
    assert await job_pods(task.api, ref) == []


async def test_kill_of_a_running_job_releases_its_gpus(task: TrainTask) -> None:
    ref = (await task.submit(1, TRAINS, workers=1)).ref
    stop = StopSignal()
    following = asyncio.create_task(task.follow(ref, stop=stop))
    await task.running(ref, 2)
    stop.request("The task was killed")
    outcome = await following
    assert isinstance(outcome, Outcome)
    assert (outcome.cause or {})["category"] == "killed"
    assert not outcome.release_error
    assert await task.job() is None

    async def free() -> bool:
        return not await task.holding(ref)

    await until(free)


async def test_retry_adopts_the_job(task: TrainTask) -> None:
    first = await task.submit(1, TRAINS)
    second = await task.submit(2, TRAINS)
    assert not second.created
    assert second.ref.uid == first.ref.uid


async def test_jobs_are_listed_in_the_status_since_2_1(task: TrainTask, trainer: str) -> None:
    await task.submit(1, "sleep 2")
    await task.condition("Succeeded")
    status = ((await task.job()) or {})["status"]
    assert ("jobsStatus" in status) is (trainer != "2.0")
