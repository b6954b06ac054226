"""A past state of Kueue's Workload doesn't end a job: the queue's state must still hold when the task fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from airflow_provider_ktrain.core.state.queue.kueue_messages import QueuePhase
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import kueue as requests
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, MeddledApi, Task, api_of, until

from .test_follow import EVICTED_FOR_GOOD, write_workload

pytestmark = pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
NEVER_FITS = {
    "type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor a, previously considered "
    "podsets requests (0) + current podset request (24) > maximum capacity (16)",
}  # fmt: skip


@pytest.fixture
async def queued(kueue: TestCluster) -> AsyncIterator[Task]:
    """A task whose job waits in a queue."""
    async with api_of(kueue) as api:
        task = Task(api, kueue.namespace)
        await task.submit(1, TRAINS, queue="team-a")
        yield task
        await task.delete()


async def test_a_job_whose_workload_was_activated_meanwhile_does_not_fail(kueue: TestCluster, queued: Task) -> None:
    ref = (await queued.submit(1, TRAINS, queue="team-a")).ref
    await write_workload(queued.api, await queued.job() or {}, [EVICTED_FOR_GOOD], active=False)

    class Activated(MeddledApi):
        """The Workload is activated while the response to the first list is in transit."""

        async def after(self, method: str, path: str) -> None:
            if path == requests.workloads_path("v1beta2", ref.namespace):
                name = f"pytorchjob-{ref.name}-12345"
                patch = {"spec": {"active": True}}
                await queued.api.request("PATCH", f"{path}/{name}", body=patch)

    async with api_of(kueue, Activated) as behind:
        follower = Task(behind, queued.namespace, queued.key, queued.log)
        following = asyncio.create_task(follower.follow(ref, release=False))
        await queued.patch({"spec": {"runPolicy": {"suspend": False}}})
        try:
            await until(lambda: _logged(queued, "is Running", following))
        finally:
            following.cancel()


async def _logged(task: Task, text: str, following: asyncio.Task[object]) -> bool:
    assert not following.done(), following.result()
    return any(text in line for line in task.log.messages)


async def test_a_deleted_workload_does_not_fail_its_job(queued: Task) -> None:
    api, job = queued.api, await queued.job() or {}
    await write_workload(api, job, [NEVER_FITS])
    async with _follower(queued, await _state(queued)) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        assert follower.due is not None
        path = requests.workloads_path("v1beta2", queued.namespace, f"pytorchjob-{queued.name}-12345")
        await api.request("DELETE", path)
        await until(lambda: _phase_is(follower, None))
        assert follower.due is None


async def test_the_queue_does_not_fail_a_job_that_runs(queued: Task) -> None:
    await write_workload(queued.api, await queued.job() or {}, [NEVER_FITS])
    state = await _state(queued)
    async with _follower(queued, state) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        state.enter(Phase.RUNNING)
        assert follower.due is None


async def test_the_workload_of_a_job_that_left_its_queue_is_ignored(queued: Task) -> None:
    await write_workload(queued.api, await queued.job() or {}, [NEVER_FITS])
    state = await _state(queued)
    async with _follower(queued, state) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        assert state.job is not None
        state.job["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name")
        await follower.update()
        assert (follower.status, follower.due, follower.wakes_at) == (None, None, None)
        assert follower.phase(Phase.SUSPENDED) is Phase.SUSPENDED


async def test_a_job_that_was_admitted_before_its_workload_was_replaced_does_not_fail(queued: Task) -> None:
    await write_workload(queued.api, await queued.job() or {}, [NEVER_FITS])
    state = await _state(queued)
    async with _follower(queued, state) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        assert follower.due is not None
        meta = {"name": "p", "uid": "p-1", "creationTimestamp": "2026-11-22T01:00:00Z"}
        state.pods.update({"p-1": {"metadata": meta, "spec": {}, "status": {"phase": "Running"}}}, (), timing.utc_now())
        assert follower.due is None


@contextlib.asynccontextmanager
async def _follower(task: Task, state: JobState) -> AsyncIterator[QueueFollower]:
    follower = QueueFollower(FollowContext(task.api, state, task.log))
    yield follower
    await follower.close()


async def _state(task: Task) -> JobState:
    """The state of a queued job."""
    state = JobState((await task.submit(1, TRAINS, queue="team-a")).ref, Handover())
    state.job = await task.job()
    state.enter(Phase.QUEUED)
    return state


async def _phase_is(follower: QueueFollower, phase: QueuePhase | None) -> bool:
    await follower.update()
    return (follower.status.phase if follower.status else None) is phase
