"""The summary of a training that succeeded."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp


def summary_of_success(ref: JobRef, kind: Kind, job: Mapping[str, Any], now: datetime) -> str:
    """One line for the log: the job, its run time and its replicas.

    :param now: the current time, used if the job has no completionTime.
    """
    status = job.get("status") or {}
    created = (job.get("metadata") or {}).get("creationTimestamp")
    began = parse_timestamp(status.get("startTime") or created)
    ended = parse_timestamp(status.get("completionTime")) or now
    run_time = f" after {format_duration((ended - began).total_seconds())}" if began else ""
    replicas = counted(kind.size(job), "replica")
    return f"{ref} succeeded{run_time} with {replicas}."


def format_duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the two largest units."""
    rest, parts = max(round(seconds), 0), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    first = next((n for n, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or unit == parts[first][1])
