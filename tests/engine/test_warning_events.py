"""The Warning events of waiting jobs: one watch for all jobs of a process, and none without the right to it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.host import StatusSink
from airflow_provider_ktrain.engine.training_owner import Training
from tests.apiserver import ApiServer, connected, served
from tests.engine.staged import Memory, Staged, staged
from tests.engine.tasks import host_of

pytestmark = pytest.mark.virtual_time

JOBS = 5


@contextlib.asynccontextmanager
async def waiting_jobs(number: int = JOBS) -> AsyncIterator[tuple[ApiServer, list[Staged], Api]]:
    """Jobs of one process whose pods have no node, each with a Warning event."""
    api = ApiServer()
    jobs = [Staged(api, name=f"train-{index}", submission=f"s-{index}", since=0.0) for index in range(number)]
    for job in jobs:
        job.condition("Created")
        pod = job.pod(0, "Pending", node="", since=0.0)
        job.event("FailedScheduling", "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.", about=pod)
    async with served(api) as url, connected(url) as client:
        yield api, jobs, client


@contextlib.asynccontextmanager
async def followed(jobs: list[Staged], client: Api, seconds: float) -> AsyncIterator[None]:
    """Follow them in one trigger for so many seconds, and on while the body runs."""
    owners = [Training(lambda: contextlib.nullcontext(client), host_of(shared=True), job.log) for job in jobs]
    following = [
        asyncio.ensure_future(owner.follow(job.ref, Options())) for owner, job in zip(owners, jobs, strict=True)
    ]
    await asyncio.sleep(seconds)
    yield
    for one in following:
        one.cancel()
    await asyncio.wait(following)


def asked(api: ApiServer, what: str, *, watch: bool = False) -> int:
    """How many lists or watches of a resource were requested."""
    return sum(f"/{what}?" in f"{line}?" and ("watch=true" in line) is watch for line in api.requests)


async def test_waiting_jobs_share_one_watch() -> None:
    async with waiting_jobs() as (api, jobs, client), followed(jobs, client, 120.0):
        for job in jobs:
            (obstacle,) = [line for line in job.log.messages if "is still Pending. " in line]
            assert job.name in obstacle.partition("\n")[0]
            assert f"{job.name}-worker-0" in obstacle
        assert (asked(api, "events"), asked(api, "events", watch=True)) == (1, 1)


async def test_watch_is_given_up_when_the_jobs_have_started() -> None:
    async with waiting_jobs(1) as (api, (job,), client), followed([job], client, 60.0):
        assert api.open == 3, "jobs, pods and events"
        job.start()
        await asyncio.sleep(600.0)
        assert asked(api, "events", watch=True) == 1
        assert not [stream for stream in api.streams.values() if "events" in str(stream)]


async def test_events_are_listed_without_the_right_to_watch_them() -> None:
    async with waiting_jobs() as (api, jobs, client):
        api.fail("GET", "/events.*watch=true", 403, math.inf)
        async with followed(jobs, client, 300.0):
            assert all("is still Pending. " in str(job.log) for job in jobs)
            notices = [
                line for job in jobs for line in job.log.messages if "the right to watch events is missing" in line
            ]
            assert len(notices) == 1
            assert asked(api, "events", watch=True) < JOBS * 4, "it is tried again after ten minutes"
            assert asked(api, "events") >= JOBS * 4


class Page(Memory):
    """Makes each status when it is offered."""

    shown: Mapping[str, Any]

    def offer(self, build: Any, *, urgent: bool) -> None:
        self.shown = build()()


@pytest.mark.parametrize(("reason", "grace"), [("ImagePullBackOff", 180.0), ("FailedMount", 300.0)])
async def test_status_has_the_newest_warning_and_what_ends_the_job_first(reason: str, grace: float) -> None:
    async with staged(since=0.0) as training:
        training.condition("Created")
        waiting = reason if reason == "ImagePullBackOff" else "ContainerCreating"
        pod = training.pod(0, "Pending", state={"waiting": {"reason": waiting}}, since=0.0)
        training.event(reason, "Back-off pulling train:1", about=pod)
        page = Page()
        async with training.owner(sink=cast(StatusSink, page)) as owner:
            options = Options(limits=Limits(startup=3600.0))
            await owner.follow(training.ref, options, until=timing.now() + 20.0)
        assert page.shown["notice"] == f"Newest warning: Pod {pod}: {reason}: Back-off pulling train:1"
        (first, startup) = page.shown["limits"]
        assert (first["name"], first["seconds"]) == (reason, grace)
        assert (startup["name"], startup["seconds"]) == ("startup_timeout", 3600.0)
        assert startup["due"] - first["due"] == pytest.approx(3600.0 - grace, abs=2.0)
        training.start()
        async with training.owner(sink=cast(StatusSink, page)) as owner:
            await owner.follow(training.ref, options, until=timing.now() + 5.0)
        assert (page.shown["notice"], page.shown["limits"]) == ("", [])
