"""Timestamps as Kubernetes writes them. The present is that of `engine.timing`, so a test's event loop can own it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from airflow_provider_ktrain.engine import timing

EPOCH = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)  #: The time at which the times of `log_time` begin.


def stamp(seconds_ago: float = 0.0) -> str:
    """A timestamp of the API server, which has no fractions of a second."""
    return f"{_ago(seconds_ago):%Y-%m-%dT%H:%M:%SZ}"


def precise_stamp(seconds_ago: float = 0.0) -> str:
    """A timestamp of a log line, now or some seconds ago."""
    return f"{_ago(seconds_ago):%Y-%m-%dT%H:%M:%S.%f}000Z"


def log_time(seconds: float, nanos: int = 0) -> str:
    """A timestamp of a log line, a number of seconds after `EPOCH`."""
    moment = EPOCH + timedelta(seconds=int(seconds))
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{round((seconds % 1) * 1e9) + nanos:09d}Z"


def _ago(seconds: float) -> datetime:
    ahead = getattr(asyncio._get_running_loop(), "ahead", 0.0)  # the clock of the client's host, as of a `VirtualLoop`
    return datetime.fromtimestamp(timing.epoch() - ahead - seconds, UTC)
