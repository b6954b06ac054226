from __future__ import annotations

import pytest

from airflow_provider_ktrain.operators.airflow_settings import redelivered, without_retry

RETRIES = "Set retries to 1 or more: Airflow may fail this try although the training succeeds"
UNLIMITED = "visibility_timeout (now 86400 s) to more than how long the training may run, or deferrable=True."
LIMITED = "visibility_timeout (now 86400 s) to more than execution_timeout, or deferrable=True."


@pytest.mark.parametrize(("retries", "expected"), [(0, RETRIES), (1, ""), (3, "")])
def test_training_without_retries_is_reported(retries: int, expected: str) -> None:
    check(without_retry(retries), expected)


@pytest.mark.parametrize(
    ("worker_seconds", "redelivery_seconds", "expected"),
    [
        (None, None, ""),
        (172800, None, ""),
        (None, 86400, UNLIMITED),
        (86400, 86400, LIMITED),
        (86399, 86400, ""),
    ],
)
def test_training_that_is_longer_than_its_message_is_invisible_is_reported(
    worker_seconds: float | None, redelivery_seconds: float | None, expected: str
) -> None:
    check(redelivered(worker_seconds, redelivery_seconds), expected)


def check(text: str, expected: str) -> None:
    """The first line says what to change, the second one why."""
    lines = text.splitlines()
    assert len(lines) == (2 if expected else 0)
    assert expected in text.partition("\n")[0]
    assert all(len(line) <= 200 for line in lines)
