"""Follows what Kueue does with a job: why it waits, when it is admitted, how often it is preempted.

All jobs of a namespace share one watch of Workloads. Without the right to list them, the job is followed as without
this, the log names the missing right once, and the watch is tried again later. `core/state/queue/kueue_status.py` reads
a Workload.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import with_obstacle
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.state.queue import kueue_status
from airflow_provider_ktrain.core.state.queue.kueue_status import (
    Eviction,
    QueuePhase,
    QueueStatus,
    queue_status,
    workload_of,
)
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import kueue
from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part
from airflow_provider_ktrain.engine.watch.informer import Subscription, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import by_owner

REPEAT_SECONDS = 60.0  #: Pause between two lines that differ in amounts only: Kueue updates these often.
RETRY_SECONDS = 30.0  #: Pause before Kueue is looked for again after a failed request.
NO_WORKLOAD_SECONDS = 60.0  #: How long Kueue may take to create a Workload. Usually, it takes less than a second.
FORBIDDEN_RETRY_SECONDS = 600.0  #: Pause before Workloads are watched again after the API server rejected that (403).
_AMOUNT = re.compile(r"\b\d+\w*")
_WARNINGS = (QueuePhase.NEVER_FITS, QueuePhase.PAUSED, QueuePhase.GIVEN_UP)
_RESOLUTIONS = {
    QueuePhase.NEVER_FITS: "Request less, use another queue, or ask an administrator to raise the quota.",
    QueuePhase.GIVEN_UP: "See the events of its Workload. A retry queues the job again.",
}
_USE_ONE_CLUSTER = "Use a LocalQueue whose ClusterQueue has no admission check of MultiKueue, and set no `managedBy`."


class QueueFollower(Part):
    """What the queue does with one job.

    A process before this one has counted and logged the evictions until the handover, as far as it saw them, and has
    logged that it can't read Workloads. When the job will never be admitted, the time until it fails begins again in
    each process.

    :param context: of the job. The state's metrics get the numbers of evictions and preemptions.
    """

    def __init__(self, context: FollowContext) -> None:
        self._api, self._state, self._log, self._news = context.api, context.state, context.log, context.news
        # a job that isn't the task's, such as a sensor's, doesn't fail: somebody may activate it, or raise the quota
        self._may_fail = context.options.release
        self._workloads: Subscription | None = None
        self._kueue_version = ""
        self._place_at: float | None = None  # timing.now() from which to read the place in the queue again
        self._look_at: float | None = 0.0  # timing.now() from which to look for Kueue; None: don't
        self.status: QueueStatus | None = None  #: None if the job has no Workload, or none that we may read.
        self._status_since = 0.0  # timing.now() from when its phase is known
        self._eviction: Eviction | None = None  # the last one that was counted
        self._refusal_logged = bool(self._state.handover.handed_over_at)  # also if a process before has logged it
        self._confirm_at = 0.0  # timing.now() from which to ask the API server whether the job will never run
        self._logged = ("", 0.0)  # the last line, and when
        self._in_queue = False  # whether the job names a queue
        self._no_workload_since = timing.now()  # from when no Workload is known
        self._no_workload_logged = False

    async def close(self) -> None:
        """Give up the watch of Workloads."""
        workloads, self._workloads = self._workloads, None
        if workloads is not None:
            await workloads.__aexit__()

    @property
    def workload(self) -> dict[str, Any] | None:
        """The job's Workload as its watch shows it; None if there is none."""
        known = () if self._workloads is None else self._workloads.objects.values()
        found = workload_of(known, self._state.ref.uid)
        return None if found is None else dict(found)

    async def _record_refusal(self, workloads: Subscription) -> None:
        """Without the right to watch, continue without it and try again later.

        The right may be granted meanwhile, and an API server may reject requests for a while after its restart.
        """
        if workloads.synced:
            self._refusal_logged = False  # it was not refused until now
        try:
            workloads.take()
        except Exception as error:
            if not isinstance(error, ApiStatusError) or error.status != 403:
                return
            await self.close()
            self._look_at = timing.now() + FORBIDDEN_RETRY_SECONDS
            if not self._refusal_logged:
                self._refusal_logged = True
                self._log.warning(
                    f"Can't read Kueue's Workloads in {self._state.ref.namespace}, so the log won't show why the job "
                    f"waits.\n`ktrain rbac --kueue --service-account NAMESPACE:NAME` prints the Role and its binding.\n"
                    f"{error}"
                )

    async def update(self) -> None:
        """Bring the status up to date and log what has changed."""
        if self._workloads is not None:
            await self._record_refusal(self._workloads)
        job, workload = self._state.job, None
        self._in_queue = bool(job is not None and self._state.ref.uid and kueue.queue_of(job))
        if self._in_queue:
            await self._subscribe()
            workload = self.workload
        if workload is None:
            self.status = None  # what an earlier Workload showed proves nothing about the job now
            self._no_workload_since = min(self._no_workload_since, timing.now())
            self._log_missing_workload()
            return
        self._no_workload_since = math.inf
        status = queue_status(workload)
        if status.phase is QueuePhase.QUEUED:
            status = replace(status, place=await kueue.find_place(self._api, self._kueue_version, workload))
        self._place_at = None if status.place is None else timing.now() + kueue.PLACE_SECONDS
        if self.status is None or status.phase is not self.status.phase:
            self._status_since = timing.now()
            self._state.requested_by_workload = kueue_status.requested_accelerators(workload)
        self.status = status
        self._log_eviction(status)
        self._log_changes(status)

    async def _subscribe(self) -> None:
        if self._workloads is not None or self._look_at is None or timing.now() < self._look_at:
            return
        try:
            version = await kueue.served_version(self._api)
        except (ApiStatusError, ApiUnavailable):
            self._look_at = timing.now() + RETRY_SECONDS
            return
        self._look_at = None
        if version:
            self._kueue_version = version
            informer = shared_informer(self._api, kueue.workloads_path(version, self._state.ref.namespace))
            workloads = informer.subscribe(key=by_owner(self._state.ref.uid), news=self._news)
            self._workloads = await workloads.__aenter__()

    @property
    def _no_workload_at(self) -> float | None:
        """When a Workload should be known, by `timing.now`; None if there is one, or it can't be known."""
        watched = self._in_queue and self._workloads is not None and self._workloads.synced
        phase = self._state.phase
        if self.status is not None or not watched or self._no_workload_logged or phase is None or phase.ended:
            return None
        queued_since = self._state.phase_since if phase is Phase.QUEUED else 0.0
        return max(queued_since, self._no_workload_since) + NO_WORKLOAD_SECONDS

    def _log_missing_workload(self) -> None:
        """Kueue has not created a Workload: it will never admit a queued job, and doesn't know one that runs."""
        if self._no_workload_at is None or timing.now() < self._no_workload_at:
            return
        self._no_workload_logged = True
        kind, priority = self._state.kind.name, kueue.priority_class_of(self._state.known_job)
        if self._state.phase is not Phase.QUEUED:
            self._log.warning(
                f"{self._state.ref} names a queue, but Kueue doesn't manage it: it runs without quota.\n"
                f"Ask an administrator to enable Kueue's integration for {kind}s, or remove `queue_name`."
            )
            return
        reasons = [f"is Kueue's integration for {kind}s enabled"]
        reasons += [f"does WorkloadPriorityClass {priority} exist"] if priority else []
        self._log.warning(
            f"{self._state.ref} stays suspended: Kueue has created no Workload for it.\n"
            f"Ask an administrator: {' and '.join(reasons)}? The log of Kueue's controller contains the reason."
        )

    def _log_eviction(self, status: QueueStatus) -> None:
        """Count and log each eviction once, also if another process has seen it before."""
        eviction, before = status.last_eviction, self._eviction
        if eviction is None:
            seen = True
        elif before is None:
            are_counted = self._state.metrics.get("queue.evictions", 0) >= status.evictions
            seen = are_counted and (epoch_seconds(eviction.at) or 0.0) <= self._state.handover.handed_over_at
        else:
            seen = (eviction.reason, eviction.at) == (before.reason, before.at)
        self._eviction = eviction or before
        self._count(status, more=0 if seen else 1)
        if eviction is not None:
            self._state.pods.mark_evicted()
        if eviction is None or seen:
            return
        if status.phase not in (QueuePhase.PAUSED, QueuePhase.GIVEN_UP):
            times = counted(int(self._state.metrics.get("queue.evictions", 1)), "time")
            self._log.warning(
                f"{self._state.ref} lost its admission and is queued again ({times} so far)\n{eviction.why}"
            )

    def _count(self, status: QueueStatus, more: int) -> None:
        """Store Kueue's counters, which never go back. Older releases have none, so new evictions are counted here."""
        if not status.evictions:
            return
        metrics, eviction = self._state.metrics, status.last_eviction
        preempted = more if eviction is not None and eviction.preempted else 0
        for name, number, one in (
            ("evictions", status.evictions, more), ("preemptions", status.preemptions, preempted),
        ):  # fmt: skip
            metrics[f"queue.{name}"] = max(metrics.get(f"queue.{name}", 0) + one, number)

    def _log_changes(self, status: QueueStatus) -> None:
        line, at = self._logged
        soon = timing.now() - at < REPEAT_SECONDS and _AMOUNT.sub("", line) == _AMOUNT.sub("", status.line)
        if status.phase is QueuePhase.EVICTED or line == status.line or soon:
            return
        self._logged = status.line, timing.now()
        (self._log.warning if status.phase in _WARNINGS else self._log.info)(status.line)

    def phase(self, phase: Phase) -> Phase:
        """The job's phase as the queue knows it: a job that lost its admission is queued, nobody suspended it.

        The watch of the job may be ahead of that of its Workload. A suspension by hand doesn't last: Kueue undoes it.
        """
        waits = self.status is not None and self.status.phase is not QueuePhase.PAUSED
        return Phase.QUEUED if phase is Phase.SUSPENDED and waits else phase

    @property
    def due(self) -> float | None:
        """When to look at the queue again if nothing changes, by `timing.now`; None if there is no such time."""
        look_at = self._look_at if self._in_queue else None
        again = self._place_at if self.status is not None else None
        return min((at for at in (self.fails_at, self._no_workload_at, look_at, again) if at is not None), default=None)

    @property
    def fails_at(self) -> float | None:
        """When the task may fail if the queue's state doesn't change, by `timing.now`; None if it doesn't."""
        status = self.status
        seconds = kueue_status.FAILS_AFTER_SECONDS.get(status.phase) if status is not None and self._may_fail else None
        if status is None or seconds is None or self._state.phase not in (Phase.QUEUED, Phase.SUSPENDED):
            return None
        if status.phase is QueuePhase.NEVER_FITS and self._ran_before:
            return None
        return max(self._status_since + seconds, self._confirm_at)

    @property
    def _ran_before(self) -> bool:
        """Whether the job was admitted, perhaps by a Workload that was replaced since."""
        return bool(self._state.pods.any or (self._state.known_job.get("status") or {}).get("startTime"))

    def explain(self, cause: Cause) -> Cause:
        """The cause of a job that was queued for too long, with what it waited for."""
        why = self.status.reason if self.status is not None else ""
        if self._no_workload_logged and self.status is None:
            why = "Kueue has created no Workload for it"
        return cause.with_summary(lambda summary: f"{summary}: {why}").with_short_summary() if why else cause

    async def find_failure(self) -> Cause | None:
        """Why the job will never be admitted, confirmed by the API server; None if it may be."""
        if self._may_fail and kueue_status.runs_elsewhere(self._state.known_job):
            summary = f"{self._state.ref} can't be followed: MultiKueue runs it in another cluster"
            return Cause(Category.QUEUE, summary, resolution=_USE_ONE_CLUSTER)
        if self.status is None or self.fails_at is None or timing.now() < self.fails_at:
            return None
        status = await self._read_status()
        if status is None or status.phase is not self.status.phase:
            self._confirm_at = timing.now() + RETRY_SECONDS  # the watch is behind, or the API server unreachable
            return None
        summary = f"{self._state.ref} can't run: {status.why}"
        cause = Cause(Category.QUEUE, summary, status.line, _RESOLUTIONS[status.phase])
        if status.pods_were_late:
            short = f"{self._state.ref} was given up by Kueue, its pods were not ready"
            cause = with_obstacle(cause, short, make_evidence(self._state.known_job, self._state.pods.all))
        return cause.with_short_summary()

    async def _read_status(self) -> QueueStatus | None:
        """What the API server knows; None if there is no Workload, or it can't be read."""
        try:
            workload = await kueue.find_workload(self._api, self._state.ref)
        except (ApiStatusError, ApiUnavailable):
            return None
        return None if workload is None else queue_status(workload)
