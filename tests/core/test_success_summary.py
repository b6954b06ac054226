from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.reporting.announcement import summary_of_success
from airflow_provider_ktrain.core.text.output import format_duration

NOW = datetime(2026, 11, 21, 11, 0, tzinfo=UTC)
REF = JobRef("PyTorchJob", "v1", "ns", "train-1", "u", "ti")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (12.4, "12 s"), (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min"), (273_700, "3 d 4 h")],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("status", "duration"),
    [
        ({"startTime": "2026-11-21T10:00:00Z", "completionTime": "2026-11-21T10:02:05Z"}, " after 2 min 5 s"),
        ({"startTime": "2026-11-21T10:00:00Z"}, " after 1 h"),
        ({}, " after 1 h 1 min"),
    ],
)
def test_summary_of_success(status: dict[str, str], duration: str) -> None:
    job: dict[str, Any] = {
        "metadata": {"creationTimestamp": "2026-11-21T09:59:00Z"},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}},
        "status": status,
    }
    summary = summary_of_success(REF, PYTORCHJOB, job, NOW)
    assert summary == f"{REF} succeeded{duration} with 3 replicas."
    assert summary_of_success(REF, PYTORCHJOB, {}, NOW) == f"{REF} succeeded with 0 replicas."
