"""What the process that follows a job hands over to the next one, and the arguments of a trigger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_provider_ktrain.core.formats import VERSION, known_fields, mapping
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.reporting.trigger_arguments import fitted
from airflow_provider_ktrain.core.text.xcom_values import transportable
from airflow_provider_ktrain.engine.follow.options import Options


@dataclass(frozen=True)
class Handover:
    """What the next process that follows the job needs to know; part of trigger kwargs and the task store.

    docs/reference/formats.md describes its fields.
    """

    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    result_line: str = ""
    result_from: dict[str, str] = field(default_factory=dict)
    pod_history: dict[str, Any] = field(default_factory=dict)
    handed_over_at: float = 0.0  #: Epoch seconds; 0 if unknown.
    training_metrics: dict[str, Any] = field(default_factory=dict)
    phases: list[list[Any]] = field(default_factory=list)
    generation: int | None = None
    spec_since: float | None = None  #: Epoch seconds; None if no change of the job's specification was seen.

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without what Airflow's processes or its database reject."""
        return transportable({"version": VERSION, **asdict(self)}, "handover")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Handover:
        """A handover of this release or another one: unknown fields are ignored, missing ones have defaults."""
        return cls(**known_fields(cls, data))


@dataclass(frozen=True)
class Deferral:
    """Arguments of a trigger, of which a copy is stored in the task store.

    If a trigger fails, Airflow doesn't pass its arguments to the worker. The worker then reads the stored copy to go on
    with the job. docs/reference/formats.md describes the fields.
    """

    job: JobRef
    options: Options
    handover: Handover
    kubernetes_conn_id: str = "kubernetes_default"
    cluster_context: str | None = None
    failures: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The trigger's kwargs, in the format of docs/reference/formats.md, without what doesn't fit: see `fitted`."""
        nested = {name: getattr(self, name).to_dict() for name in ("job", "options", "handover")}
        return fitted({"version": VERSION, **vars(self), **nested})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Deferral:
        """Read what `to_dict` returned, in this release or another one.

        :raises ValueError: it contains no job.
        """
        nested = {
            "job": JobRef.from_dict(mapping(data.get("job"))),
            "options": Options.from_dict(data.get("options")),
            "handover": Handover.from_dict(data.get("handover")),
        }
        return cls(**{**known_fields(cls, data), **nested})


def seconds_in_worker(failures: int, schedule: Sequence[float]) -> float | None:
    """How long the worker follows a job after its trigger failed, in seconds; None to follow it to its end.

    :param failures: number of triggers of this try that failed, including this one.
    """
    return schedule[failures - 1] if failures <= len(schedule) else None
