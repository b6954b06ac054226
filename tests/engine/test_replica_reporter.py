"""Changes of replicas are logged at a bounded rate, however many replicas there are."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.replicas import MIN_INTERVAL_SECONDS, ReplicaReporter
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.engine.tasks import Lines
from tests.factories import replica_pod

REPLICAS = 100
NO_HANDOVER = Handover()
JOB = {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": REPLICAS}}}}


def observed(running: int, phase: Phase = Phase.STARTING, handover: Handover = NO_HANDOVER) -> JobState:
    state = JobState(JobRef("PyTorchJob", "v1", "ns", "train", "uid"), handover)
    state.job = JOB
    state.enter(phase)
    observe(state, running)
    return state


def observe(state: JobState, running: int) -> None:
    pods = {
        f"u{index}": replica_pod("worker", index, phase="Running" if index < running else "Pending")
        for index in range(REPLICAS)
    }
    state.pods.update(pods, (), timing.utc_now())


def reporter_of(state: JobState, log: Lines) -> ReplicaReporter:
    api: Any = None
    return ReplicaReporter(FollowContext(api, state, log))


@pytest.mark.virtual_time
async def test_a_large_job_that_starts_logs_few_lines() -> None:
    state, log = observed(0), Lines()
    reporter = reporter_of(state, log)
    for running in range(REPLICAS + 1):
        observe(state, running)
        await reporter.observe()
    assert len(log.messages) == 2
    assert (log.messages[0], log.messages[-1]) == ("0/100 Running · 100 Pending", "100/100 Running")
    assert reporter.due is None


@pytest.mark.virtual_time
async def test_a_change_is_logged_when_its_time_has_come() -> None:
    state, log = observed(0), Lines()
    reporter = reporter_of(state, log)
    await reporter.observe()
    observe(state, 3)
    await reporter.observe()
    assert len(log.messages) == 1
    assert reporter.due is not None
    assert reporter.due == timing.now() + MIN_INTERVAL_SECONDS


@pytest.mark.parametrize(("running", "lines"), [(REPLICAS, 0), (3, 1)])
async def test_a_triggerer_does_not_repeat_that_all_replicas_run(running: int, lines: int) -> None:
    state, log = observed(running, Phase.RUNNING, Handover(handed_over_at=1.0)), Lines()
    await reporter_of(state, log).observe()
    assert len(log.messages) == lines


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.SUCCEEDED, Phase.FAILED])
async def test_nothing_is_logged_of_a_job_that_waits_in_a_queue_or_has_ended(phase: Phase) -> None:
    state, log = observed(1, phase), Lines()
    await reporter_of(state, log).observe()
    assert log.messages == []
