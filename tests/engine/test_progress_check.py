"""When an expired `progress_timeout` proves a hang: two checks in a row, of logs that were read without a gap."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
from kubernetes_asyncio import client as aio

from airflow_provider_ktrain.core.diagnosis.model import Limit
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.state.limits import Clock
from airflow_provider_ktrain.core.state.training_metrics import TrainingMetrics
from airflow_provider_ktrain.engine.api import Api, ApiUnavailable
from airflow_provider_ktrain.engine.follow.messages import Handover, Options
from airflow_provider_ktrain.engine.follow.progress import ProgressCheck
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.engine.tasks import Lines, Object

REF = JobRef("TrainJob", "v1alpha1", "ns", "train", "uid")


async def no_client() -> aio.ApiClient:
    raise ApiUnavailable("there is no server")


class OneJob(Api):
    """An API server with one job; None: it can't be reached."""

    def __init__(self) -> None:
        super().__init__(no_client)
        self.job: Object | None = {"kind": "TrainJob", "metadata": {"name": "train", "uid": "uid"}, "status": {}}

    async def request(self, method: str, path: str, **_: Any) -> Object:
        if self.job is None:
            raise ApiUnavailable("it is away")
        return self.job


class Output:
    """The job's output: logs that were read up to now, since a time."""

    def __init__(self, read_since: float) -> None:
        self.training_metrics, self.follower = TrainingMetrics(), self
        self.read_since = datetime.datetime.fromtimestamp(read_since, datetime.UTC).isoformat()
        self.up_to_date = True

    async def has_read_until(self, time: str) -> bool:
        return self.up_to_date


class Training:
    """A training whose limit of 60 s expired a second ago."""

    def __init__(self, read_since: float) -> None:
        self.api, self.output, self.log = OneJob(), Output(read_since), Lines()
        output: Any = self.output
        self.began = time.time() - 61
        self.check = ProgressCheck(
            self.api, JobState(REF, Handover()), output, Options(), lambda: [self.clock], self.log
        )

    @property
    def clock(self) -> Clock:
        since = max(self.began, self.output.training_metrics.progress_at or 0.0)
        return Clock(Limit.PROGRESS, since + 60, 60)

    @property
    def next_check(self) -> float:
        """In seconds from now."""
        return self.check.postponed(self.clock).due - time.time()


async def test_two_checks_in_a_row_prove_a_hang() -> None:
    training = Training(time.time() - 3600)
    assert training.next_check < 0
    assert not await training.check.confirmed()
    assert 0 < training.next_check <= 5
    assert await training.check.confirmed()


async def test_check_that_finds_unread_lines_starts_again() -> None:
    training = Training(time.time() - 3600)
    assert not await training.check.confirmed()
    training.output.up_to_date = False
    assert not await training.check.confirmed()
    assert training.next_check > 5
    training.output.up_to_date = True
    assert not await training.check.confirmed()
    assert await training.check.confirmed()


async def test_job_that_cannot_be_read_proves_nothing() -> None:
    training = Training(time.time() - 3600)
    job, training.api.job = training.api.job, None
    for _ in range(3):
        assert not await training.check.confirmed()
    training.api.job = job
    assert not await training.check.confirmed()
    assert await training.check.confirmed()


async def test_percentage_that_the_watch_has_not_shown_is_progress() -> None:
    training = Training(time.time() - 3600)
    assert not await training.check.confirmed()
    now = datetime.datetime.now(datetime.UTC).isoformat()
    assert training.api.job is not None
    training.api.job["status"] = {"trainerStatus": {"progressPercentage": 50, "lastUpdatedTime": now}}
    assert not await training.check.confirmed()
    assert training.output.training_metrics.step == 50
    assert training.next_check > 50


@pytest.mark.parametrize(
    "seen",
    [
        {"status": {"conditions": [{"type": "Complete", "status": "True"}]}},
        {"status": {"conditions": [{"type": "Failed", "status": "True"}]}},
        {"spec": {"suspend": True}},
    ],
    ids=["succeeded", "failed", "suspended"],
)
async def test_job_that_no_longer_runs_has_not_hung(seen: Object) -> None:
    """The watch has not shown it yet: a training that has succeeded must not fail as a hang."""
    training = Training(time.time() - 3600)
    assert training.api.job is not None
    training.api.job |= seen
    for _ in range(3):
        assert not await training.check.confirmed()


async def test_rotated_log_gives_the_training_the_full_time_again() -> None:
    """What the log contained before its first line may have been progress."""
    training = Training(time.time() - 20)
    for _ in range(3):
        assert not await training.check.confirmed()
    assert 30 < training.next_check <= 40
    assert not training.log.messages


async def test_other_clocks_are_not_postponed() -> None:
    training = Training(time.time() - 20)
    await training.check.confirmed()
    other = Clock(Limit.EXECUTION, time.time() - 1, 60)
    assert training.check.postponed(other) is other
