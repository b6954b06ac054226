"""The logs of all replicas are read before `log_stall_timeout` or `progress_timeout` acts."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.limits import Clock, Limit
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow.activity import CONCURRENT_READS, ActivityProbe
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs import stream_budget
from airflow_provider_ktrain.engine.logs.stream_budget import process_budget
from tests.apiserver import EPOCH, PodServer, log_time, serving
from tests.until import until

from .tasks import Lines, Object

pytestmark = pytest.mark.virtual_time

REF = JobRef("PyTorchJob", "v1", "ns", "train", "uid")
JOB: Object = {"kind": "PyTorchJob", "metadata": {"name": "train", "uid": "uid"}, "spec": {}}
START = EPOCH.timestamp()
BEGAN, SECONDS = 100.0, 60.0  #: The clock's start and duration, in seconds after EPOCH.
of_each_limit = pytest.mark.parametrize("limit", [Limit.LOG_STALL, Limit.PROGRESS])


class Kube(PodServer):
    """Workers and their logs."""

    def worker(self, index: int, **state: Any) -> Object:
        labels = {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": str(index)}
        made = self.pod(f"w{index}", labels=labels, **state)
        self.log(f"w{index}")
        return made

    def write(self, index: int, at: float, text: str) -> None:
        self.log(f"w{index}").write(log_time(at), text)

    def refuse_log(self, name: str, status: int) -> None:
        """Answer requests for this log with an error status, until `clear_failures`."""
        self.clear_failures()
        self.fail("GET", f"/{name}/log", status, math.inf)


@dataclass
class Probing:
    """A probe, and the clock of its limit as the loop computes it."""

    kube: Kube
    limit: Limit
    state: JobState
    output: JobOutput
    probe: ActivityProbe
    log: Lines
    job: Object = field(default_factory=lambda: dict(JOB))

    @property
    def began(self) -> float:
        """In seconds after EPOCH."""
        return max(self.output.clock_began(self.limit), START + BEGAN) - START

    async def look(self) -> bool | None:
        clock = Clock(self.limit, START + self.began + SECONDS, SECONDS)
        self.kube.queries.clear()
        self.state.job, pods = self.job, {pod["metadata"]["uid"]: pod for pod in self.kube.pods.values()}
        self.state.pods.update(pods, self.state.pods.groups.pods.keys() - pods, timing.utc_now())
        return await self.probe.confirms(clock)


@contextlib.asynccontextmanager
async def probing(kube: Kube, limit: Limit, logs: Any = "none") -> AsyncIterator[Probing]:
    async with serving(kube) as api:
        training = make(kube, api, limit, logs)
        try:
            yield training
        finally:
            await training.output.follower.close()


def make(kube: Kube, api: Api, limit: Limit, logs: Any) -> Probing:
    log, state = Lines(), JobState(REF, Handover())
    state.job = JOB
    context = FollowContext(api, state, log, Options(logs=logs))
    output = JobOutput(context)
    output.last_line_at = START + BEGAN
    return Probing(kube, limit, state, output, ActivityProbe(context, output), log)


def step(number: int) -> str:
    return f'KTRAIN_METRIC {{"step": {number}}}'


@of_each_limit
async def test_line_of_a_replica_that_is_not_followed_moves_the_clock_to_its_own_time(limit: Limit) -> None:
    kube = Kube()
    for index in range(3):
        kube.worker(index)
        kube.write(index, 99, step(1))
    kube.write(1, 130.5, step(2))
    async with probing(kube, limit, {"Worker": [0]}) as training:
        assert await training.look() is False
        assert training.began == 130.5
        assert await training.look() is True, "no line after that one"


@of_each_limit
async def test_silent_replicas_are_read_once_each(limit: Limit) -> None:
    kube = Kube()
    for index in range(3):
        kube.worker(index)
        kube.write(index, 99, "before")
    async with probing(kube, limit) as training:
        assert await training.look() is True
    assert [query["sinceTime"] for query in kube.queries] == [log_time(100)[:19] + "Z"] * 3
    assert {query["limitBytes"] for query in kube.queries} == {"65536"}
    assert all(query["timestamps"] == "true" for query in kube.queries)


async def test_lines_without_a_higher_step_are_no_progress() -> None:
    kube = Kube()
    kube.worker(0)
    for at in range(90, 160):
        kube.write(0, at, step(7))
    async with probing(kube, Limit.PROGRESS) as training:
        training.output.training_metrics.read_step("Worker 0", step(7), START + 90)
        assert await training.look() is True
        assert training.output.training_metrics.step == 7
        assert not training.output.training_metrics, "series contain only what followed replicas report"


@of_each_limit
async def test_log_that_cannot_be_read_decides_nothing(limit: Limit) -> None:
    kube = Kube()
    kube.worker(0)
    kube.worker(1)
    async with probing(kube, limit) as training:
        for status in (500, 403, 404, 400):
            kube.refuse_log("w1", status)
            assert await training.look() is None, status
        kube.clear_failures()
        kube.away = True
        assert await training.look() is None
        kube.away = False
        assert await training.look() is True
        kube.refuse_log("w1", 500)
        kube.write(0, 130, step(1))
        assert await training.look() is False, "another replica shows it"


@of_each_limit
async def test_missing_log_of_a_container_that_has_ended_is_tolerated(limit: Limit) -> None:
    kube = Kube()
    kube.worker(0)
    kube.worker(1, state="terminated", phase="Succeeded")
    async with probing(kube, limit) as training:
        for status in (404, 400):
            kube.refuse_log("w1", status)
            assert await training.look() is True
        kube.refuse_log("w1", 500)
        assert await training.look() is None
        kube.clear_failures()
        kube.write(1, 130, step(1))
        assert await training.look() is False, "it wrote this before its end"


@of_each_limit
async def test_limit_does_not_act_while_no_container_runs(limit: Limit) -> None:
    kube = Kube()
    kube.worker(0, state="terminated", phase="Succeeded")
    async with probing(kube, limit) as training:
        assert await training.look() is None


@of_each_limit
async def test_container_that_has_started_meanwhile_moves_the_clock(limit: Limit) -> None:
    """The lines of its earlier run can't be found any more."""
    kube = Kube()
    made = kube.worker(0)
    made["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": log_time(130)}}
    async with probing(kube, limit) as training:
        assert await training.look() is False
        assert training.began == 130
        assert kube.queries == []


