"""Following a job under Kueue: the lines of the log, the phase of the job, and the causes that end it."""

from __future__ import annotations

import asyncio
import time

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, Task, TrainTask, api_of, of_each_kind

from .conftest import Replay, round_trips
from .workloads import account, write_workload

WORKS = "trap 'exit 143' TERM; echo at work; sleep {} & wait $!; echo done"
EVICTED_FOR_GOOD = {
    "type": "Evicted", "status": "True", "reason": "DeactivatedDueToRequeuingLimitExceeded",
    "message": "The workload is deactivated", "lastTransitionTime": "2026-11-22T02:05:38Z",
}  # fmt: skip


async def test_the_log_shows_why_a_job_is_queued_and_when_it_is_admitted(api: Api, replay: Replay) -> None:
    driver = replay("70-kueue-pytorchjob", ours={"second": None}, settle=round_trips(api))
    with driver:
        task = Task(api, driver.namespace)
        ref = (await task.submit(1, WORKS.format(3), queue="queue")).ref
        outcome = await task.ended(ref, shared=True)
        await asyncio.to_thread(driver.finish)
    assert outcome.succeeded
    queued = "Queued in LocalQueue queue: needs 200m cpu more in flavor q70."
    messages = [line for line in task.log.messages if line in (queued, "Admitted by ClusterQueue q70 with flavor q70.")]
    assert messages == [queued, "Admitted by ClusterQueue q70 with flavor q70."]


async def test_an_evicted_job_is_queued_again_and_uses_no_retry(api: Api, replay: Replay) -> None:
    driver = replay("70b-kueue-hold", ours={"train": None}, settle=round_trips(api))
    with driver:
        task = Task(api, driver.namespace)
        ref = (await task.submit(1, WORKS.format(25), queue="queue")).ref
        outcome = await task.ended(ref)
        assert outcome.succeeded, task.log
        await asyncio.to_thread(driver.finish)
    assert outcome.metrics["queue.evictions"] == 1
    assert outcome.metrics["queue.preemptions"] == 0
    evicted = [line for line in task.log.messages if "lost its admission" in line]
    assert evicted == [f"{ref} lost its admission and is queued again (1 time so far)\nthe ClusterQueue is stopped"]
    phases = [line for line in task.log.messages if line.startswith(f"{ref} is ")]
    assert not [line for line in phases if line.startswith(f"{ref} is Suspended")]
    assert sum(line.startswith(f"{ref} is Running") for line in phases) == 2
    assert any("ClusterQueue q70b is inactive" in line for line in task.log.messages)


async def test_a_preempted_job_is_queued_again_and_a_kill_deletes_it(api: Api, replay: Replay) -> None:
    driver = replay("72b-kueue-trainjob-preemption", ours={"low": None}, settle=round_trips(api))
    with driver:
        task, stop = TrainTask(api, driver.namespace), StopSignal()
        ref = (await task.submit(1, TRAINS, queue="queue")).ref
        following = asyncio.create_task(task.follow(ref, stop=stop))
        await until_logged(task, "Queued in LocalQueue queue: needs 200m cpu more in flavor q72b.")
        assert not following.done()
        stop.request("marked failed")
        outcome = await following
        await asyncio.to_thread(driver.finish)
    assert isinstance(outcome, Outcome)
    why = "preempted: a job with a higher priority in the ClusterQueue needs the quota"
    assert f"{ref} lost its admission and is queued again (1 time so far)\n{why}" in task.log.messages
    assert not outcome.release_error
    assert await task.holding(ref) == []
    assert await task.job() is None


@of_each_kind
@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_a_job_that_kueue_gave_up_on_fails_and_may_be_retried(api: Api, task: Task) -> None:
    ref = (await task.submit(1, TRAINS, queue="team-a")).ref
    await write_workload(api, (await task.job()) or {}, [EVICTED_FOR_GOOD], active=False)
    outcome = await task.ended(ref, handover=Handover(queue={"phase": "given up", "since": time.time() - 61}))
    assert not outcome.succeeded
    assert outcome.cause is not None
    assert outcome.cause["summary"].startswith(f"{ref} can't run: Kueue gave up on the job: its pods were not ready")
    assert outcome.cause["category"] == "queue"


@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_the_cause_of_a_queue_timeout_is_what_the_job_waited_for(api: Api, task: Task) -> None:
    ref = (await task.submit(1, TRAINS, queue="team-a")).ref
    missing = {"type": "QuotaReserved", "status": "False", "reason": "Inadmissible"}
    message, at = "LocalQueue team-a doesn't exist", "2026-11-22T02:00:00Z"
    conditions = [{**missing, "message": message, "lastTransitionTime": at}]
    await write_workload(api, (await task.job()) or {}, conditions)
    outcome = await task.ended(ref, limits=Limits(queue=2))
    assert outcome.cause is not None
    assert outcome.cause["summary"].endswith("(queue_timeout): LocalQueue team-a doesn't exist")
    warning = "Queued in LocalQueue team-a: LocalQueue team-a doesn't exist. An administrator must correct this."
    assert task.log.messages.count(warning) == 1


@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_job_is_followed_without_the_right_to_read_workloads(kueue: TestCluster, api: Api, task: Task) -> None:
    ref = (await task.submit(1, "echo done", queue="team-a")).ref
    token = await account(api, task.namespace)
    async with api_of(kueue, token=token) as limited:
        follower = Task(limited, task.namespace, task.key, task.log)
        following = asyncio.create_task(follower.follow(ref, release=False))
        await until_logged(task, "Can't read Kueue's Workloads")
        await task.patch({"spec": {"runPolicy": {"suspend": False}}})
        outcome = await following
    assert isinstance(outcome, Outcome)
    assert outcome.succeeded
    assert sum("Can't read Kueue's Workloads" in line for line in task.log.messages) == 1


async def until_logged(task: Task, text: str) -> None:
    async with asyncio.timeout(120):
        while not any(text in line for line in task.log.messages):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
