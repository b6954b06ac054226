"""The GPU time of a training whose process was killed: pods that are gone were counted by the earlier process alone."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.accelerators import GPU, Amounts
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.engine.staged import GPUS, Memory, Staged, of_each_kind, staged, stamp
from tests.factories import replica_pod

pytestmark = pytest.mark.virtual_time

DAY = 86400.0
REF = JobRef("PyTorchJob", "v1", "default", "train", "uid")
USAGE = {"requested": 10.0, "held": 10.0, "gpus": 1}


class Page(Memory):
    """The status XCom of a try. Each process has its own, and reads what the one before has written."""

    def __init__(self, before: Page | None = None) -> None:
        super().__init__()
        self.written: Mapping[str, Any] = {} if before is None else before.written
        self._unread: Mapping[str, Any] | None = self.written if before else {}

    async def read_earlier(self) -> None:
        if self.earlier is None:
            self.earlier = self._unread

    def offer(self, build: Callable[[], Callable[[], Mapping[str, Any]]], *, urgent: bool) -> None:  # type: ignore[override]
        self.earlier = self._unread if self.earlier is None else self.earlier
        self.written = build()()


def replace_pod(training: Staged) -> None:
    """The operator recreates the failed pod of a replica under another uid."""
    name = training.pod_name()
    training.pod(0, "Failed", since=2 * DAY)  # since its creation
    training.api.remove("pods", name)
    training.attempt += 1
    training.start(since=0.0)


async def killed(training: Staged, page: Memory, handover: Handover, seconds: float) -> None:
    """A process follows the training for so many seconds, and hands nothing over."""
    following = asyncio.ensure_future(training.follow(handover=handover, sink=page))
    await asyncio.sleep(seconds)
    following.cancel()
    await asyncio.wait([following])


@of_each_kind
@pytest.mark.parametrize("times", [1, 2])
async def test_next_process_counts_the_pods_that_an_earlier_one_has_seen(kind: Kind, times: int) -> None:
    async with staged(kind, since=2 * DAY) as training:
        training.start(since=DAY)
        handover, page = await training.hand_over(5.0), Page()
        for _ in range(times):
            training.after(30.0, replace_pod, training)
            await killed(training, page := Page(page), handover, 120.0)
        training.after(60.0, functools.partial(training.end, since=150.0))
        outcome = await training.follow(handover=handover, sink=Page(page))
        assert outcome.usage["held"] == pytest.approx(DAY + 5.0 + 120.0 * times + 60.0, abs=10.0)
        assert "at_least" not in outcome.usage
        assert outcome.status["usage"]["held"] == outcome.usage["held"]


@of_each_kind
async def test_gpu_time_is_a_bound_if_nothing_shows_what_an_earlier_process_has_seen(kind: Kind) -> None:
    async with staged(kind, since=2 * DAY) as training:
        training.start(since=DAY)
        handover = await training.hand_over(5.0)
        training.after(30.0, replace_pod, training)
        await killed(training, Page(), handover, 120.0)
        training.after(60.0, training.end)
        page = Page()
        outcome = await training.follow(handover=handover, sink=page)
        assert outcome.usage["at_least"]
        assert "GPU time: at least " in str(training.log)
        next_one = await training.follow(handover=handover, sink=Page(page))
        assert next_one.usage["at_least"]


async def test_job_without_pods_has_the_time_of_those_that_are_gone() -> None:
    async with staged(since=2 * DAY) as training:
        training.start(since=DAY)
        handover, page = await training.hand_over(5.0), Page()
        await killed(training, page, handover, 120.0)
        training.api.remove("pods", training.pod_name())
        training.ended("Failed")
        outcome = await training.follow(handover=handover, sink=Page(page))
        assert (outcome.usage["held"], outcome.usage["gpus"]) == (pytest.approx(DAY + 120.0, abs=15.0), 1)
        assert "GPU time: 24.0 GPU-hours on 1 GPU" in str(training.log)


def metric(step: int) -> str:
    return f'KTRAIN_METRIC {{"step": {step}, "loss": {1 - step / 100}}}'


@pytest.mark.parametrize("before", [(), (5,)], ids=["nothing was handed over", "a point was"])
async def test_curve_has_the_points_that_an_earlier_process_has_shown(before: tuple[int, ...]) -> None:
    """Their log is gone with its pod."""
    async with staged(since=2 * DAY) as training:
        training.start(*map(metric, before), since=DAY)
        handover = await training.hand_over(5.0, sink=(first := Page()))
        training.after(10.0, training.line, metric(10))
        training.after(60.0, replace_pod, training)
        await killed(training, page := Page(first), handover, 120.0)
        training.line(metric(20))
        training.after(60.0, training.end)
        outcome = await training.follow(handover=handover, sink=Page(page))
        assert [step for step, _ in outcome.status["series"]["loss"]] == [*before, 10, 20]
        assert outcome.training_metrics["loss"]["last"] == 0.8


async def test_points_since_the_last_status_are_handed_over() -> None:
    """A worker that adopts a job reads its whole log, and defers before it writes the next status."""
    async with staged(since=2 * DAY) as training:
        training.start(*map(metric, range(1, 51)), since=DAY)
        handover = await training.hand_over(10.0, sink=(page := Page()), refresh_seconds=lambda: 15.0)
        training.line(metric(51))
        training.after(60.0, training.end)
        outcome = await training.follow(handover=handover, sink=Page(page))
        assert [step for step, _ in outcome.status["series"]["loss"]] == [*range(1, 52)]


async def test_page_shows_the_present_phase_after_those_of_an_earlier_process() -> None:
    async with staged(since=2 * DAY) as training:
        training.start(since=DAY)
        handover, page = await training.hand_over(5.0), Page()
        training.after(30.0, training.condition, "Restarting")
        await killed(training, page, handover, 120.0)
        training.running()
        await killed(training, later := Page(page), handover, 30.0)
        assert [phase for phase, _ in later.written["phases"]] == ["Running", "Restarting", "Running"]
        assert later.written["phase"] == "Running"


@pytest.mark.parametrize("at", [1e20, -1e20, math.nan])
async def test_outcome_does_not_depend_on_what_is_stored(at: float) -> None:
    async with staged(since=2 * DAY) as training:
        training.start(since=DAY)
        handover, page = await training.hand_over(5.0), Page()
        amounts = {"held": math.nan, "wasted": 10**400, "gpus": math.inf}
        page.written = {"try_number": 1, "written_at": timing.epoch(), "usage": amounts, "phases": [["Running", at]]}
        training.after(30.0, training.end)
        assert (await training.follow(handover=handover, sink=Page(page))).succeeded


def state_of(phases: list[list[object]], age: float) -> JobState:
    """A process that has begun so many seconds after it was handed the training over, which runs."""
    state = JobState(REF, Handover(handed_over_at=timing.epoch() - age, phases=phases))
    state.enter(Phase.RUNNING)
    return state


async def test_phase_between_the_last_status_and_the_handover_is_kept() -> None:
    now = timing.epoch()
    state = state_of([["Queued", now - 50], ["Running", now - 1.5]], 1.0)
    state.take_earlier_status({"usage": USAGE, "written_at": now - 5, "phases": [["Queued", now - 50]]})
    assert [phase for phase, _ in state.phases] == ["Queued", "Running"]


async def test_phases_that_this_process_has_seen_are_kept_when_it_starts_over() -> None:
    now = timing.epoch()
    seen = [["Running", now - 1000], ["Restarting", now - 300], ["Running", now - 200]]
    state = state_of(seen, 0.0)
    state.take_earlier_status({"usage": USAGE, "written_at": now - 500, "phases": [["Running", now - 1000]]})
    assert [list(entry) for entry in state.phases] == seen


async def test_time_in_a_queue_is_counted_however_late_the_status_is_read() -> None:
    now = timing.epoch()
    state = JobState(REF, Handover(handed_over_at=now - 2000))
    state.requested_by_workload = Amounts({GPU: 8})
    state.enter(Phase.QUEUED)
    await asyncio.sleep(600)
    stored = {"requested": 8000.0, "queued": 8000.0}
    state.take_earlier_status({"usage": stored, "written_at": now - 60, "phases": [["Queued", now - 1060]]})
    used = state.pods.usage(timing.utc_now(), None, state.queued_seconds(), state.spans_in(Phase.QUEUED))
    assert used.queued == pytest.approx(8000 + 8 * 600, abs=20)


async def test_pod_that_is_learnt_of_later_is_counted_once() -> None:
    """A replay of the watch shows a pod that the earlier process had counted."""
    now = timing.epoch()
    state = state_of([], 90000.0)
    state.take_earlier_status({"usage": {"requested": DAY, "held": DAY, "gpus": 1}, "written_at": now - 60})
    times = {"creationTimestamp": stamp(DAY + 100), "deletionTimestamp": stamp(100)}
    spec = {"nodeName": "n", "containers": [{"name": "pytorch", "resources": {"limits": GPUS}}]}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(DAY + 100)}
    pod = replica_pod("Worker", 1, meta=times, spec=spec, phase="Running", conditions=[scheduled])
    state.pods.mark_deleted(pod, is_seen=True)
    assert state.pods.usage(timing.utc_now(), None).held == pytest.approx(DAY, abs=5)
