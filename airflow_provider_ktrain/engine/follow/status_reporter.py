"""Offers the training's status to the host, which publishes it for the training page.

The status is built only when the host is about to write it: the host's budget decides how often. It changes when the
phase, the state of a replica, or the reason for which the job waits in its queue does. While the job runs, its metrics,
last lines and GPU time change too, so a new status is offered once a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.state.limits import Clock
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.state.status_document import FINE, TrainingStatus, replica_rows, state_of_pod
from airflow_provider_ktrain.core.timestamps import parse_timestamp
from airflow_provider_ktrain.engine.follow.messages import StatusSink
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import JobState, utc_now

REFRESH_SECONDS = 60.0  #: between two statuses of a job that runs, if nothing else changes
_ACTIVE = (Phase.RUNNING, Phase.RESTARTING)


class StatusReporter:
    """Notices changes of one job's status.

    :param state: the job as last observed.
    :param output: its last lines and metrics.
    :param queue: what Kueue does with the job.
    :param clocks: returns the limits that run now.
    :param sink: takes the status. Default: None, nobody does.
    """

    def __init__(
        self,
        state: JobState,
        output: JobOutput,
        queue: QueueFollower,
        clocks: Callable[[], list[Clock]],
        sink: StatusSink | None,
    ) -> None:
        self._state, self._output, self._queue, self._clocks = state, output, queue, clocks
        self._sink = sink
        self._replicas: dict[str, str] = {}  # states by the uid of the pod
        self._phase: Phase | None = None
        self._waits_for = ""  # in its queue
        self._offered_at = 0.0

    @property
    def due(self) -> float | None:
        """When to look again although nothing has changed, by `time.monotonic`; None: not at all."""
        active = self._sink is not None and self._state.phase in _ACTIVE
        return self._offered_at + REFRESH_SECONDS if active else None

    def update(self) -> None:
        """Offer a status if there is something new to show."""
        if self._sink is None or self._state.phase is None:
            return
        urgent = self._phase is not self._state.phase
        replicas = {pod["metadata"]["uid"]: state_of_pod(pod) for pod in self._state.pods.live}
        refresh = self.due is not None and time.monotonic() >= self.due
        waits_for = self._queue_reason()
        if not urgent and not refresh and (replicas, waits_for) == (self._replicas, self._waits_for):
            return
        self._phase, self._replicas, self._offered_at = self._state.phase, replicas, time.monotonic()
        self._waits_for = waits_for
        self._sink.offer(self.status, urgent=urgent)

    def status(self, cause: Cause | None = None, *, ended: bool = False) -> dict[str, Any]:
        """The status now.

        :param cause: why the job failed. Default: None.
        :param ended: whether the try ends. Default: False.
        """
        state, now = self._state, utc_now()
        pods = state.pods.all
        completed = parse_timestamp(state.known_job.get("status", {}).get("completionTime"))
        return TrainingStatus(
            job={
                "kind": state.ref.kind,
                "namespace": state.ref.namespace,
                "name": state.ref.name,
                "uid": state.ref.uid,
            },
            try_number=self._sink.try_number if self._sink else 0,
            written_at=now.timestamp(),
            host=self._sink.host if self._sink else "",
            phases=state.phases,
            rows=replica_rows(state.kind, pods),
            last_lines=self._last_lines(),
            metrics=self._output.training_metrics,
            usage=state.pods.usage(now, completed).as_dict(),
            limits=[{"name": str(c.limit), "due": round(c.due, 1), "seconds": c.seconds} for c in self._limits(ended)],
            queue=self._queue_reason(),
            ended=ended,
            cause=None if cause is None else cause.as_dict(),
        ).to_dict()

    def _queue_reason(self) -> str:
        """Why the job waits in its queue; empty if it doesn't, or if the reason isn't known."""
        queue, phase = self._queue.status, self._state.phase
        return queue.why if queue is not None and phase in (Phase.QUEUED, Phase.SUSPENDED) else ""

    def _limits(self, ended: bool) -> list[Clock]:
        """The running limits, of several of one kind the first that expires."""
        first: dict[str, Clock] = {}
        for clock in [] if ended else sorted(self._clocks(), key=lambda clock: clock.due):
            first.setdefault(clock.limit, clock)
        return list(first.values())

    def _last_lines(self) -> dict[str, str]:
        """The last line of the primary, then of replicas that are not fine, then of the others."""
        state, lines = self._state, self._output.evidence.newest_lines()
        primary = state.kind.primary(state.known_job), 0

        def rank(pod: Mapping[str, Any]) -> tuple[bool, bool]:
            role_and_index = state.kind.pod_role(pod["metadata"].get("labels") or {})
            return role_and_index != primary, state_of_pod(pod) in FINE

        found: dict[str, str] = {}
        for pod in sorted(state.pods.all, key=rank):
            if line := lines.get(str(pod["metadata"]["name"])):
                role, index = state.kind.pod_role(pod["metadata"].get("labels") or {})
                found[state.kind.replica_name(role, index)] = line
        return found
