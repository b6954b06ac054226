"""Offers the training's status to the host, which publishes it for the training page.

The status is taken only when the host is about to write it: the host's budget decides how often. It changes when the
phase, the state of a replica, or the reason for which the job waits in its queue does. While pods have nodes, metrics,
last lines and GPU time change too, so a new status is offered again and again: `Host.refresh_seconds`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.identity.names import code_hash
from airflow_provider_ktrain.core.reporting.status_document import MAX_LINES, TrainingStatus, last_lines, replica_rows
from airflow_provider_ktrain.core.state.limits import Clock
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.api.threads import in_thread
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part
from airflow_provider_ktrain.engine.follow.disruptions import DisruptionReporter
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.startup import StartupChecks
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.host import StatusSink

_ACTIVE = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)  # pods hold accelerators
_FOLLOWED = ("phase", "phase_since", "phases", "last_lines", "metrics", "series")  # what one read doesn't show
_OF_JOB = ("job", "replicas", "usage")


async def last_status(take: Callable[[], Callable[[], dict[str, Any]]], log: Log) -> dict[str, Any]:
    """The last status for the training page; empty if it can't be built. The outcome must not be lost because of it."""
    try:
        return await in_thread(take())
    except Exception as e:
        log.warning(f"The training page shows an earlier status: the last one can't be built.\n{e}")
        return {}


def take_unfollowed(state: JobState, sink: StatusSink | None, cause: Cause) -> Callable[[], dict[str, Any]]:
    """Take the last status of a job that was killed before this process followed it, from what its release has read.

    It has no fields that only following shows. If the job was gone, its usage is empty: nobody knows it.
    """
    now = timing.utc_now()

    def make() -> dict[str, Any]:
        job, pods = state.known_job, state.pods
        completed = parse_timestamp((job.get("status") or {}).get("completionTime"))
        document = TrainingStatus(
            job=state.ref.described(code_hash(job)),
            try_number=sink.try_number if sink else 0,
            written_at=now.timestamp(),
            host=sink.host if sink else "",
            phases=(),
            rows=replica_rows(state.kind, pods.all),
            usage=pods.usage(now, completed, state.queued_seconds(), state.spans_in(Phase.QUEUED)).as_dict(),
            cause=cause.as_dict(),
            ended=True,
        ).to_dict()
        unknown = _FOLLOWED if state.job is not None else (*_FOLLOWED, *_OF_JOB)
        return {"usage": {}, **{name: value for name, value in document.items() if name not in unknown}}

    return make


class StatusReporter(Part):
    """Notices changes of one job's status, which the host's `status_sink` takes."""

    def __init__(
        self,
        context: FollowContext,
        output: JobOutput,
        queue: QueueFollower,
        disruptions: DisruptionReporter,
        startup: StartupChecks,
        clocks: Callable[[], list[Clock]],
    ) -> None:
        self._state, self._sink = context.state, context.host.status_sink
        self._refresh_seconds = context.host.refresh_seconds
        self._output, self._queue, self._clocks = output, queue, clocks
        self._disruptions, self._startup = disruptions, startup
        # phase, version of the replicas' states, reason for waiting in a queue, notice, and problem that will end the
        # job, of the last status
        self._offered: tuple[Phase | None, int, str, str, str] = (None, 0, "", "", "")
        self._offered_at = 0.0
        self._knows_earlier = not context.state.handover.handed_over_at or self._sink is None

    @property
    def due(self) -> float | None:
        """When to look again although nothing has changed, by `timing.now`; None: not at all."""
        active = self._sink is not None and self._state.phase in _ACTIVE
        return self._offered_at + self._refresh_seconds() if active else None

    async def observe(self) -> None:
        """Offer a status if there is something new to show."""
        if self._sink is None or self._state.phase is None:
            return
        problem = str((self._startup.limit or {}).get("name", ""))
        now = self._state.phase, self._state.pods.groups.shown_version, self._queue_reason(), self._notice(), problem
        refresh = self.due is not None and timing.now() >= self.due
        if now == self._offered and not refresh:
            return
        urgent = now[0] is not self._offered[0]
        self._offered, self._offered_at = now, timing.now()
        self._sink.offer(self.take, urgent=urgent)

    def take(self, cause: Cause | None = None, *, ended: bool = False) -> Callable[[], dict[str, Any]]:
        """Take the status now. The function that is returned makes the document, in any thread.

        For a job of 1,000 replicas, that takes too long for the event loop.
        """
        if self._sink is not None and self._sink.earlier is not None:
            self._take_earlier(self._sink.earlier)
        state, now = self._state, timing.utc_now()
        kind, job, ref = state.kind, state.known_job, state.ref
        pods, lines = state.pods.frozen(), self._output.evidence.newest_lines()
        completed = parse_timestamp(job.get("status", {}).get("completionTime"))
        requested, in_queue, spans = state.requested, state.queued_seconds(), state.spans_in(Phase.QUEUED)
        metrics, phases, queue = self._output.training_metrics.frozen(), list(state.phases), self._queue_reason()
        notice = "" if ended else self._notice()
        limits: list[dict[str, Any]] = [
            {"name": str(c.limit), "due": round(c.due, 1), "seconds": c.seconds} for c in self._limits(ended)
        ]
        if not ended and (first := self._startup.limit):
            limits = sorted([*limits, first], key=lambda limit: limit["due"])

        def make() -> dict[str, Any]:
            shown_lines = itertools.islice(last_lines(kind, job, pods.all, lines).items(), MAX_LINES)
            spent = pods.usage(now, completed, in_queue, spans)
            return TrainingStatus(
                job=ref.described(code_hash(job)),
                try_number=self._sink.try_number if self._sink else 0,
                written_at=now.timestamp(),
                host=self._sink.host if self._sink else "",
                phases=phases,
                rows=replica_rows(kind, pods.all),
                last_lines=dict(shown_lines),
                usage={**spent.as_dict(), **metrics.steps.usage(spent.gpus, spent.held)},
                metrics=metrics,
                limits=limits,
                queue=queue,
                notice=notice,
                requested=requested,
                cause=None if cause is None else cause.as_dict(),
                ended=ended,
            ).to_dict()

        return make

    async def complete_usage(self) -> None:
        """Count what earlier processes of this try have counted, before the usage is reported."""
        if not self._knows_earlier and self._sink is not None:
            await self._sink.read_earlier()
            self._take_earlier(self._sink.earlier or {})

    def _take_earlier(self, status: Mapping[str, Any]) -> None:
        if not self._knows_earlier:
            self._knows_earlier = True
            self._state.take_earlier_status(status)
            written_at = status.get("written_at")
            if isinstance(written_at, int | float) and written_at > self._state.handover.handed_over_at:
                self._output.training_metrics.take_earlier(status)

    def _notice(self) -> str:
        return " ".join(filter(None, (self._disruptions.notice, self._startup.notice)))

    def _queue_reason(self) -> str:
        """Why the job waits in its queue; empty if it doesn't, or if the reason isn't known."""
        queue, phase = self._queue.status, self._state.phase
        return queue.reason if queue is not None and phase in (Phase.QUEUED, Phase.SUSPENDED) else ""

    def _limits(self, ended: bool) -> list[Clock]:
        """The running limits, of several of one kind the first that expires."""
        first: dict[str, Clock] = {}
        for clock in [] if ended else sorted(self._clocks(), key=lambda clock: clock.due):
            first.setdefault(clock.limit, clock)
        return list(first.values())
