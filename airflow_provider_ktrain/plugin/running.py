"""The list of trainings that run now. All viewers share what is read from the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import TaskRecord
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.plugin import views

MAX_ROWS = 50
CACHE_SECONDS = 10.0
OLD_READS = 3  #: what is this many times as old as the cache may be isn't shown any more


@dataclass(frozen=True)
class _Read:
    """What was read from the database at one time.

    :param statuses: of the rows that somebody was shown; they are added later.
    """

    records: Sequence[TaskRecord] = ()
    at: float = float("-inf")
    statuses: dict[TaskInstanceId, Mapping[str, Any]] = field(default_factory=dict)


class RunningTrainings:
    """Reads the trainings that run, and the statuses of the rows that are shown, about once in `cache_seconds`.

    Requests are answered in threads. While one of them reads again, the others show what was read before. If that is
    older than OLD_READS times `cache_seconds`, they read themselves: no viewer waits for another one's query.

    :param clock: the time in seconds, from any origin. Default: `time.monotonic`.
    """

    def __init__(self, cache_seconds: float = CACHE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache_seconds, self._clock = cache_seconds, clock
        self._last = _Read()
        self._reading = threading.Lock()

    def view(self, user: Any, now: float) -> SimpleNamespace:
        """The newest MAX_ROWS trainings of DAGs that the user may read, their number, and what this is made of."""
        last, age = self._last, self._clock() - self._last.at
        if age < self._cache_seconds:
            return self._view(last, user, now)
        is_first = self._reading.acquire(blocking=False)
        try:
            if not is_first and age < self._cache_seconds * OLD_READS:
                return self._view(last, user, now)
            read = _Read(compat_server.active_trainings(), self._clock())
            shown = self._view(read, user, now)
            self._last = read
            return shown
        finally:
            if is_first:
                self._reading.release()

    def _view(self, read: _Read, user: Any, now: float) -> SimpleNamespace:
        readable = compat_server.readable_dag_ids(user, {record.key.dag_id for record in read.records})
        mine = [record for record in read.records if record.key.dag_id in readable]
        keys = [record.key for record in mine[:MAX_ROWS]]
        if missing := [key for key in keys if key not in read.statuses]:
            found = compat_server.read_statuses(missing)
            read.statuses.update({key: found.get(key, {}) for key in missing})
        shown = [(record, read.statuses[record.key] or None) for record in mine[:MAX_ROWS]]
        rows = [views.running_row(record, status, now) for record, status in shown]
        return SimpleNamespace(rows=rows, count=len(mine), data=(shown, len(mine), views.minute_of(now)))
