"""The list of trainings that run now. All viewers share what is read from the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import TaskRecord
from airflow_provider_ktrain.core.identity import TaskInstanceId
from airflow_provider_ktrain.plugin import views

MAX_ROWS = 50
CACHE_SECONDS = 10.0


class RunningTrainings:
    """Reads the trainings that run, and the statuses of the rows that are shown, at most once in CACHE_SECONDS."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # requests are answered in threads
        self._records: list[TaskRecord] = []
        self._read_at = float("-inf")
        self._statuses: dict[TaskInstanceId, tuple[float, Mapping[str, Any] | None]] = {}

    def view(self, user: Any, now: float) -> views.RunningView:
        """The newest MAX_ROWS trainings of DAGs that the user may read.

        :param now: epoch seconds.
        """
        records = self._active()
        readable = compat_server.readable_dag_ids(user, {record.key.dag_id for record in records})
        mine = [record for record in records if record.key.dag_id in readable]
        shown = [(record, self._status(record.key)) for record in mine[:MAX_ROWS]]
        rows = [views.running_row(record, status, now) for record, status in shown]
        return views.RunningView(rows=rows, count=len(mine), data=(shown, len(mine), views.minute_of(now)))

    def _active(self) -> list[TaskRecord]:
        with self._lock:
            if time.monotonic() >= self._read_at + CACHE_SECONDS:
                self._records = compat_server.active_trainings()
                self._read_at = time.monotonic()
                active = {record.key for record in self._records}
                self._statuses = {key: read for key, read in self._statuses.items() if key in active}
            return self._records

    def _status(self, key: TaskInstanceId) -> Mapping[str, Any] | None:
        with self._lock:
            read_at, status = self._statuses.get(key, (float("-inf"), None))
            if time.monotonic() >= read_at + CACHE_SECONDS:
                status = compat_server.read_status(key)
                self._statuses[key] = time.monotonic(), status
            return status
