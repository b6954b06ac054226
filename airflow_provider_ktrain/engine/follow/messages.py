"""What a host passes to `follow` and gets from it. Most of it travels between processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from airflow_provider_ktrain.core.formats import VERSION, known_fields, mapping
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kills import KillAction, KillDecision
from airflow_provider_ktrain.core.logs.selection import LogChoice
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.text import clean


@dataclass(frozen=True)
class Options:
    """How a job is followed; travels in trigger kwargs.

    :param logs: whose logs to bring: see `core.selection`.
    :param deadline: epoch seconds at which the execution is over, or None.
    :param on_finish_action: delete_job, keep_job or delete_succeeded_job; whatever is kept, GPUs are not.
    :param drain_timeout: seconds without a line after which reading the rest of the logs ends, before the pods are
        deleted. Where lines still come it goes on for 5 minutes at most, and not past the deadline.
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
        return {**asdict(self), "conditions": list(self.conditions)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Options:
        limits = Limits(**known_fields(Limits, mapping(data).get("limits")))
        conditions = tuple(mapping(data).get("conditions") or ())
        return cls(**{**known_fields(cls, data), "limits": limits, "conditions": conditions})


@dataclass(frozen=True)
class HostPolicy:
    """How the process that follows a job behaves.

    :param until: when to hand the job over, by `time.monotonic`. Default: None, follow it to its end.
    :param fail_fast_on_forbidden: fail if a watch is rejected (401, 403) in the first minute: for a job that was just
        created, or that isn't ours to release. Any other job was followed before, and an API server may reject
        requests for a while after its restart. Default: False.
    :param shared: whether the process follows many jobs, as a triggerer does: it uses one watch for all jobs of the
        deployment. Default: False.
    """

    until: float | None = None
    fail_fast_on_forbidden: bool = False
    shared: bool = False


class Stop:
    """A request to end early, from a signal handler or another task.

    :param decide: asked once the loop knows of the request: whether the job is released or kept. None: released.
    """

    def __init__(self, decide: Callable[[], Awaitable[KillDecision]] | None = None) -> None:
        self.reason: str | None = None
        self._decide = decide
        self._wake: Callable[[], object] | None = None

    def request(self, reason: str) -> None:
        """Ask for the end; safe in a signal handler while the loop runs."""
        self.reason = reason
        if self._wake is not None:
            self._wake()

    async def decision(self) -> KillDecision:
        """What is done with the job."""
        if self._decide is not None:
            return await self._decide()
        return KillDecision(KillAction.RELEASE, self.reason or "")

    def attach(self, event: asyncio.Event) -> None:
        """From now on, a request sets `event` in the running loop."""
        loop = asyncio.get_running_loop()
        self._wake = lambda: loop.is_running() and loop.call_soon_threadsafe(event.set)
        if self.reason is not None:
            event.set()


#: the cause of an outcome that names none
UNKNOWN_CAUSE = {"category": "unknown", "summary": "the job failed, and its outcome doesn't tell why"}


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

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """What `to_dict` gave, here or in another release. ValueError where it doesn't tell of a success."""
        fields = known_fields(cls, data)
        if not isinstance(fields.get("succeeded"), bool):
            raise ValueError(f"an outcome doesn't tell whether the job succeeded; its fields: {sorted(fields)}")
        fields.setdefault("phase", "Succeeded" if fields["succeeded"] else "Failed")
        if fields.get("cause") is not None:
            fields["cause"] = {**UNKNOWN_CAUSE, **mapping(fields["cause"])}
        return cls(**fields)


def event_of(ended: Outcome | str) -> dict[str, Any]:
    """The event with which a trigger ends: how the job ended, or why the trigger can't follow it any further."""
    said = {"error": clean(ended)} if isinstance(ended, str) else {"outcome": ended.to_dict()}
    return {"version": VERSION, **said}


def read_event(event: Any) -> Outcome | str:
    """The outcome that a trigger's event brings, or why there is none: an unreadable event is a trigger's failure."""
    said = mapping(event)
    if "outcome" in said:
        try:
            return Outcome.from_dict(said["outcome"])
        except ValueError as e:
            return f"its event cannot be read: {e}"
    return str(said.get("error") or f"its event cannot be read: found {sorted(map(str, said))}, expected an outcome")


@dataclass(frozen=True)
class Handover:
    """What the next process that follows the job needs to know; travels in trigger kwargs and in the task's state.

    :param cursor: where each container's log stands, of `core.logcursor`.
    :param metrics: as in `Outcome`, so far.
    :param result_line: the primary's result line so far; empty where there is none.
    :param pod_history: what was counted of pods that are gone, of `core.podhistory`.
    :param handed_over_at: when it was made, in epoch seconds; 0 where that isn't known.
    """

    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    result_line: str = ""
    pod_history: dict[str, Any] = field(default_factory=dict)
    handed_over_at: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Without what Airflow's processes and its database cannot carry."""
        return clean({"version": VERSION, **asdict(self)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Handover:
        return cls(**known_fields(cls, data))


@dataclass(frozen=True)
class Deferral:
    """What a trigger is started with: its arguments, which are stored in the task's state as well.

    Airflow gives the worker nothing of a trigger that failed: from the stored copy it follows the job then.

    :param failures: how many triggers of this try have failed before.
    """

    job: JobRef
    options: Options
    handover: Handover
    kubernetes_conn_id: str = "kubernetes_default"
    cluster_context: str | None = None
    failures: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "job": self.job.to_dict(),
            "options": self.options.to_dict(),
            "handover": self.handover.to_dict(),
            "kubernetes_conn_id": self.kubernetes_conn_id,
            "cluster_context": self.cluster_context,
            "failures": self.failures,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Deferral:
        """What `to_dict` gave, here or in another release. ValueError where it names no job."""
        nested = {
            "job": JobRef.from_dict(mapping(data.get("job"))),
            "options": Options.from_dict(data.get("options")),
            "handover": Handover.from_dict(data.get("handover")),
        }
        return cls(**{**known_fields(cls, data), **nested})


def seconds_in_worker(failures: int, schedule: Sequence[float]) -> float | None:
    """How long the worker follows a job whose trigger has failed, before the task defers again; None: to its end.

    :param failures: how many triggers of this try have failed, this one included.
    :param schedule: seconds after the first failure, the second, and so on.
    """
    return schedule[failures - 1] if failures <= len(schedule) else None
