"""`progress_timeout`: a training that reports no higher step is released, and one that makes progress isn't."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError
from airflow_provider_ktrain.engine.api.job_calls import served_version
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from tests import clusters
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, Object, Task, TrainTask, api_of, soon, until

TRAP = "trap 'exit 143' TERM"
#: hangs after one step, but still logs
HANGS = f"""{TRAP}; while :; do echo 'KTRAIN_METRIC {{"step": 7}}'; sleep 0.3 & wait $!; done"""
#: a step every half second
ADVANCES = (
    f"""{TRAP}; i=0; while :; do i=$((i+1)); echo "KTRAIN_METRIC {{\\"step\\": $i}}"; sleep 0.5 & wait $!; done"""
)


class MpiTask(Task):
    """A task with an MPIJob whose launcher runs the program."""

    kind = MPIJOB

    async def submit(self, number: int = 1, program: str = TRAINS, **how: Any) -> Submitted:
        type(self).version = await served_version(self.api, MPIJOB)
        return await super().submit(number, program, **how)

    def manifest(
        self,
        number: int,
        submission: str,
        program: str,
        run_policy: Mapping[str, Any],
        grace: int,
        restart_policy: str,
        **more: Any,
    ) -> Object:
        options = JobOptions(image=clusters.IMAGE, command=["sh", "-c", program], gpus=1, workers=1, **more)
        built = build(MPIJOB.name, options) | {"apiVersion": f"{MPIJOB.group}/{self.version}"}
        return self.stamped(built, number, submission)


of_all_kinds = pytest.mark.parametrize(
    "task", [Task, MpiTask, TrainTask], indirect=True, ids=["pytorchjob", "mpijob", "trainjob"]
)


@of_all_kinds
async def test_training_that_repeats_its_step_is_released(task: Task) -> None:
    ref = (await task.submit(1, HANGS)).ref
    outcome = await task.ended(ref, limits=Limits(progress=3))
    assert outcome.cause is not None
    assert outcome.cause["category"] == "hang"
    assert (
        f"{ref.kind} {ref.name} reported no step higher than 7 for 3 s (progress_timeout)" in outcome.cause["summary"]
    )
    assert outcome.released
    assert await task.job() is None


async def test_training_that_reports_no_step_is_released(task: Task) -> None:
    ref = (await task.submit(1, TRAINS)).ref
    outcome = await task.ended(ref, limits=Limits(progress=3))
    assert outcome.cause is not None
    assert "reported no step for 3 s (progress_timeout)" in outcome.cause["summary"]


@of_all_kinds
@pytest.mark.parametrize("remembers", [True, False], ids=["takeover", "adoption"])
async def test_training_that_made_progress_while_nobody_looked_goes_on(task: Task, remembers: bool) -> None:
    ref = (await task.submit(1, ADVANCES)).ref
    limits, seen = Limits(progress=15), Handover()
    while not seen.training_metrics:
        ended = await task.follow(ref, limits=limits, handover=seen, until=soon(0.5))
        assert isinstance(ended, Handover)
        seen = ended
    expired = time.monotonic() + 15

    async def has_expired() -> bool:
        return time.monotonic() > expired

    await until(has_expired)
    ended = await task.follow(ref, limits=limits, handover=seen if remembers else Handover(), until=soon(8))
    assert isinstance(ended, Handover)
    assert ended.training_metrics["step"] > seen.training_metrics["step"] + 10


async def test_clock_is_not_reset_by_takeovers(task: Task) -> None:
    """Each follower stops before the limit, counted from its own start, has passed."""
    ref = (await task.submit(1, HANGS)).ref
    outcome: Outcome | Handover = Handover()
    while isinstance(outcome, Handover):
        outcome = await task.follow(ref, limits=Limits(progress=30), handover=outcome, until=soon(20))
    assert "reported no step higher than 7 for 30 s" in (outcome.cause or {})["summary"]


async def test_training_with_steps_is_not_released(task: Task) -> None:
    program = ADVANCES.replace("while :", "while [ $i != 40 ]").replace("i=0", "i=0; sleep 1")
    outcome = await task.ended((await task.submit(1, program)).ref, limits=Limits(progress=10))
    assert outcome.succeeded
    assert outcome.training_metrics == {}, "a step alone is no metric"


@of_all_kinds
async def test_steps_of_replicas_that_are_not_followed_are_progress(task: Task) -> None:
    ref = (await task.submit(1, ADVANCES)).ref
    ended = await task.follow(ref, limits=Limits(progress=10, log_stall=10), logs="none", until=soon(25))
    assert isinstance(ended, Handover)
    assert ended.training_metrics["step"] > 10


async def test_steps_of_the_master_are_progress_if_only_a_worker_is_followed(task: Task) -> None:
    """The Worker is silent: Megatron, for example, prints on one rank only."""
    program = f'[ "$RANK" = 0 ] || exec sleep 600; {ADVANCES}'
    ref = (await task.submit(1, program, workers=1)).ref
    limits = Limits(progress=10, log_stall=10)
    ended = await task.follow(ref, limits=limits, logs={"Worker": [0]}, until=soon(25))
    assert isinstance(ended, Handover)


@of_all_kinds
@pytest.mark.parametrize(
    ("limits", "summary"),
    [
        (Limits(progress=3), "reported no step higher than 7 for 3 s (progress_timeout)"),
        (Limits(log_stall=3), "wrote no log line for 3 s (log_stall_timeout)"),
    ],
    ids=["progress", "log_stall"],
)
async def test_limit_ends_a_training_whose_logs_are_not_followed(task: Task, limits: Limits, summary: str) -> None:
    hangs = f"""{TRAP}; echo 'KTRAIN_METRIC {{"step": 7}}'; sleep 600 & wait"""
    ref = (await task.submit(1, HANGS if limits.progress else hangs)).ref
    outcome = await task.ended(ref, limits=limits, logs="none")
    assert summary in (outcome.cause or {})["summary"]


class ApiWithoutLogs(Api):
    """An API server that refuses to serve logs."""

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **how: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        if path.endswith("/log"):
            raise ApiStatusError(403, "Forbidden", "pods/log is forbidden")
        async with super().stream(path, **how) as response:
            yield response


async def test_unreadable_logs_end_no_training(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit(1, HANGS)).ref
    async with api_of(cluster, ApiWithoutLogs) as api:
        task.api, reachable = api, task.api
        following = asyncio.create_task(task.follow(ref, limits=Limits(progress=2)))

        async def warned() -> bool:
            return any("because its latest log lines can't be read" in line for line in task.log.messages)

        await until(warned)
        began = time.monotonic()

        async def checked_again() -> bool:
            return time.monotonic() > began + 12

        await until(checked_again)
        assert not following.done()
        following.cancel()
        await asyncio.wait([following])
        task.api = reachable
    assert len([line for line in task.log.messages if "may have hung" in line]) == 1
    assert await task.job() is not None


@pytest.mark.parametrize("task", [TrainTask], indirect=True, ids=["trainjob"])
async def test_higher_percentage_of_a_trainjob_is_progress(task: Task) -> None:
    """The log isn't followed. The program reports to the Trainer's status server (recording 61)."""
    ref = (await task.submit(1, TRAINS)).ref
    await task.running(ref)

    async def report(percentage: int) -> None:
        now = datetime.datetime.now(datetime.UTC)
        status = {"progressPercentage": percentage, "lastUpdatedTime": f"{now:%Y-%m-%dT%H:%M:%SZ}"}
        body = {"status": {"trainerStatus": status}}
        await task.api.request("PATCH", f"{task.path}/status", body=body)

    await report(1)
    following = asyncio.create_task(task.ended(ref, limits=Limits(progress=8), logs="none"))
    for percentage in range(2, 22):
        await report(percentage)
        await asyncio.wait([following], timeout=1)
    assert not following.done()
    outcome = await following
    assert "reported no step higher than 21 for 8 s (progress_timeout)" in (outcome.cause or {})["summary"]
