"""Finds trainings that report NaN or infinity (`fail_on_nan`), and reads the log again before that ends one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_divergence
from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.logs.container_run import run_of
from airflow_provider_ktrain.core.state.pods.objects import name_of
from airflow_provider_ktrain.core.state.steps.non_finite import REPORTS_IN_A_ROW, NonFiniteReports
from airflow_provider_ktrain.core.state.steps.training_metrics import METRIC_MARKER
from airflow_provider_ktrain.engine.api.client import Object
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.single_read import read_log
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget

LAST_LINES = 100_000  #: How many of the last lines of a log are searched for the reports.
MAX_READ_BYTES = 32 * 1024 * 1024  #: How much of a log is read. A kubelet's log file has 10 MiB by default.
READ_SECONDS = 60.0  #: Time to read one log.


class _ContainerRun(NamedTuple):
    uid: str  #: The pod's uid.
    container: str
    run: int


class DivergenceProbe:
    """Counts the reports of each followed container, and confirms what it has found by its log."""

    def __init__(self, context: FollowContext, budget: StreamBudget) -> None:
        self._api, self._state, self._log, self._budget = context.api, context.state, context.log, budget
        self._news, self._watched = context.news, context.options.fail_on_nan
        # what an earlier process has read isn't known: the first report that is not finite leads to a look at the log
        self._before = REPORTS_IN_A_ROW - 1 if context.state.handover.handed_over_at else 0
        self._reports: dict[_ContainerRun, NonFiniteReports] = {}
        self._warned = False
        self.cause: Cause | None = None  #: What the last look at the log has confirmed.

    def inspector(self, source: LogLine) -> Callable[[str, int], None]:
        """A function that takes the lines of a container, each with the number of its run."""

        def inspect(text: str, run: int) -> None:
            if METRIC_MARKER not in text:
                return
            key = _ContainerRun(source.pod_uid, source.container, run)
            if key not in self._reports:
                for earlier in [one for one in self._reports if one[:2] == key[:2] and one.run < run]:
                    del self._reports[earlier]
                self._reports[key] = NonFiniteReports(self._watched, self._before)
            self._reports[key].take(text)
            if self._reports[key].diverged:
                self._news.set()

        return inspect if self._watched else lambda text, run: None

    @property
    def is_suspected(self) -> bool:
        """Whether a run of a container has reported NaN or infinity too often, by the lines that were followed."""
        return any(reports.diverged for reports in self._reports.values())

    async def confirms(self) -> bool | None:
        """Read the logs of these runs again. The job and its pods were read just before.

        :return: whether a container that runs ends its log with such reports. None: a log can't be read. A request that
            fails raises nothing.
        """
        self.cause, failed = None, False
        for key in [key for key, reports in self._reports.items() if reports.diverged]:
            pod = self._running_pod(key)
            if pod is None:  # the end of this run, or the next one, decides
                del self._reports[key]
                continue
            try:
                async with asyncio.timeout(READ_SECONDS):
                    self._reports[key] = reports = await self._read(pod, key.container)
            except (KtrainError, TimeoutError) as e:
                self._report_unreadable(e)
                failed = True
                continue
            if reports.diverged:
                self.cause = diagnose_divergence(self._state.kind.replica(pod), *reports.diverged)
                return True
        return None if failed else False

    def _running_pod(self, key: _ContainerRun) -> Object | None:
        """The pod in which this run of the container runs now; None if there is none."""
        pod = next((dict(pod) for pod in self._state.pods.live if pod["metadata"]["uid"] == key.uid), None)
        run = None if pod is None else run_of(pod, key.container)
        return None if run is None or run.ended or run.restart != key.run else pod

    def _report_unreadable(self, error: Exception) -> None:
        """Log once that `fail_on_nan` applies by the lines that were followed, and the log can't be read again."""
        if not self._warned:
            self._warned = True
            self._log.warning(
                f"{self._state.ref} has reported NaN or infinity {REPORTS_IN_A_ROW} times in a row.\n"
                f"It is not released, because its log can't be read again.\n{error}"
            )

    async def _read(self, pod: Object, container: str) -> NonFiniteReports:
        """The reports at the end of the log of the container's newest run."""
        query = {"container": container, "tailLines": str(LAST_LINES), "limitBytes": str(MAX_READ_BYTES)}
        reports, namespace = NonFiniteReports(self._watched), self._state.ref.namespace
        size = await read_log(
            self._api, self._budget, namespace, name_of(pod), query, lambda block: _take(reports, block)
        )
        if size >= MAX_READ_BYTES:  # later values, which were cut off, may be finite
            return NonFiniteReports(self._watched)
        return reports


def _take(reports: NonFiniteReports, block: bytes) -> None:
    if METRIC_MARKER.encode() in block:
        for line in block.decode("utf-8", "replace").split("\n"):
            if METRIC_MARKER in line:
                reports.take(line)
