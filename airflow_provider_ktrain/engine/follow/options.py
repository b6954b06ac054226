"""How a job is followed: as its task wants, and as the process that follows it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from airflow_provider_ktrain.core.formats import known_fields, mapping
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.logs.selection import LogChoice
from airflow_provider_ktrain.core.state.limits import Limits


@dataclass(frozen=True)
class Options:
    """How a job is followed; part of trigger kwargs. docs/reference/formats.md describes the fields.

    :param drain_timeout: before the pods are deleted, the rest of the logs is read until no line has come for this
        time, in seconds. While lines come, it goes on for up to 5 minutes, but not past the deadline. After the
        release, what was read is logged within the same limits; after a takeover, lines since the deferral have this
        time. Default: 30.
    :param release_timeout: how long to wait until the pods are gone, in seconds; at least their longest grace period
        plus 30 s. Default: 90.
    """

    logs: LogChoice = "auto"
    limits: Limits = field(default_factory=Limits)
    deadline: float | None = None
    on_finish_action: OnFinishAction = OnFinishAction.DELETE_JOB
    drain_timeout: float = 30
    release_timeout: float = 90
    release: bool = True
    conditions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON types."""
        return {
            **asdict(self),
            "on_finish_action": self.on_finish_action.value,
            "conditions": list(self.conditions),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Options:
        """Read what `to_dict` returned, in this release or another one."""
        limits = Limits(**known_fields(Limits, mapping(data).get("limits")))
        conditions = tuple(mapping(data).get("conditions") or ())
        action = OnFinishAction.of(mapping(data).get("on_finish_action", OnFinishAction.DELETE_JOB))
        read = {"limits": limits, "conditions": conditions, "on_finish_action": action}
        return cls(**{**known_fields(cls, data), **read})


REFRESH_SECONDS = 60.0  #: between two statuses of a job that runs, if nothing else changes


class StatusSink(Protocol):
    """Where a host takes statuses."""

    host: str
    """`worker` or `trigger`."""
    try_number: int
    """Of the task instance."""

    def offer(self, build: Callable[[], Callable[[], Mapping[str, Any]]], *, urgent: bool) -> None:
        """Publish a status soon. It must not block or raise.

        :param build: takes the status as it is when the host is about to write it. It returns a function that makes the
            document, which the host calls in a thread.
        :param urgent: whether the phase has changed.
        """

    async def conclude(self, document: Mapping[str, Any]) -> bool:
        """Store a `core.reporting.conclusion.Conclusion` as a dict. It never raises.

        :return: whether it was stored within 10 s. False: it may still be stored later.
        """

    def retract(self) -> None:
        """Leave the conclusion out of later statuses: the job was not released."""

    async def concluded(self) -> Mapping[str, Any] | None:
        """The conclusion that a process of the same try has stored; empty if there is none. It never raises.

        :return: None: Airflow doesn't answer.
        """


@dataclass(frozen=True)
class FollowPolicy:
    """How the process that follows a job behaves.

    :param fail_fast_on_forbidden: fail if a watch is rejected (401, 403) in the first minute: for a job that was just
        created, or that isn't ours to release. Any other job was followed before, and an API server may reject
        requests for a while after its restart. Default: False.
    :param shared: whether the process follows many jobs, as a triggerer does: it uses one watch for all jobs of the
        deployment. Default: False.
    :param began_at: when the process received the job, before it built a client, in epoch seconds. Default: None, now.
    :param status_sink: takes the training's status for the training page. Default: None, nobody does.
    :param node_seconds: between two reads of a node while a job runs, one node at a time. Default: 60.
    """

    fail_fast_on_forbidden: bool = False
    shared: bool = False
    began_at: float | None = None
    status_sink: StatusSink | None = None
    node_seconds: float = 60.0
