"""The conditions of a job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FAILED_ANNOTATION = "ktrain.airflow/failed"  #: The condition Failed of a job that a release suspended.
#: Why the success of a job is incomplete: its pods, which showed that, may be gone when the next process looks.
INCOMPLETE_ANNOTATION = "ktrain.airflow/interrupted"


@dataclass(frozen=True)
class Condition:
    """A condition of a job whose status is True."""

    type: str
    reason: str = ""
    message: str = ""
    since: str = ""  #: LastTransitionTime, RFC 3339.


def true_conditions(job: Mapping[str, Any]) -> dict[str, Condition]:
    """The conditions whose status is True, by type, and the condition Failed that the job's annotation has kept."""
    conditions: Iterable[Any] = (job.get("status") or {}).get("conditions") or ()
    found = [c for c in conditions if isinstance(c, Mapping) and c.get("type") and str(c.get("status")) == "True"]
    return _kept_failure(job) | {str(c["type"]): _condition(str(c["type"]), c) for c in found}


def incomplete_annotation(job: Mapping[str, Any]) -> str:
    """What INCOMPLETE_ANNOTATION says of the job; empty if nothing."""
    return str(((job.get("metadata") or {}).get("annotations") or {}).get(INCOMPLETE_ANNOTATION) or "")


def ended_at(job: Mapping[str, Any]) -> str:
    """When the job ended by its conditions, as RFC 3339, which sorts as text; empty if it has not ended."""
    true = true_conditions(job)
    return next((true[name].since for name in ("Succeeded", "Complete", "Failed") if name in true), "")


def failure_annotation(job: Mapping[str, Any]) -> str | None:
    """The value of FAILED_ANNOTATION; None if the job has not failed.

    A failed TrainJob loses its condition when its JobSet comes back, also while it is suspended (recording 60b).
    """
    failed = true_conditions(job).get("Failed")
    if failed is None:
        return None
    return json.dumps({"reason": failed.reason, "message": failed.message, "lastTransitionTime": failed.since})


def _kept_failure(job: Mapping[str, Any]) -> dict[str, Condition]:
    stored = ((job.get("metadata") or {}).get("annotations") or {}).get(FAILED_ANNOTATION)
    if stored is None:
        return {}
    try:
        kept = json.loads(stored)
    except ValueError:
        kept = None
    return {"Failed": _condition("Failed", kept if isinstance(kept, Mapping) else {})}


def _condition(type_: str, fields: Mapping[str, Any]) -> Condition:
    texts = (str(fields.get(key) or "") for key in ("reason", "message", "lastTransitionTime"))
    return Condition(type_, *texts)
