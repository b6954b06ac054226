"""Warns about a job that holds GPUs while some of its pods have no node: see `core/state/partial_start.py`."""

from __future__ import annotations

import time

from airflow_provider_ktrain.core.state.partial_start import find_partial_start, warning_due
from airflow_provider_ktrain.core.state.pod_groups import partial_start_since
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.job_requests import Log


class PartialStartWarning:
    """Logs one warning for each partial start.

    :param state: the job.
    :param options: of the task, with the limit. A job that isn't released by the task gets no warning.
    :param log: where it is logged.
    """

    def __init__(self, state: JobState, options: Options, log: Log) -> None:
        self._state, self._log = state, log
        self._limit, self._wanted = options.limits.partial_start, options.release
        self._since: float | None = None  # in epoch seconds
        self._warned_since: float | None = None  # `since` of the one that was warned about

    def update(self) -> None:
        """Look at the pods, and log the warning if it is due."""
        state = self._state
        idle = state.phase is None or state.ended or state.phase in (Phase.QUEUED, Phase.SUSPENDED)
        self._since = None if idle or not self._wanted else partial_start_since(state.job or {}, state.pods.groups)
        if self.due is None or self.due > time.monotonic():
            return
        self._warned_since = self._since
        if partial := find_partial_start(state.known_job, state.pods.live):
            self._log.warning(partial.describe_partial_start(str(state.ref), self._limit))

    @property
    def due(self) -> float | None:
        """When to warn, by `time.monotonic`; None if there is nothing to warn about."""
        if self._since is None or self._since == self._warned_since:
            return None
        return time.monotonic() + warning_due(self._since, self._limit) - time.time()
