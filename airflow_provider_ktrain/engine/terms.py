"""What a host gives to `engine.supervisor.follow` and what it gets: small values that travel between processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_provider_ktrain.core.formats import VERSION, known_fields
from airflow_provider_ktrain.core.limits import Limits
from airflow_provider_ktrain.core.selection import LogChoice
from airflow_provider_ktrain.core.text import clean


@dataclass(frozen=True)
class Options:
    """How a job is followed; travels in trigger kwargs.

    :param logs: whose logs to bring: see `core.selection`.
    :param deadline: epoch seconds at which the execution is over, or None.
    :param on_finish_action: delete_job, keep_job or delete_succeeded_job; whatever is kept, GPUs are not.
    :param drain_timeout: seconds that logs may take after the end before the pods are deleted.
    :param release_timeout: seconds until pods must be seen to be gone; their own grace and 30 s where that is longer.
    :param release: False for jobs that others submitted: nothing is ever deleted.
    :param conditions: following ends, with success, as soon as one of these is True.
    """

    logs: LogChoice = "auto"
    limits: Limits = field(default_factory=Limits)
    deadline: float | None = None
    on_finish_action: str = "delete_job"
    drain_timeout: float = 30
    release_timeout: float = 90
    release: bool = True
    conditions: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Options:
        limits = Limits(**known_fields(Limits, data.get("limits")))
        conditions = tuple(data.get("conditions") or ())
        return cls(**{**known_fields(cls, data), "limits": limits, "conditions": conditions})


class Stop:
    """A request to end early, from a signal handler or another task."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._wake: Callable[[], object] | None = None

    def request(self, reason: str) -> None:
        """Ask for the end; safe in a signal handler while the loop runs."""
        self.reason = reason
        if self._wake is not None:
            self._wake()

    def attach(self, event: asyncio.Event) -> None:
        """From now on, a request sets `event` in the running loop."""
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.is_running() and loop.call_soon_threadsafe(event.set)
        if self.reason is not None:
            event.set()


@dataclass(frozen=True)
class Outcome:
    """How following ended; travels as the trigger's event.

    :param phase: the job's last phase.
    :param succeeded: True where the training did.
    :param superseded: True where another try owns the job by now: nothing was touched.
    :param cause: why it failed, of `core.diagnosis.Cause`, as a dict.
    :param released: the release's line for the log; empty where nothing was released.
    :param release_error: why the release failed, or empty; the caller must try again.
    :param kept: the `JobRef`, as a dict, of a job that has ended and that the caller deletes when all else is done: its
        status is the one proof of how it ended, for whoever follows it next if this outcome never arrives.
    :param usage: GPU-seconds, of `core.usage`.
    :param result: what the primary handed over (`core.result`), and `result_error` what is wrong with it.
    :param metrics: seconds per phase, log lines and bytes, watch requests, over all hosts that followed the job.
    """

    phase: str
    succeeded: bool
    superseded: bool = False
    cause: dict[str, Any] | None = None
    released: str = ""
    release_error: str = ""
    kept: dict[str, str] | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    result_error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Without what Airflow's processes and its database cannot carry."""
        return clean(asdict(self))


@dataclass(frozen=True)
class Handover:
    """What the next process that follows the job needs to know; travels in trigger kwargs and in the task's state.

    :param cursor: where each container's log stands, of `core.logcursor`.
    :param metrics: as in `Outcome`, so far.
    :param result_line: the primary's result line so far; empty where there is none.
    :param pod_history: what was counted of pods that are gone, of `core.podhistory`.
    """

    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    result_line: str = ""
    pod_history: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Without what Airflow's processes and its database cannot carry."""
        return clean({"version": VERSION, **asdict(self)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Handover:
        return cls(**known_fields(cls, data))
