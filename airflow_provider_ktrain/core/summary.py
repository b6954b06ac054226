"""What is said of a training that succeeded."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.diagnosis.pod_failures import moment
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.usage import Usage


def summary_of_success(ref: JobRef, kind: Kind, job: Mapping[str, Any], spent: Usage, now: datetime) -> str:
    """One line: which job, how long it ran, its replicas and its GPU time.

    :param job: as last seen.
    :param now: the end of a job that doesn't tell its own.
    """
    status = job.get("status") or {}
    began = moment(status.get("startTime")) or moment((job.get("metadata") or {}).get("creationTimestamp"))
    ended = moment(status.get("completionTime")) or now
    took = f" after {duration((ended - began).total_seconds())}" if began else ""
    replicas = sum(kind.count(job, role) for role in kind.roles)
    return f"{ref} succeeded{took} with {replicas} replica{'' if replicas == 1 else 's'}. {spent}"


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the two largest units."""
    rest, parts = max(round(seconds), 0), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    first = next((n for n, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or unit == parts[first][1])
