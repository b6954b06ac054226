"""Logs a line when replicas change their state, at a bounded rate."""

from __future__ import annotations

import time

from airflow_provider_ktrain.core.state.replica_status import replica_status
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine.follow.state import JobState, phase_of_pod, utc_now
from airflow_provider_ktrain.engine.job_requests import Log

MIN_INTERVAL_SECONDS = 10.0  #: between two lines, unless all replicas run
MAX_LOOKED_AT_ALWAYS = 64  #: pods of a job that are looked at after each change, if no line was logged before
_SHOWN_PHASES = (Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING)


class ReplicaReporter:
    """Logs how many replicas run and what the others wait for.

    :param state: the job.
    :param log: where the lines are logged.
    :param resumed: whether another process followed the job before: it has logged that all replicas run.
    """

    def __init__(self, state: JobState, log: Log, *, resumed: bool) -> None:
        self._state, self._log, self._resumed = state, log, resumed
        self._logged: object = None  # states of the last line
        self._next = 0.0  # time.monotonic() from which the replicas are looked at again
        self._pending = False  # whether there may be a change then
        self._looked_at: tuple[int, int] | None = None  # version of the pods' states, and the size of the job
        self._all_run = False  # whether the last line reported that all replicas run

    @property
    def due(self) -> float | None:
        """When a change is to be logged, by `time.monotonic`; None if there is none."""
        return self._next if self._pending else None

    def update(self) -> None:
        """Log the state of the replicas if it has changed since the last line."""
        state, pods = self._state, self._state.pods.groups
        if state.phase not in _SHOWN_PHASES or not pods.pods:
            self._pending = False
            return
        now = pods.shown_version, state.kind.size(state.known_job)
        if not self._pending and self._looked_at == now:
            return
        self._pending = False
        if time.monotonic() < self._next and (self._all_run or not self._may_all_run):
            self._pending = True
            return
        self._looked_at = now
        status = replica_status(state.kind, state.known_job, pods, utc_now())
        if status.states == self._logged:
            if len(pods.pods) > MAX_LOOKED_AT_ALWAYS:
                self._next = time.monotonic() + MIN_INTERVAL_SECONDS
            return
        known = self._logged is None and self._resumed and status.all_run
        if not known and time.monotonic() < self._next and not status.all_run:
            self._pending = True
            return
        if not known:
            self._log.info(status.line)
        self._logged, self._all_run = status.states, status.all_run
        self._next = time.monotonic() + MIN_INTERVAL_SECONDS

    @property
    def _may_all_run(self) -> bool:
        """Whether all pods run. Their containers may still wait for something."""
        return all(phase_of_pod(pod) in ("Running", "Succeeded") for pod in self._state.pods.groups.examples())
