"""Following a job under Kueue: the causes that end it, and what is missing without rights."""

from __future__ import annotations

import asyncio
import math

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import ApiServer
from tests.engine.tasks import Task, of_each_kind

from .workloads import admit, end, operated, until_logged, write_workload

pytestmark = pytest.mark.virtual_time
EVICTED_FOR_GOOD = {
    "type": "Evicted", "status": "True", "reason": "DeactivatedDueToRequeuingLimitExceeded",
    "message": "The workload is deactivated", "lastTransitionTime": "2026-11-22T02:05:38Z",
}  # fmt: skip


@of_each_kind
async def test_a_job_that_kueue_gave_up_on_fails_and_may_be_retried(task: Task) -> None:
    ref = (await task.submit(queue="team-a")).ref
    await write_workload(task.api, (await task.job()) or {}, [EVICTED_FOR_GOOD], active=False)
    outcome = await task.ended(ref)
    assert not outcome.succeeded
    assert outcome.cause is not None
    assert outcome.cause["summary"].startswith(f"{ref} can't run: Kueue gave up on the job: DeactivatedDueToReq")
    assert outcome.cause["category"] == "queue"
    assert await task.job() is None


async def test_the_cause_of_a_queue_timeout_is_what_the_job_waited_for(task: Task) -> None:
    ref = (await task.submit(queue="team-a")).ref
    missing = {"type": "QuotaReserved", "status": "False", "reason": "Inadmissible"}
    message, at = "LocalQueue team-a doesn't exist", "2026-11-22T02:00:00Z"
    conditions = [{**missing, "message": message, "lastTransitionTime": at}]
    await write_workload(task.api, (await task.job()) or {}, conditions)
    outcome = await task.ended(ref, limits=Limits(queue=2))
    assert outcome.cause is not None
    assert outcome.cause["summary"].endswith("(queue_timeout): Inadmissible: LocalQueue team-a doesn't exist")
    line = "Queued in LocalQueue team-a: Inadmissible: LocalQueue team-a doesn't exist"
    assert task.log.messages.count(line) == 1


async def test_job_is_followed_without_the_right_to_read_workloads(server: ApiServer, task: Task) -> None:
    server.fail("GET", "/workloads", 403, math.inf)
    ref = (await task.submit(queue="team-a")).ref
    async with operated(server, task):
        following = asyncio.create_task(task.follow(ref, release=False))
        await until_logged(task, "Can't read Kueue's Workloads")
        admit(server, task)
        await until_logged(task, "is Running")
        end(server, task)
        outcome = await following
    assert isinstance(outcome, Outcome)
    assert outcome.succeeded
    assert sum("Can't read Kueue's Workloads" in line for line in task.log.messages) == 1
