"""What is known of a job, in the form in which the rules of a diagnosis take it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from airflow_provider_ktrain.core.diagnosis.pod_failures import Failure, Json, failures, suspects
from airflow_provider_ktrain.core.kinds import KINDS, PYTORCHJOB, Kind
from airflow_provider_ktrain.core.state.status import Condition, true_conditions


@dataclass(frozen=True)
class Seen:
    """The evidence.

    :param healed: whether a failure counts though its container runs again.
    """

    job: Json
    pods: Sequence[Json]
    events: Sequence[Json]
    logs: Mapping[str, Sequence[str]]
    now: datetime | None = None
    gone: bool = False
    healed: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS.get(str(self.job.get("kind")), PYTORCHJOB)

    @property
    def title(self) -> str:
        return f"{self.kind.name} {(self.job.get('metadata') or {}).get('name', '')}".strip()

    @property
    def failed(self) -> Condition | None:
        return true_conditions(self.job).get("Failed")

    @functools.cached_property
    def all_failures(self) -> list[Failure]:
        return failures(self.kind, self.pods, self.logs, healed=self.healed)

    @property
    def failures(self) -> list[Failure]:
        """Those that can be the cause, the likeliest first."""
        return suspects(self.all_failures)

    def replica_of(self, pod: Json) -> str:
        role, index = self.kind.pod_role((pod.get("metadata") or {}).get("labels") or {})
        return role if role == "Launcher" else f"{role} {index}"


def evidence_of(
    job: Json,
    pods: Sequence[Json],
    events: Sequence[Json],
    logs: Mapping[str, Sequence[str]] | None = None,
    now: datetime | None = None,
    gone: bool = False,
) -> Seen:
    """The evidence in an order of its own: the one in which it came says nothing."""

    def place(pod: Json) -> tuple[str, str]:
        meta = pod.get("metadata") or {}
        return str(meta.get("name")), str(meta.get("creationTimestamp"))

    def told(event: Json) -> tuple[str, str]:
        return str(event.get("lastTimestamp") or event.get("eventTime") or ""), str(event.get("message"))

    return Seen(job, sorted(pods, key=place), sorted(events, key=told), logs or {}, now, gone)