async def test_percentage_that_the_watch_has_not_shown_moves_the_clock() -> None:
    kube = Kube()
    kube.worker(0)
    async with probing(kube, Limit.PROGRESS) as training:
        training.job["status"] = {"trainerStatus": {"progressPercentage": 50, "lastUpdatedTime": log_time(140)}}
        assert await training.look() is False
        assert training.began == 140
        assert kube.queries == []


@of_each_limit
async def test_at_most_16_logs_are_read_at_a_time_until_one_shows_activity(limit: Limit) -> None:
    kube = Kube()
    for index in range(100):
        kube.worker(index)
    kube.hold("before GET .*/log")
    async with probing(kube, limit) as training:
        looking = asyncio.ensure_future(training.look())
        for left in range(100, 0, -CONCURRENT_READS):
            expected = min(left, CONCURRENT_READS)
            await until(functools.partial(lambda expected: len(kube.gates) == expected, expected))
            for _ in range(20):
                await asyncio.sleep(0)  # if more were read at a time, more requests would come now
            assert len(kube.gates) == expected
            for gate in kube.gates:
                gate.open()
            await until(lambda: not any(gate.opened.done() for gate in kube.gates))
        assert await looking is True
        assert len(kube.queries) == 100
        kube.hold("")
        kube.write(99, 130, step(1))
        assert await training.look() is False
        assert len(kube.queries) <= 2 * CONCURRENT_READS


async def test_requests_share_the_streams_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_budget, "STREAMS", 1)
    kube = Kube()
    kube.worker(0)
    async with probing(kube, Limit.LOG_STALL) as training:
        budget = process_budget()
        async with budget.slot():
            looking = asyncio.create_task(training.look())
            await until(lambda: budget.is_crowded)
            assert kube.queries == []
        assert await looking is True


@of_each_limit
async def test_line_that_a_cut_stream_did_not_deliver_moves_the_clock(limit: Limit) -> None:
    kube = Kube()
    made = kube.worker(0)
    kube.write(0, 90, step(1))
    async with probing(kube, limit, "all") as training:
        training.output.observe({"u": made})
        await until(lambda: training.output.training_metrics.step == 1)
        training.output.last_line_at = START + BEGAN
        kube.log("w0").store(log_time(130), step(2))  # the stream doesn't deliver it
        assert await training.look() is False
        assert training.began == 130
        kube.log("w0").end()


async def test_step_before_many_other_lines_is_found() -> None:
    kube = Kube()
    kube.worker(0)
    kube.write(0, 50, "before")
    kube.write(0, 110, step(1))
    for number in range(2000):
        kube.write(0, 111 + number / 100, "x" * 100)
    async with probing(kube, Limit.PROGRESS) as training:
        assert await training.look() is False
        assert training.began == 110
        assert await training.look() is True


async def test_rotated_log_moves_the_clock_to_the_first_line_that_is_left() -> None:
    """What the log contained before may have been a step."""
    kube = Kube()
    kube.worker(0)
    kube.write(0, 110, step(1))
    kube.log("w0").rotate()
    kube.write(0, 120, "loading")
    async with probing(kube, Limit.PROGRESS) as training:
        assert await training.look() is False
        assert training.began == 120
        assert await training.look() is True


async def test_rotated_log_that_was_followed_proves_a_hang() -> None:
    """A program that hangs and floods its log: the follower has read what was rotated away."""
    kube = Kube()
    made = kube.worker(0)
    kube.write(0, 90, step(1))
    kube.write(0, 161, "noise")
    async with probing(kube, Limit.PROGRESS, "all") as training:
        training.output.observe({"u": made})
        await until(lambda: training.output.follower.read_span(made["metadata"]["uid"], "main", 0)[1] > START + 160)
        kube.log("w0").rotate()
        kube.log("w0").store(log_time(162), "noise")  # the stream hasn't delivered it yet
        assert await training.look() is True
        kube.log("w0").end()


@of_each_limit
async def test_empty_log_of_a_container_that_has_written_was_rotated(limit: Limit) -> None:
    kube = Kube()
    kube.worker(0)
    kube.write(0, 130, step(1))
    async with probing(kube, limit) as training:
        assert await training.look() is False
        kube.log("w0").rotate()
        assert await training.look() is False
        assert training.began > 131, "now: it may have written until the rotation"
        assert await training.look() is True
