"""Reads and changes fields of any manifest, in place."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.core.errors import ManifestError

Manifest = dict[str, Any]

MAX_DEADLINE_SECONDS = 2**31 - 1  #: activeDeadlineSeconds of a batch Job is an int32


def mapping_at(holder: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping at a key, added if the key is missing.

    :raises ManifestError: if another type of value is there.
    """
    if holder.get(key) is None:
        holder[key] = {}
    value = holder[key]
    if not isinstance(value, dict):
        raise ManifestError(f"{key} must be a mapping", found=repr(value)[:80], expected="a mapping")
    return value


def lower_deadline(holder: dict[str, Any], seconds: float) -> None:
    """Set activeDeadlineSeconds unless a shorter one is set."""
    ours = max(1, min(int(seconds), MAX_DEADLINE_SECONDS))
    theirs = holder.get("activeDeadlineSeconds")
    holder["activeDeadlineSeconds"] = min(theirs, ours) if isinstance(theirs, int) else ours
