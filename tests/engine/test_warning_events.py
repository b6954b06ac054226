"""The Warning events of waiting jobs: one watch for all jobs of a process, and none without the right to it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, MakeClient
from airflow_provider_ktrain.engine.api.job_calls import job_pods
from airflow_provider_ktrain.engine.follow import startup
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.job_events import JobEvents
from airflow_provider_ktrain.engine.follow.startup import StartupChecks
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.clusters import TestCluster
from tests.engine.tasks import Lines, MeddledApi, Task, api_of, until
from tests.engine.test_rbac import token_with

JOBS, LOOKS = 5, 4


class CountingApi(MeddledApi):
    """Counts its requests by method and resource."""

    def __init__(self, make_client: MakeClient) -> None:
        super().__init__(make_client)
        self.made: Counter[str] = Counter()

    async def before(self, method: str, path: str) -> None:
        self.made[f"{method} {path.rpartition('/')[2]}"] += 1


@pytest.fixture
async def waiting(task: Task) -> AsyncIterator[list[JobRef]]:
    """Jobs whose pods have no node, each with a Warning event."""
    tasks = [Task(task.api, task.namespace) for _ in range(JOBS)]
    refs = [(await one.submit(gpus=1000)).ref for one in tasks]
    for ref in refs:

        async def is_reported(ref: JobRef = ref) -> bool:
            path = f"/api/v1/namespaces/{ref.namespace}/events"
            for pod in await job_pods(task.api, ref):
                about = f"type=Warning,involvedObject.uid={pod['metadata']['uid']}"
                if (await task.api.request("GET", path, query={"fieldSelector": about}))["items"]:
                    return True
            return False

        await until(is_reported)
    yield refs
    for one in tasks:
        await one.delete()


@pytest.fixture(autouse=True)
def _always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.0)


class Waiting:
    """One job that waits for its start, with checks that are always due."""

    def __init__(self, api: Api, ref: JobRef) -> None:
        self.log = Lines()
        self.state = JobState(ref, Handover())
        context = FollowContext(api, self.state, self.log)
        self.events = JobEvents(context)
        self.checks = StartupChecks(context, self.events, lambda at: 0.0)

    async def load(self, task: Task) -> None:
        """Read the job and its pods, as the watches would."""
        self.state.job = await task.api.request("GET", f"{task.path.rpartition('/')[0]}/{self.state.ref.name}")
        pods = {pod["metadata"]["uid"]: pod for pod in await job_pods(task.api, self.state.ref)}
        self.state.pods.update(pods, [], timing.utc_now())
        self.state.enter(Phase.PENDING)


@contextlib.asynccontextmanager
async def checked(task: Task, api: Api, refs: list[JobRef]) -> AsyncIterator[list[Waiting]]:
    """The jobs, each checked LOOKS times."""
    async with contextlib.AsyncExitStack() as stack:
        jobs = [Waiting(api, ref) for ref in refs]
        for job in jobs:
            stack.push_async_callback(job.events.close)
            await job.load(task)
        for _ in range(LOOKS):
            for job in jobs:
                assert await job.checks.find_failure() is None
        yield jobs


async def test_waiting_jobs_share_one_watch(task: Task, cluster: TestCluster, waiting: list[JobRef]) -> None:
    async with api_of(cluster, CountingApi) as api, checked(task, api, waiting) as jobs:
        for job in jobs:
            assert job.events.exist
            name, (obstacle, *_) = job.state.ref.name, job.log.messages
            assert f"{name} is still Pending. " in obstacle
            assert name in obstacle.partition("\n")[2]
        assert api.made == {"GET events": 1, "GET nodes": 1}  # whether any node has the resource
        assert api.stats["watches"] == 1


async def test_watch_is_given_up_when_the_job_has_started(
    task: Task, cluster: TestCluster, waiting: list[JobRef]
) -> None:
    async with api_of(cluster, CountingApi) as api, checked(task, api, waiting[:1]) as (job,):
        assert job.events._informer is not None
        job.state.enter(Phase.RUNNING)
        assert await job.checks.find_failure() is None
        assert job.events._informer is None


async def test_events_are_listed_without_the_right_to_watch_them(
    task: Task, cluster: TestCluster, waiting: list[JobRef]
) -> None:
    token = await token_with(cluster, "without-watch-of-events", "watch")
    async with api_of(cluster, CountingApi, token=token) as api, checked(task, api, waiting) as jobs:
        assert all(job.events.exist for job in jobs)
        assert all("is still Pending. " in str(job.log) for job in jobs)
        notices = [line for job in jobs for line in job.log.messages if "the right to watch events is missing" in line]
        assert len(notices) == 1
        assert api.stats["watches"] < JOBS * LOOKS  # the watch is given up, and tried again after ten minutes
        assert api.made["GET events"] >= JOBS * LOOKS
