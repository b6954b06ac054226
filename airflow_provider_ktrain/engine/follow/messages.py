"""Arguments and results of `follow`. Processes exchange most of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.formats import VERSION, known_fields, mapping
from airflow_provider_ktrain.core.identity import JobRef, OnFinishAction
from airflow_provider_ktrain.core.logs.selection import LogChoice
from airflow_provider_ktrain.core.reporting.trigger_arguments import fitted
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.text import clean, shown
from airflow_provider_ktrain.engine.wakeup import Wakeup


@dataclass(frozen=True)
class Options:
    """How a job is followed; part of trigger kwargs.

    :param logs: whose logs to follow: see `core.logs.selection`. Default: "auto".
    :param limits: time limits and numbers of restarts. Default: see `Limits`.
    :param deadline: when the execution must end, in epoch seconds. Default: None, no deadline.
    :param on_finish_action: what happens to the job at the end. A job that is kept holds no GPUs. Default: DELETE_JOB.
    :param drain_timeout: before the pods are deleted, the rest of the logs is read until no line has come for this
        time, in seconds. While lines come, it goes on for up to 5 minutes, but not past the deadline. Default: 30.
    :param release_timeout: how long to wait until the pods are gone, in seconds; at least their longest grace period
        plus 30 s. Default: 90.
    :param release: whether to release the job. False for a job that others submitted. Default: True.
    :param conditions: types of job conditions; following ends with success when one of them is True. Default: none.
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
    :param unread_log: returns the number of bytes that this process has logged and that its supervisor hasn't read yet;
        lines are held back while there are many. Default: None, lines are held back only after a stall.
    """

    fail_fast_on_forbidden: bool = False
    shared: bool = False
    began_at: float | None = None
    status_sink: StatusSink | None = None
    unread_log: Callable[[], int] | None = None


class StopSignal:
    """A request to end early. A signal handler may set it: it does nothing but set a flag and wake the event loop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._waiting: tuple[asyncio.AbstractEventLoop, Wakeup] | None = None

    def request(self, reason: str) -> None:
        """Request the end.

        :param reason: a clause for the log.
        """
        self.reason = reason
        if self._waiting is not None:
            loop, wakeup = self._waiting
            if not loop.is_closed():
                loop.call_soon_threadsafe(wakeup.set)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the end is requested; returns whether it is.

        :param timeout: in seconds. Default: none.
        """
        wakeup = Wakeup()
        self._waiting = asyncio.get_running_loop(), wakeup
        if self.reason is None:
            await wakeup.wait(timeout)
        return self.reason is not None


#: cause of a failed outcome without one
UNKNOWN_CAUSE = {"category": "unknown", "summary": "the job failed, and its outcome contains no cause"}


@dataclass(frozen=True)
class Outcome:
    """How following ended; the trigger's event. Its texts are `shown`; the user's own values are as they were reported.

    :param phase: the job's last phase.
    :param succeeded: whether the training succeeded.
    :param superseded: whether another try owns the job; then nothing was released. Default: False.
    :param cause: why it failed: a `core.diagnosis.model.Cause` as a dict. Default: None.
    :param released: log line about the release. Default: "", nothing was released.
    :param release_error: why the release failed; the caller must try again. Default: "", it didn't fail.
    :param kept: `JobRef`, as a dict, of an ended job that the caller must delete at the very end. If this outcome never
        arrives, the job's status is the only proof of how it ended. Default: None.
    :param usage: GPU-seconds: see `core.state.usage`. Default: empty.
    :param result: the result that the primary printed: see `core.logs.result`. Default: None.
    :param result_error: what is wrong with the result. Default: "".
    :param metrics: seconds per phase, log lines and bytes, and watch requests, of all processes that followed the job.
    :param exit_code: with which the primary replica of a failed job ended: see `core.diagnosis.exit_code`. Default:
        None, unknown.
    :param training_metrics: last and best value of each metric that the program reported. Default: none.
    :param status: for the training page: see `core.state.status_document`. Default: empty.
    :param step: the highest step that the program reported in its log. Default: None, it reported none.
    :param has_result: whether the program reported a result; None may be one. Default: True, as of older releases.
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
    exit_code: int | None = None
    training_metrics: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    step: float | None = None
    has_result: bool = True

    def __post_init__(self) -> None:
        for name in ("cause", "released", "release_error", "result_error", "status"):
            object.__setattr__(self, name, shown(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without characters that Airflow's processes or its database reject."""
        return clean(asdict(self))

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
    category = given["category"]
    known = Category(category) if category in list(Category) else Category.UNKNOWN
    return Cause(**{**known_fields(Cause, given), "category": known})


def event_of(ended: Outcome | str) -> dict[str, Any]:
    """The event with which a trigger ends: the outcome, or why the trigger can't follow the job any more."""
    content = {"error": shown(ended)} if isinstance(ended, str) else {"outcome": ended.to_dict()}
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


@dataclass(frozen=True)
class Handover:
    """What the next process that follows the job needs to know; part of trigger kwargs and the task's state.

    :param cursor: position in each container's log: see `core.logs.cursor`. Default: empty.
    :param metrics: as in `Outcome`, so far. Default: empty.
    :param result_line: last result line of the primary. Default: "", there is none.
    :param result_from: where the log has it, if it is left out: `pod`, `container` and `time`. Default: there is none.
    :param pod_history: counts of pods that no longer exist: see `core.state.pod_history`. Default: empty.
    :param queue: what Kueue did with the job so far: see `engine.follow.queueing.QueueMemory`. Default: empty.
    :param handed_over_at: when the handover was made, in epoch seconds. Default: 0, unknown.
    :param training_metrics: what the program reported: see `core.state.training_metrics`. Default: nothing.
    :param phases: the job's phases so far, each with the epoch seconds at which it began. Default: none.
    """

    cursor: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    result_line: str = ""
    result_from: dict[str, str] = field(default_factory=dict)
    pod_history: dict[str, Any] = field(default_factory=dict)
    queue: dict[str, Any] = field(default_factory=dict)
    handed_over_at: float = 0.0
    training_metrics: dict[str, Any] = field(default_factory=dict)
    phases: list[list[Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, without characters that Airflow's processes or its database reject."""
        return clean({"version": VERSION, **asdict(self)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Handover:
        """A handover of this release or another one: unknown fields are ignored, missing ones have defaults."""
        return cls(**known_fields(cls, data))


@dataclass(frozen=True)
class Deferral:
    """Arguments of a trigger, of which a copy is stored in the task's state.

    If a trigger fails, Airflow doesn't pass its arguments to the worker. The worker then reads the stored copy to go on
    with the job.

    :param job: the job to follow.
    :param options: how to follow it.
    :param handover: from the worker.
    :param kubernetes_conn_id: id of the Airflow connection. Default: kubernetes_default.
    :param cluster_context: context of the kubeconfig. Default: None, the connection's.
    :param failures: number of triggers of this try that failed before. Default: 0.
    """

    job: JobRef
    options: Options
    handover: Handover
    kubernetes_conn_id: str = "kubernetes_default"
    cluster_context: str | None = None
    failures: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The trigger's kwargs, in the format of docs/reference/formats.md, without what doesn't fit: see `fitted`."""
        arguments = {
            "version": VERSION,
            "job": self.job.to_dict(),
            "options": self.options.to_dict(),
            "handover": self.handover.to_dict(),
            "kubernetes_conn_id": self.kubernetes_conn_id,
            "cluster_context": self.cluster_context,
            "failures": self.failures,
        }
        return fitted(arguments)

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
    :param schedule: seconds after the first failure, the second one, and so on.
    """
    return schedule[failures - 1] if failures <= len(schedule) else None
