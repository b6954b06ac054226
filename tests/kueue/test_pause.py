"""Pausing and resuming jobs under Kueue by their Workload, since Kueue undoes a manual suspension."""

from __future__ import annotations

import asyncio
import time

import pytest

from airflow_provider_ktrain.core.ending import Mode
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import SUSPENDED_ANNOTATION, JobRef
from airflow_provider_ktrain.engine import job_control as operations
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import job_pods
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, Task, api_of, of_each_kind, release_job, until

from .conftest import Replay, round_trips
from .workloads import account, write_workload

RECORDING = "74c-kueue-workload-inactive"
BY_SOMEBODY = ("queue changed while suspended",)
PENDING = {
    "type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set m: insufficient unused quota for cpu in flavor f, 2 more needed",
}  # fmt: skip


def works_until(at: float) -> str:
    """A program that is paused before this time, in epoch seconds, and ends then."""
    return f"while [ $(date +%s) -lt {at:.0f} ]; do sleep 0.2; done"


async def test_job_control_pauses_and_resumes_by_the_workload(api: Api, replay: Replay) -> None:
    driver = replay(RECORDING, ours={"train": None}, by_others=BY_SOMEBODY, settle=round_trips(api))
    with driver:
        task, program = Task(api, driver.namespace), works_until(time.time() + 30)
        ref = (await task.submit(1, program, queue="queue")).ref
        await task.condition("Running")
        message = await operations.suspend(api, ref, timeout=60)
        assert message == f"{ref} is paused by its Workload and its pods are gone"
        await asyncio.to_thread(driver.wait_for, BY_SOMEBODY[0])
        message = await operations.resume(api, ref, timeout=60)
        assert message == f"{ref} is queued again in LocalQueue queue: its Workload is active"
        await asyncio.to_thread(driver.finish)


async def test_a_kept_job_is_paused_and_the_next_try_activates_it(api: Api, replay: Replay) -> None:
    driver = replay(RECORDING, ours={"train": None}, by_others=BY_SOMEBODY, settle=round_trips(api))
    with driver:
        task, program = Task(api, driver.namespace), works_until(time.time() + 30)
        ref = (await task.submit(1, program, queue="queue")).ref
        await task.condition("Running")
        released = await release_job(api, ref, Mode.SUSPEND)
        assert f"{ref} paused by its Workload. 1 GPU released, 1 pod deleted." in released.text
        annotations = ((await task.job()) or {})["metadata"]["annotations"]
        assert annotations[SUSPENDED_ANNOTATION] == ref.owner
        await asyncio.to_thread(driver.wait_for, BY_SOMEBODY[0])
        adopted = await task.submit(2, program, queue="queue")
        assert not adopted.created
        assert adopted.ref.uid == ref.uid
        assert SUSPENDED_ANNOTATION not in adopted.job["metadata"]["annotations"]
        outcome = await task.ended(adopted.ref)
        await asyncio.to_thread(driver.finish)
    assert outcome.succeeded


@of_each_kind
@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_program_that_exits_with_0_when_kueue_stops_it_has_not_succeeded(task: Task) -> None:
    """Either the job waits in its queue and trains on, or its success is doubtful."""
    ref = (await task.submit(1, "trap 'exit 0' TERM; sleep 600 & wait", queue="team-a")).ref
    await task.patch({"spec": task.kind.form.suspension(False)})
    following = asyncio.create_task(task.ended(ref, deleted=False))
    await task.running(ref)
    await until_seen(task, "is Running")
    await task.patch({"spec": task.kind.form.suspension(True)})
    await until_seen(task, "is Suspended", "is Queued", "is Succeeded")
    if "is Succeeded" not in str(task.log):
        await until(lambda: no_pods(task, ref))
        await task.patch({"spec": task.kind.form.suspension(False)})
        await task.running(ref)
        await task.delete()
    assert not (await following).succeeded, str(task.log)


async def until_seen(task: Task, *texts: str) -> None:
    async def seen() -> bool:
        return any(text in str(task.log) for text in texts)

    await until(seen)


async def no_pods(task: Task, ref: JobRef) -> bool:
    return not await task.pods(ref)


@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_a_job_that_waits_for_quota_cannot_be_resumed(api: Api, task: Task) -> None:
    ref = (await task.submit(1, TRAINS, queue="team-a")).ref
    await write_workload(api, (await task.job()) or {}, [PENDING])
    with pytest.raises(KtrainError, match="Kueue would suspend it again") as refused:
        await operations.resume(api, ref, timeout=30)
    assert "needs 2 cpu more in flavor f" in str(refused.value)


@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_a_job_of_a_queue_is_not_scaled_while_it_runs(api: Api, task: Task) -> None:
    """Kueue stops a job whose pods differ from its Workload, and queues it again."""
    ref = (await task.submit(1, TRAINS, queue="team-a", workers=1)).ref
    assert "scaled from 1 to 2 Workers" in await operations.scale(api, ref, 2, timeout=30)
    await task.patch({"spec": {"runPolicy": {"suspend": False}}})
    with pytest.raises(KtrainError, match="Kueue would stop it and queue it again with the new size"):
        await operations.scale(api, ref, 3, timeout=30)


@of_each_kind
@pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
async def test_without_the_right_to_patch_workloads_an_unfinished_job_is_deleted(
    kueue: TestCluster, api: Api, task: Task
) -> None:
    ref = (await task.submit(1, TRAINS, queue="team-a")).ref
    await write_workload(api, (await task.job()) or {}, [])
    await task.patch({"spec": task.kind.form.suspension(False)})
    await task.running(ref)
    async with api_of(kueue, token=await account(api, task.namespace)) as limited:
        with pytest.raises(KtrainError, match=r"ktrain rbac --kueue"):
            await operations.suspend(limited, ref, timeout=30)
        released = await release_job(limited, ref, Mode.SUSPEND)
    assert released.text.endswith("the right to read and patch workloads.kueue.x-k8s.io is missing.")
    assert await task.job() is None
    assert await job_pods(api, ref) == []
