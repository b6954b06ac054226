"""The conditions of a job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Condition:
    """A condition of a job whose status is True."""

    type: str
    reason: str = ""
    message: str = ""
    since: str = ""  #: lastTransitionTime, RFC 3339


def true_conditions(job: Mapping[str, Any]) -> dict[str, Condition]:
    """The conditions whose status is True, by type."""
    conditions: Iterable[Any] = (job.get("status") or {}).get("conditions") or ()
    return {
        str(c["type"]): Condition(
            str(c["type"]), c.get("reason") or "", c.get("message") or "", c.get("lastTransitionTime") or ""
        )
        for c in conditions
        if isinstance(c, Mapping) and c.get("type") and str(c.get("status")) == "True"
    }
