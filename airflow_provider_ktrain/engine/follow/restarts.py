"""Reports each restart of a container, with its reason, and detects crash loops."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.crash_loop import CrashLoop, Restart, RestartHistory
from airflow_provider_ktrain.engine.evidence_collector import Evidence
from airflow_provider_ktrain.engine.submit import Log

Object = dict[str, Any]
LOG_LAG = 2.0  # seconds in which the log of the run that failed is read: it may name the reason


class Restarts:
    """:param past: what an earlier host knew: see `past`."""

    def __init__(self, kind: Kind, evidence: Evidence, log: Log, past: Mapping[str, Any] | None) -> None:
        self._history = RestartHistory(kind, past)
        self._evidence, self._log = evidence, log
        self._unreported: deque[tuple[float, Restart]] = deque()  # and since when they are known

    def see(self, job: Object, pods: Mapping[str, Object], deleted: Iterable[Object] = ()) -> None:
        """These pods, by uid, are there now, and no others.

        :param deleted: pods that are missing from them, as they were in the end.
        """
        for pod in deleted:
            self.see_deleted(pod)
        self._note(self._history.see(job, pods))
        self.report()

    def see_deleted(self, pod: Object) -> None:
        """A pod that was deleted, as it was in the end."""
        self._note(self._history.see_deleted(pod))

    def report(self, *, at_once: bool = False) -> None:
        """One line for each restart, once the log of the run before can be expected to be read."""
        known = time.monotonic() - LOG_LAG
        while self._unreported and (at_once or self._unreported[0][0] <= known):
            _, restart = self._unreported.popleft()
            lines = self._evidence.of_run(restart.pod, restart.container, restart.run, restart.ended)
            self._log.warning(restart.describe(lines))

    @property
    def due(self) -> float | None:
        """When the next line is due, of `time.monotonic`; None where there is none."""
        return self._unreported[0][0] + LOG_LAG if self._unreported else None

    def crash_loop(self, limit: int | None) -> CrashLoop | None:
        return self._history.crash_loop(limit)

    def past(self) -> dict[str, Any]:
        """For the next host."""
        self.report(at_once=True)
        return self._history.past()

    def _note(self, restarts: list[Restart]) -> None:
        self._unreported.extend((time.monotonic(), restart) for restart in restarts)
