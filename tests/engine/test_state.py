"""What the follower logs about the phase of a job."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.state.status import phase_of
from airflow_provider_ktrain.engine.follow.messages import Handover
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
def test_message_of_a_condition_is_logged_unless_it_repeats_the_phase(condition: str, message: str, line: str) -> None:
    state = JobState(JobRef("PyTorchJob", "v1", "ns", "train", "uid"), Handover())
    shown = {"type": condition, "status": "True", "reason": "BackoffLimitExceeded", "message": message}
    job: dict[str, Any] = {"status": {"conditions": [shown]}}
    state.job = job
    assert state.describe(phase_of(job)) == f"PyTorchJob ns/train {line}"
