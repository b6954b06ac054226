"""What the follower knows and logs about the phase of a job."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.state import JobState


@pytest.mark.parametrize(
    ("condition", "message", "line"),
    [
        ("Running", "PyTorchJob train is running.", "is Running"),
        ("Running", "MPIJob ns/train is running.", "is Running"),
        ("Succeeded", "PyTorchJob train is successfully completed.", "is Succeeded"),
        ("Succeeded", "MPIJob ns/train successfully completed.", "is Succeeded"),
        (
            "Failed",
            "PyTorchJob train is failed because 1 Worker replica(s) failed.",
            "is Failed: PyTorchJob train is failed because 1 Worker replica(s) failed.",
        ),
        ("Failed", "", "is Failed: BackoffLimitExceeded"),
    ],
)
async def test_message_of_a_condition_is_logged_unless_it_repeats_it(condition: str, message: str, line: str) -> None:
    state = JobState(JobRef("PyTorchJob", "v1", "ns", "train", "uid"), Handover())
    shown = {"type": condition, "status": "True", "reason": "BackoffLimitExceeded", "message": message}
    job: dict[str, Any] = {"status": {"conditions": [shown]}}
    state.job = job
    assert state.describe(phase_of(job)) == f"PyTorchJob ns/train {line}"


@pytest.mark.parametrize(
    ("metrics", "phases", "has_run"),
    [
        ({}, [Phase.PENDING, Phase.STARTING], False),
        ({}, [Phase.RUNNING, Phase.SUSPENDED, Phase.PENDING], True),
        ({"seconds.running": 2400.0}, [Phase.PENDING], True),
        ({"seconds.restarting": 1.0}, [Phase.PENDING], True),
        ({"queue.evictions": 1}, [Phase.PENDING], True),
    ],
    ids=["starts", "ran", "ran in another process", "restarted in another process", "evicted by a queue"],
)
async def test_job_that_ran_is_known_to_have_run(metrics: dict[str, float], phases: list[Phase], has_run: bool) -> None:
    state = JobState(JobRef("MPIJob", "v2beta1", "ns", "train", "uid"), Handover(metrics=metrics))
    for phase in phases:
        state.enter(phase)
        state.phase_since -= 60
    assert state.has_run is has_run


async def test_job_whose_counts_did_not_fit_into_the_handover_counts_as_one_that_has_run() -> None:
    state = JobState(JobRef("MPIJob", "v2beta1", "ns", "train", "uid"), Handover(handed_over_at=1.0))
    assert state.has_run
