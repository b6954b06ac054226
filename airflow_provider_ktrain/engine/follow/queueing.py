"""Follows what Kueue does with a job: why it waits, when it is admitted, how often it is preempted.

All jobs of a namespace share one watch of Workloads. Without the right to list them, the job is followed as without
this, and the log names the missing right once. The reasons are read from a Workload in `core/state/kueue_status.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import replace

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.state.kueue_status import QueuePhase, QueueStatus, queue_status, workload_of
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.engine import kueue
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.job_requests import Log
from airflow_provider_ktrain.engine.watch import Subscription, WatchEvent, by_owner, shared_informer

REPEAT_SECONDS = 60.0  #: between two lines that differ in amounts only: Kueue updates these often
RETRY_SECONDS = 30.0  #: until Kueue is looked for again after a failed request
_AMOUNT = re.compile(r"\b\d+\w*")
_WARNINGS = (QueuePhase.MISCONFIGURED, QueuePhase.NEVER_FITS, QueuePhase.DEACTIVATED, QueuePhase.GIVEN_UP)
_RESOLUTIONS = {
    QueuePhase.NEVER_FITS: "Request less, use another queue, or ask an administrator to raise the quota.",
    QueuePhase.GIVEN_UP: "See the events of its Workload. A retry queues the job again.",
}


class QueueFollower:
    """What the queue does with one job; a context manager that ends the watch.

    :param api: client for the cluster.
    :param state: the job. Its metrics get the numbers of evictions and preemptions.
    :param log: where the queue's state is logged.
    """

    def __init__(self, api: Api, state: JobState, log: Log) -> None:
        self._api, self._state, self._log = api, state, log
        self._stack = contextlib.AsyncExitStack()
        self._workloads: Subscription | None = None
        self._look_at: float | None = 0.0  # time.monotonic() from which to look for Kueue; None: don't
        self.status: QueueStatus | None = None  #: None if the job has no Workload, or none that we may read
        self._phase_since = 0.0
        self._confirm_at = 0.0  # time.monotonic() from which to ask the API server whether the job will never run
        self._logged = ("", 0.0)  # the last line, and when
        self._evictions: set[tuple[str, str]] = set()  # that were logged
        self._handed_over = state.metrics.get("queue.evictions", 0)  # that the previous process has logged

    async def __aenter__(self) -> QueueFollower:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def changed(self) -> list[WatchEvent]:
        """Wait for a change of the job's Workload; for ever if there is no watch."""
        if self._workloads is None:
            await asyncio.Event().wait()
        assert self._workloads is not None
        return await self._workloads.changed()

    async def note(self, error: BaseException) -> None:
        """The watch was rejected: without the right to it, go on without it."""
        if isinstance(error, ApiStatusError) and error.status == 403:
            self._workloads = None
            await self._stack.aclose()
            self._log_missing_right(error)

    async def update(self) -> None:
        """Bring the status up to date and log what has changed."""
        job, workload = self._state.job, None
        if job is not None and self._state.ref.uid and kueue.queue_of(job):
            await self._subscribe()
            if self._workloads is not None:
                workload = workload_of(self._workloads.objects.values(), self._state.ref.uid)
        if workload is None:
            self.status = None  # what an earlier Workload showed proves nothing about the job now
            return
        status = queue_status(workload)
        if self.status is None or status.phase is not self.status.phase:
            self._phase_since = time.monotonic()
        self.status = status
        self._count()
        self._log_changes(status)

    async def _subscribe(self) -> None:
        if self._workloads is not None or self._look_at is None or time.monotonic() < self._look_at:
            return
        try:
            version = await kueue.served_version(self._api)
        except (ApiStatusError, ApiUnavailable):
            self._look_at = time.monotonic() + RETRY_SECONDS
            return
        self._look_at = None
        if version:
            informer = shared_informer(self._api, kueue.workloads_path(version, self._state.ref.namespace))
            key = by_owner(self._state.ref.uid)
            self._workloads = await self._stack.enter_async_context(informer.subscribe(key=key))

    def _log_missing_right(self, error: ApiStatusError) -> None:
        """The job is followed without its Workload, which the task has no right to watch."""
        namespace = self._state.ref.namespace
        self._log.warning(
            f"Can't read Kueue's Workloads in {namespace}, so the log won't show why the job waits. "
            f"`ktrain rbac --kueue` prints the Role.\n{error}"
        )

    def _count(self) -> None:
        """Store Kueue's counters, which never go back; older releases show only the last eviction."""
        status, metrics = self.status, self._state.metrics
        if status is None or not status.evictions:
            return
        for name, number in (("evictions", status.evictions), ("preemptions", status.preemptions)):
            metrics[f"queue.{name}"] = max(metrics.get(f"queue.{name}", 0), number)

    def _log_changes(self, status: QueueStatus) -> None:
        """Log what the queue does with the job when it changes, and each eviction once."""
        eviction = status.last_eviction
        if eviction is not None and (eviction.reason, eviction.at) not in self._evictions:
            self._evictions.add((eviction.reason, eviction.at))
            self._state.pods.mark_evicted()
            logged = len(self._evictions) == 1 and status.evictions <= self._handed_over
            if not logged and status.phase not in (QueuePhase.DEACTIVATED, QueuePhase.GIVEN_UP):
                times = counted(int(self._state.metrics.get("queue.evictions", 1)), "time")
                self._log.warning(
                    f"{self._state.ref} lost its admission and is queued again ({times} so far)\n{eviction.why}"
                )
        line, at = self._logged
        soon = time.monotonic() - at < REPEAT_SECONDS and _AMOUNT.sub("", line) == _AMOUNT.sub("", status.line)
        if status.phase is QueuePhase.EVICTING or line == status.line or soon:
            return
        self._logged = status.line, time.monotonic()
        (self._log.warning if status.phase in _WARNINGS else self._log.info)(status.line)

    def phase(self, phase: Phase) -> Phase:
        """The job's phase as the queue knows it: a job that lost its admission is queued, nobody suspended it.

        The watch of the job may be ahead of that of its Workload. A suspension by hand doesn't last: Kueue undoes it.

        :param phase: as the job's own status has it.
        """
        waits = self.status is not None and self.status.phase is not QueuePhase.DEACTIVATED
        return Phase.QUEUED if phase is Phase.SUSPENDED and waits else phase

    @property
    def due(self) -> float | None:
        """When the task may fail if the queue's state doesn't change, by `time.monotonic`; None if it doesn't."""
        seconds = self.status.fails_after_seconds if self.status is not None else None
        if seconds is None or self._state.phase not in (Phase.QUEUED, Phase.SUSPENDED):
            return None
        if self.status is not None and self.status.phase is QueuePhase.NEVER_FITS and self._state.pods.all:
            return None  # it was admitted, by a Workload that was replaced since
        return max(self._phase_since + seconds, self._confirm_at)

    def explain(self, cause: Cause) -> Cause:
        """The cause of a job that was queued for too long, with what it waited for."""
        if self.status is None or not self.status.why:
            return cause
        return replace(cause, summary=f"{cause.summary}: {self.status.why}").with_short_summary()

    async def find_failure(self) -> Cause | None:
        """Why the job will never be admitted, confirmed by the API server; None if it may be."""
        if self.status is None or self.due is None or time.monotonic() < self.due:
            return None
        status = await self._read_status()
        if status is None or status.phase is not self.status.phase:
            self._confirm_at = time.monotonic() + RETRY_SECONDS  # the watch is behind, or the API server unreachable
            return None
        summary = f"{self._state.ref} can't run: {status.why}"
        return Cause(Category.QUEUE, summary, status.line, _RESOLUTIONS[status.phase])

    async def _read_status(self) -> QueueStatus | None:
        """What the API server knows; None if there is no Workload, or it can't be read."""
        try:
            workload = await kueue.find_workload(self._api, self._state.ref)
        except (ApiStatusError, ApiUnavailable):
            return None
        return None if workload is None else queue_status(workload)
