"""A LocalExecutor whose events about ended processes are late (apache/airflow#72716, #71580)."""

from __future__ import annotations

import time
from typing import Any

from airflow.executors.local_executor import LocalExecutor

SOONEST, LATEST = 5.0, 60.0  # seconds from the end of a process to its event


class DelayedExecutor(LocalExecutor):
    """Reports the end of a task's process when the next process of the same try has been started.

    So Airflow takes the end of a worker that has deferred for that of the worker in which the task resumes.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._ended: list[tuple[float, Any, Any]] = []  # when, and which task in which state
        self._started: dict[Any, float] = {}  # when the last process of a task was started

    def _process_workloads(self, workload_list: Any) -> None:
        self._started.update({workload.key: time.monotonic() for workload in workload_list})
        super()._process_workloads(workload_list)  # type: ignore[no-untyped-call]

    def _read_results(self) -> None:
        while not self.result_queue.empty():
            key, state, _ = self.result_queue.get()
            self._ended.append((time.monotonic(), key, state))
        waiting, self._ended = self._ended, []
        for at, key, state in waiting:
            age = time.monotonic() - at
            if age > LATEST or (age > SOONEST and self._started[key] > at):
                self.change_state(key, state)
            else:
                self._ended.append((at, key, state))
