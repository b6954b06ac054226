"""What one look at a job shows to a sensor that waits for some of its conditions."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import Any

from airflow_provider_ktrain.core.absent import Absent
from airflow_provider_ktrain.core.state.status import phase_of, shown_conditions


class Awaited(enum.Enum):
    """Whether a job has one of the awaited conditions."""

    MET = "met"
    NOT_YET = "not yet"
    NEVER = "never: the job has ended otherwise"


def look_for(job: Mapping[str, Any] | Absent, conditions: Collection[str]) -> Awaited:
    """Whether the job has one of the conditions.

    :param job: as it was read. It may not exist yet.
    """
    if isinstance(job, Absent):
        return Awaited.NOT_YET
    if set(conditions) & shown_conditions(job, phase_of(job)):
        return Awaited.MET
    return Awaited.NEVER if phase_of(job).ended else Awaited.NOT_YET


def describe_state(job: Mapping[str, Any] | Absent) -> str:
    """A clause for the log: "is Running", or "doesn't exist"."""
    return "doesn't exist" if isinstance(job, Absent) else f"is {phase_of(job)}"
