from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_ktrain.core.text.timestamps import epoch_seconds, parse_timestamp


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-21T10:00:00Z", datetime(2026, 11, 21, 10, tzinfo=UTC)),
        ("2026-11-21T10:00:00.250000Z", datetime(2026, 11, 21, 10, 0, 0, 250_000, tzinfo=UTC)),
        ("2026-11-21T12:00:00+02:00", datetime(2026, 11, 21, 10, tzinfo=UTC)),
    ],
)
def test_timestamps_of_kubernetes(text: str, time: datetime) -> None:
    assert parse_timestamp(text) == time
    assert epoch_seconds(text) == time.timestamp()


@pytest.mark.parametrize("value", [None, "", "soon", 7, {}])
def test_invalid_timestamps_give_none(value: Any) -> None:
    assert parse_timestamp(value) is None
    assert epoch_seconds(value) is None
