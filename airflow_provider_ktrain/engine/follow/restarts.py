"""Reports each restart of a container, with its reason, and detects crash loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.diagnosis.crash_loop import CrashLoop, Restart, RestartHistory
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Object
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part

LOG_DELAY_SECONDS = 2.0  # before a restart is reported: the failed run's log may still arrive with the reason
MAX_LOG_DELAY_SECONDS = 30.0  # if no line of the run has arrived: it may have written none


class RestartReporter(Part):
    """Logs a warning for each restart of a container.

    :param lines_of_run: the last lines of a run that has failed; None if its log is not followed.
    """

    def __init__(self, context: FollowContext, lines_of_run: Callable[[Restart], list[str] | None]) -> None:
        self._state, self._log, self._lines_of_run = context.state, context.log, lines_of_run
        before = self._state.handover.pod_history
        self._history = RestartHistory(
            self._state.kind, mapping(before.get("crashes")), earlier_pods=bool(before.get("restarts"))
        )
        self._unreported: list[tuple[Restart, float]] = []  # with the timing.now() at which each was seen
        self._next = 0.0  # timing.now() from which the first one is reported

    def update(self, pods: Mapping[str, Object], removed: Iterable[str] = ()) -> None:
        """Record changes of the pods that exist."""
        self._record(self._history.update(self._state.known_job, pods, removed))
        self.report()

    def mark_deleted(self, pod: Object) -> None:
        """Record that a pod was deleted. `pod` is its last state."""
        self._record(self._history.mark_deleted(pod))

    def report(self, *, at_once: bool = False) -> None:
        """Log one line for each restart whose log has had time to arrive."""
        now = timing.now()
        while self._unreported and (at_once or (self.due or 0.0) <= now):
            restart, seen = self._unreported[0]
            lines = self._lines_of_run(restart)
            if lines == [] and not (at_once or restart.never_began) and now < seen + MAX_LOG_DELAY_SECONDS:
                self._next = now + LOG_DELAY_SECONDS
                return
            self._unreported.pop(0)
            self._log.warning(restart.describe(lines))

    @property
    def due(self) -> float | None:
        """When the next restart is to be reported, by `timing.now`; None if there is none."""
        if not self._unreported:
            return None
        restart, seen = self._unreported[0]
        return seen if restart.never_began else max(seen + LOG_DELAY_SECONDS, self._next)

    def crash_loop(self, limit: int | None) -> CrashLoop | None:
        """The container that failed at least `limit` times in a row; None if there is none, or no limit."""
        return self._history.crash_loop(limit)

    def handover(self) -> dict[str, Any]:
        """For the next process. Reports all restarts first."""
        self.report(at_once=True)
        return self._history.handover()

    def _record(self, restarts: list[Restart]) -> None:
        self._unreported += [(restart, timing.now()) for restart in restarts]
