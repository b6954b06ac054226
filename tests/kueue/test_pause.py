"""Pausing and resuming jobs under Kueue by their Workload, since Kueue undoes a manual suspension."""

from __future__ import annotations

import asyncio
import math

import pytest

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import SUSPENDED_ANNOTATION
from airflow_provider_ktrain.engine import job_control as operations
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import job_pods
from tests.apiserver import ApiServer
from tests.engine.tasks import Task, of_each_kind, release_job

from .played import Played, by_hand, playing
from .recording import Write, recording
from .workloads import STOP_SECONDS, admit, end, operated, until_logged, write_workload

pytestmark = pytest.mark.virtual_time
PAUSED = recording("74c-kueue-workload-inactive")
PENDING = {
    "type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set m: insufficient unused quota for cpu in flavor f, 2 more needed",
}  # fmt: skip


async def test_job_control_pauses_and_resumes_by_the_workload() -> None:
    messages = []

    async def suspend(one: Played, _: Write) -> None:
        messages.append(await operations.suspend(one.task.api, one.ref, timeout=60))

    async def resume(one: Played, _: Write) -> None:
        messages.append(await operations.resume(one.task.api, one.ref, timeout=60))

    instead = {"inactive": suspend, "active": resume}
    async with playing(PAUSED, by_others=by_hand(PAUSED), instead=instead) as (script, played):
        await script.play()
        ref = played["train"].ref
        assert (await played["train"].following).succeeded
    assert messages == [
        f"{ref} is paused by its Workload and its pods are gone",
        f"{ref} is queued again in LocalQueue queue: its Workload is active",
    ]


async def test_a_kept_job_is_paused_and_the_next_try_activates_it() -> None:
    released, adopted = [], []

    async def keep(one: Played, _: Write) -> None:
        one.following.cancel()
        released.append(await release_job(one.task.api, one.ref, Mode.SUSPEND))
        annotations = ((await one.task.job()) or {})["metadata"]["annotations"]
        assert annotations[SUSPENDED_ANNOTATION] == one.ref.owner

    async def adopt(one: Played, _: Write) -> None:
        adopted.append(await one.task.submit(2))

    instead = {"inactive": keep, "active": adopt}
    async with playing(PAUSED, by_others=by_hand(PAUSED), instead=instead) as (script, played):
        await script.play()
        one = played["train"]
        assert f"{one.ref} paused by its Workload. No GPUs were held, 2 pods deleted." in released[0].text
        assert not adopted[0].created
        assert adopted[0].ref.uid == one.ref.uid
        assert SUSPENDED_ANNOTATION not in adopted[0].job["metadata"]["annotations"]
        assert (await one.task.ended(adopted[0].ref)).succeeded


@of_each_kind
@pytest.mark.parametrize("reported", [False, True], ids=["trains on", "Succeeded"])
async def test_program_that_exits_with_0_when_kueue_stops_it_has_not_succeeded(
    server: ApiServer, task: Task, reported: bool
) -> None:
    """Either the job waits in its queue and trains on, or its success is doubtful."""
    ref = (await task.submit(queue="team-a")).ref
    async with operated(server, task, exit_code=0):
        following = asyncio.create_task(task.ended(ref, deleted=False))
        admit(server, task)
        await until_logged(task, "is Running")
        await asyncio.sleep(60)
        admit(server, task, False)
        if reported:
            await asyncio.sleep(STOP_SECONDS)
            end(server, task)
        else:
            await asyncio.sleep(60)
            assert not following.done()
            admit(server, task)
            await task.running(ref)
            await task.delete()
        assert not (await following).succeeded, str(task.log)


async def test_a_job_that_waits_for_quota_cannot_be_resumed(api: Api, task: Task) -> None:
    ref = (await task.submit(queue="team-a")).ref
    await write_workload(task.api, (await task.job()) or {}, [PENDING])
    with pytest.raises(KtrainError, match="Kueue would suspend it again") as refused:
        await operations.resume(api, ref, timeout=30)
    assert PENDING["message"] in str(refused.value)


async def test_a_job_of_a_queue_is_not_scaled_while_it_runs(api: Api, task: Task) -> None:
    """Kueue stops a job whose pods differ from its Workload, and queues it again."""
    ref = (await task.submit(queue="team-a", workers=1)).ref
    assert "scaled from 1 to 2 Workers" in await operations.scale(api, ref, 2, timeout=30)
    await task.patch({"spec": {"runPolicy": {"suspend": False}}})
    with pytest.raises(KtrainError, match="Kueue would stop it and queue it again with the new size"):
        await operations.scale(api, ref, 3, timeout=30)


@of_each_kind
async def test_without_the_right_to_patch_workloads_an_unfinished_job_is_deleted(
    server: ApiServer, api: Api, task: Task
) -> None:
    ref = (await task.submit(queue="team-a")).ref
    await write_workload(api, (await task.job()) or {}, [])
    async with operated(server, task):
        admit(server, task)
        await task.running(ref)
        server.fail("PATCH", "/workloads", 403, math.inf)
        with pytest.raises(KtrainError, match=r"ktrain rbac --kueue"):
            await operations.suspend(api, ref, timeout=30)
        released = await release_job(api, ref, Mode.SUSPEND)
    assert released.text.endswith("the right to read and patch workloads.kueue.x-k8s.io is missing.")
    assert await task.job() is None
    assert await job_pods(api, ref) == []
