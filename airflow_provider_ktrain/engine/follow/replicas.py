"""Logs a line when replicas change their state, at a bounded rate."""

from __future__ import annotations

import time

from airflow_provider_ktrain.core.state.replica_status import replica_status
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine.follow.state import JobState, utc_now
from airflow_provider_ktrain.engine.job_requests import Log

MIN_INTERVAL_SECONDS = 10.0  #: between two lines, unless all replicas run
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
        self._next = 0.0  # time.monotonic() from which another line may be logged
        self._pending = False  # whether a change waits for that time

    @property
    def due(self) -> float | None:
        """When a change is to be logged, by `time.monotonic`; None if there is none."""
        return self._next if self._pending else None

    def update(self) -> None:
        """Log the state of the replicas if it has changed since the last line."""
        self._pending = False
        state = self._state
        if state.phase not in _SHOWN_PHASES or not state.pods.live:
            return
        status = replica_status(state.kind, state.known_job, state.pods.live, utc_now())
        if status.states == self._logged:
            return
        known = self._logged is None and self._resumed and status.all_run
        if not known and time.monotonic() < self._next and not status.all_run:
            self._pending = True
            return
        if not known:
            self._log.info(status.line)
        self._logged, self._next = status.states, time.monotonic() + MIN_INTERVAL_SECONDS
