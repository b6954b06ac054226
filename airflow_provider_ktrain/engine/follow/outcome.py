"""How following a job ended, and the event by which a trigger reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.formats import VERSION, known_fields, mapping
from airflow_provider_ktrain.core.text.output import masked
from airflow_provider_ktrain.core.text.xcom_values import transportable

#: Cause of a failed outcome without one.
UNKNOWN_CAUSE = {"category": "unknown", "summary": "the job failed, and its outcome contains no cause"}


@dataclass(frozen=True)
class Outcome:
    """How following ended; the trigger's event. Its texts are `masked`; the user's own values are as reported.

    docs/reference/formats.md describes its fields.
    """

    phase: str
    succeeded: bool
    superseded: bool = False
    cause: dict[str, Any] | None = None
    released: str = ""
    release_error: str = ""
    #: How the job was kept. If this outcome never arrives, the job's status is the only proof of its end.
    kept: dict[str, str] | None = None
    unreleased: dict[str, str] | None = None  #: An ended job that is kept, and whose pods could not be deleted.
    usage: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    result_error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    exit_code: int | None = None
    training_metrics: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    step: float | None = None
    has_result: bool = True
    require: dict[str, str] | None = None  #: The bounds that were rendered before the submission; None if not known.
    unmet: str = ""  #: What the training lacks of them.

    def __post_init__(self) -> None:
        for name in ("cause", "released", "release_error", "result_error", "status", "unmet"):
            object.__setattr__(self, name, masked(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without what Airflow's processes or its database reject."""
        return transportable(asdict(self), "outcome")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read what `to_dict` returned, in this release or another one.

        :raises ValueError: `succeeded` is missing.
        """
        fields = known_fields(cls, data)
        if not isinstance(fields.get("succeeded"), bool):
            raise ValueError(f"expected a boolean `succeeded` in the outcome, found the fields {sorted(fields)}")
        fields.setdefault("phase", "Succeeded" if fields["succeeded"] else "Failed")
        if fields.get("cause") is not None:
            fields["cause"] = {**UNKNOWN_CAUSE, **mapping(fields["cause"])}
        return cls(**fields)


def cause_of(outcome: Outcome) -> Cause:
    """The cause of an outcome, of this release or another one."""
    given = {**UNKNOWN_CAUSE, **(outcome.cause or {})}
    return Cause(**{**known_fields(Cause, given), "category": Category.of(given["category"])})


def event_of(ended: Outcome | str) -> dict[str, Any]:
    """The event with which a trigger ends: the outcome, or why the trigger can't follow the job any more."""
    content = {"error": masked(ended)} if isinstance(ended, str) else {"outcome": ended.to_dict()}
    return {"version": VERSION, **content}


def read_event(event: Any) -> Outcome | str:
    """The outcome in a trigger's event, or the trigger's error. An unreadable event counts as an error."""
    content = mapping(event)
    if "outcome" in content:
        try:
            return Outcome.from_dict(content["outcome"])
        except ValueError as e:
            return f"its event can't be read: {e}"
    return str(
        content.get("error") or f"its event can't be read: expected `outcome`, found {sorted(map(str, content))}"
    )
