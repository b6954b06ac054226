"""Timestamps as Kubernetes writes them: RFC 3339, in whole seconds or with a fraction."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def parse_timestamp(text: Any) -> datetime | None:
    """The time that a timestamp denotes; None if the value is missing or is not a timestamp."""
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def epoch_seconds(text: Any) -> float | None:
    """The same in seconds since the epoch."""
    time = parse_timestamp(text)
    try:
        return None if time is None else time.timestamp()
    except (ValueError, OverflowError):  # of the year 1, without an offset
        return None


def utc(epoch_seconds: float) -> datetime:
    """The time in UTC that is so many seconds after the epoch."""
    return datetime.fromtimestamp(epoch_seconds, UTC)


def timestamp(epoch_seconds: float) -> str:
    """The same as Kubernetes writes it, in whole seconds."""
    return f"{utc(epoch_seconds):%Y-%m-%dT%H:%M:%SZ}"
