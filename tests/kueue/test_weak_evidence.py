"""A past state of Kueue's Workload doesn't end a job: the queue's state must still hold when the task fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from airflow_provider_ktrain.core.state.queue.kueue_status import QueuePhase
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import kueue as requests
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.apiserver import ApiServer
from tests.engine.tasks import Task, until

from .test_follow import EVICTED_FOR_GOOD
from .workloads import admit, operated, until_logged, workload_name, write_workload

pytestmark = pytest.mark.virtual_time
NEVER_FITS = {
    "type": "QuotaReserved", "status": "False", "reason": "ExceedsMaxQuota",
    "lastTransitionTime": "2026-11-22T02:00:00Z",
    "message": "couldn't assign flavors to pod set main: insufficient quota for cpu in flavor a, previously considered "
    "podsets requests (0) + current podset request (24) > maximum capacity (16)",
}  # fmt: skip


@pytest.fixture
async def queued(task: Task) -> Task:
    """A task whose job waits in a queue."""
    await task.submit(queue="team-a")
    return task


async def test_a_job_whose_workload_was_activated_meanwhile_does_not_fail(server: ApiServer, queued: Task) -> None:
    """The watch of Workloads is behind for longer than the job may wait."""
    ref = (await queued.submit(queue="team-a")).ref
    await write_workload(queued.api, await queued.job() or {}, [EVICTED_FOR_GOOD], active=False)
    async with operated(server, queued):
        following = asyncio.create_task(queued.follow(ref))
        await until_logged(queued, "Kueue gave up on the job")
        server.freeze("workloads")
        server.change("workloads", workload_name(queued), lambda workload: workload["spec"].update(active=True))
        await asyncio.sleep(300)
        admit(server, queued)
        await until_logged(queued, "is Running")
        assert not following.done()
        following.cancel()


async def test_a_deleted_workload_does_not_fail_its_job(queued: Task) -> None:
    api, job = queued.api, await queued.job() or {}
    await write_workload(api, job, [NEVER_FITS])
    async with _follower(queued, await _state(queued)) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        assert follower.fails_at is not None
        path = requests.workloads_path("v1beta2", queued.namespace, workload_name(queued))
        await api.request("DELETE", path)
        await until(lambda: _phase_is(follower, None))
        assert follower.fails_at is None


async def test_the_queue_does_not_fail_a_job_that_runs(queued: Task) -> None:
    await write_workload(queued.api, await queued.job() or {}, [NEVER_FITS])
    state = await _state(queued)
    async with _follower(queued, state) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        state.enter(Phase.RUNNING)
        assert follower.fails_at is None


async def test_the_workload_of_a_job_that_left_its_queue_is_ignored(queued: Task) -> None:
    await write_workload(queued.api, await queued.job() or {}, [NEVER_FITS])
    state = await _state(queued)
    async with _follower(queued, state) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        assert state.job is not None
        state.job["metadata"]["labels"].pop("kueue.x-k8s.io/queue-name")
        await follower.update()
        assert (follower.status, follower.fails_at, follower.due) == (None, None, None)
        assert follower.phase(Phase.SUSPENDED) is Phase.SUSPENDED


async def test_a_job_that_was_admitted_before_its_workload_was_replaced_does_not_fail(queued: Task) -> None:
    await write_workload(queued.api, await queued.job() or {}, [NEVER_FITS])
    state = await _state(queued)
    async with _follower(queued, state) as follower:
        await until(lambda: _phase_is(follower, QueuePhase.NEVER_FITS))
        assert follower.fails_at is not None
        meta = {"name": "p", "uid": "p-1", "creationTimestamp": "2026-11-22T01:00:00Z"}
        state.pods.update({"p-1": {"metadata": meta, "spec": {}, "status": {"phase": "Running"}}}, (), timing.utc_now())
        assert follower.fails_at is None


@contextlib.asynccontextmanager
async def _follower(task: Task, state: JobState) -> AsyncIterator[QueueFollower]:
    follower = QueueFollower(FollowContext(task.api, state, task.log))
    yield follower
    await follower.close()


async def _state(task: Task) -> JobState:
    """The state of a queued job."""
    state = JobState((await task.submit(queue="team-a")).ref, Handover())
    state.job = await task.job()
    state.enter(Phase.QUEUED)
    return state


async def _phase_is(follower: QueueFollower, phase: QueuePhase | None) -> bool:
    await follower.update()
    return (follower.status.phase if follower.status else None) is phase
