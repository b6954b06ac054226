"""The list of trainings that run now. All viewers share what is read from the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import TaskRecord
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.plugin import views

MAX_ROWS = 50
CACHE_SECONDS = 10.0


class RunningTrainings:
    """Reads the trainings that run, and the statuses of the rows that are shown, at most once in `cache_seconds`.

    :param cache_seconds: for which all viewers get what was read. Default: CACHE_SECONDS.
    """

    def __init__(self, cache_seconds: float = CACHE_SECONDS) -> None:
        self._cache_seconds = cache_seconds
        self._lock = threading.Lock()  # requests are answered in threads
        self._records: Sequence[TaskRecord] = ()
        self._read_at = float("-inf")
        self._statuses: dict[TaskInstanceId, Mapping[str, Any] | None] = {}

    def view(self, user: Any, now: float) -> SimpleNamespace:
        """The newest MAX_ROWS trainings of DAGs that the user may read, how many there are, and what this is made of.

        :param now: epoch seconds.
        """
        records = self._active()
        readable = compat_server.readable_dag_ids(user, {record.key.dag_id for record in records})
        mine = [record for record in records if record.key.dag_id in readable]
        shown = [(record, self._status(record.key)) for record in mine[:MAX_ROWS]]
        rows = [views.running_row(record, status, now) for record, status in shown]
        return SimpleNamespace(rows=rows, count=len(mine), data=(shown, len(mine), views.minute_of(now)))

    def _active(self) -> Sequence[TaskRecord]:
        with self._lock:
            if time.monotonic() >= self._read_at + self._cache_seconds:
                self._records = compat_server.active_trainings()
                self._read_at = time.monotonic()
                self._statuses = {}
            return self._records

    def _status(self, key: TaskInstanceId) -> Mapping[str, Any] | None:
        with self._lock:
            if key not in self._statuses:
                self._statuses[key] = compat_server.read_status(key)
            return self._statuses[key]
