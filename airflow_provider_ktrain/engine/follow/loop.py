"""Follows one job until it has ended: phases, logs, limits, cause, release. Workers and triggerers run the same code.

The loop brings the job's state up to date (`observer`), decides whether this is the end, and waits for the next change
or the next limit. How a following ends is in `finish`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from airflow_provider_ktrain.core.diagnosis.model import Cause, Limit
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.state.limits import Clock, clocks
from airflow_provider_ktrain.core.state.status import Phase, phase_of, shown_conditions, wants_suspension
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.activity import LOG_LIMITS, Activity, ActivityProbe, Look
from airflow_provider_ktrain.engine.follow.finish import Finisher
from airflow_provider_ktrain.engine.follow.messages import Handover, HostPolicy, Options, Outcome, StopSignal
from airflow_provider_ktrain.engine.follow.observer import Observer, subscriptions
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.partial_start import PartialStartWarning
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.replicas import ReplicaReporter
from airflow_provider_ktrain.engine.follow.startup import StartupChecks
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.follow.status_reporter import StatusReporter
from airflow_provider_ktrain.engine.job_requests import Log, job_pods, read_job
from airflow_provider_ktrain.engine.wakeup import Wakeup
from airflow_provider_ktrain.engine.warning_events import WarningEvents

log = logging.getLogger(__name__)
FIRST_SYNC_SECONDS = 10.0  #: for the first lists of job and pods, before a limit may pass without them
RETRY_SECONDS = 1.0  #: until the API server is asked again after a failed request
LOOK_AGAIN_SECONDS = 10.0  #: until the logs are read again after they could not confirm a limit
MAX_WAIT_SECONDS = 3600.0  #: without changes and without a limit


async def follow(
    ref: JobRef,
    api: Api,
    options: Options,
    *,
    log: Log,
    stop: StopSignal,
    handover: Handover | None = None,
    host: HostPolicy | None = None,
    cursor: Cursor | None = None,
    on_failure: Callable[[Handover], object] = lambda handover: None,
) -> Outcome | Handover:
    """Follow the job to its end and release it; or hand it over at `host.until`.

    If this returns an outcome, the job was released, or the outcome contains the reason why it was not. Cancelling this
    changes nothing in the cluster: the training continues when a triggerer stops.

    :param ref: the job.
    :param api: client for the job's cluster.
    :param options: how the task wants the job to be followed.
    :param log: where everything is logged.
    :param stop: requests an early end.
    :param handover: from the process that followed the job before. Default: None, there was no other.
    :param host: how this process behaves. Default: a worker that follows to the end.
    :param cursor: positions in the logs, updated in place. Default: the handover's.
    :param on_failure: called with a handover before an error is raised, so that the host can follow the job from there.
        Default: nothing is called.
    :raises AccessError, UnreachableError, ClusterError: the job can't be watched.
    """
    handover, host = handover or Handover(), host or HostPolicy()
    cursor = Cursor.from_dict(handover.cursor) if cursor is None else cursor
    watches_before = api.stats["watches"]
    state = JobState(ref, handover)
    output = JobOutput(api, state, options.logs, cursor, handover, log)
    if host.unread_log is not None:
        output.follower.budget.gate.unread_log = host.unread_log
    stop_notices = api.on_notice(log.warning)
    try:
        output.warn_about_repeated_lines(host)
        news = Wakeup()
        stopped = Wakeup(also=news)
        stop.attach(stopped)
        jobs, pods = subscriptions(api, ref, shared=host.shared, news=news)
        async with (
            jobs,
            pods,
            QueueFollower(api, state, log, news=news, may_fail=options.release) as queue,
            WarningEvents(api, ref.namespace, log) as warnings,
        ):
            fail_fast = host.fail_fast_on_forbidden
            clocks_now = functools.partial(running_clocks, state, output, options)
            reporter = StatusReporter(state, output, queue, clocks_now, host.status_sink)
            observer = Observer(
                api, state, output, jobs, pods, queue=queue, news=news, fail_fast_on_forbidden=fail_fast, log=log
            )
            finisher = Finisher(
                api,
                state,
                output,
                observer,
                options,
                stop,
                take_status=reporter.take,
                waits_after_timeout=host.shared,
                watches_before=watches_before,
                log=log,
            )
            startup = StartupChecks(state, output.evidence, warnings, log)
            partial = PartialStartWarning(state, options, log)
            probe = ActivityProbe(api, state, output, log)
            replicas = ReplicaReporter(state, log, resumed=bool(handover.handed_over_at))
            loop = _Loop(
                api,
                state,
                output,
                observer,
                startup,
                partial,
                probe,
                queue,
                replicas,
                finisher,
                reporter,
                options,
                host,
                stop,
                stopped,
            )
            try:
                return await loop.run()
            except Exception:
                on_failure(await finisher.hand_over())
                raise
    finally:
        stop_notices()
        await output.close()


def running_clocks(state: JobState, output: JobOutput, options: Options) -> list[Clock]:
    """The time limits that run now."""
    return list(
        clocks(
            state.job or {},
            state.pods.groups,
            state.phase or Phase.PENDING,
            options.limits,
            deadline=options.deadline,
            last_line=output.last_line_at,
            progress_since=None if options.limits.progress is None else output.progress_since(),
            has_events=output.evidence.has_events,
            had_pods=state.pods.any,
        )
    )


class _Loop:
    """Decides when the following ends."""

    def __init__(
        self,
        api: Api,
        state: JobState,
        output: JobOutput,
        observer: Observer,
        startup: StartupChecks,
        partial: PartialStartWarning,
        probe: ActivityProbe,
        queue: QueueFollower,
        replicas: ReplicaReporter,
        finisher: Finisher,
        reporter: StatusReporter,
        options: Options,
        host: HostPolicy,
        stop: StopSignal,
        stopped: Wakeup,
    ) -> None:
        self._api, self._state, self._output, self._observer = api, state, output, observer
        self._startup, self._partial, self._probe, self._queue = startup, partial, probe, queue
        self._replicas, self._finisher, self._reporter = replicas, finisher, reporter
        self._options, self._host = options, host
        self._stop, self._stopped = stop, stopped
        self._broken: list[Callable[[], None]] = []  # reports that have raised an error
        self._look_again_at = 0.0  # epoch seconds, before which LOG_LIMITS don't act
        self._pods_behind = False  # the job has ended, and the watch of the pods doesn't show why yet

    async def run(self) -> Outcome | Handover:
        until = self._host.until
        while True:
            if self._host.shared:
                # a triggerer that stalled lost its triggers to another one, which logs the same lines
                await self._output.follower.budget.gate.awake()
            if await self._observer.update():
                self._startup.phase_changed()
            self._report()
            outcome = await self._decide_unless_killed()
            if outcome is not None:
                return outcome
            if until is not None and time.monotonic() >= until:
                return await self._finisher.hand_over()
            await self._observer.wait(max(self._seconds_to_wait(), 0.01))

    def _report(self) -> None:
        """Log and publish what has changed. An error must not end the following of the job: it is logged once."""
        for update in (self._partial.update, self._replicas.update, self._reporter.update):
            try:
                update()
            except Exception:
                if update not in self._broken:
                    log.exception("The state of %s can't be reported completely.", self._state.ref)
                    self._broken.append(update)

    async def _decide_unless_killed(self) -> Outcome | None:
        """Run `_decide`, and cancel it on a kill: it may read logs and events for longer than a kill allows.

        A release is not cancelled. It is what a kill would do, too.
        """
        deciding, killed = asyncio.ensure_future(self._decide()), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait([deciding, killed], return_when=asyncio.FIRST_COMPLETED)
            if deciding.done() or self._finisher.releasing:
                return await deciding
            deciding.cancel()
            await asyncio.wait([deciding])
            return await self._finisher.killed()
        finally:
            killed.cancel()
            deciding.cancel()

    async def _decide(self) -> Outcome | None:
        """The outcome if the following ends now, else None."""
        state, finisher = self._state, self._finisher
        if self._stop.reason is not None:
            return await finisher.killed()
        if state.phase is None:
            syncing = time.monotonic() < state.began + FIRST_SYNC_SECONDS
            cause = None if syncing else await self._passed_limit()
            return None if cause is None else await finisher.failed(cause)
        if await self._observer.is_superseded():
            return finisher.let_go()
        met = set(self._options.conditions) & shown_conditions(state.job or {}, state.phase)
        if met and not state.gone:
            return await finisher.conditions_met(met)
        if state.phase.ended:
            self._pods_behind = await self._observer.pods_are_behind()
            return None if self._pods_behind else await finisher.ended()
        cause = await self._passed_limit() or await self._crash_loop() or await self._queue.find_failure()
        cause = cause or await self._startup.find_failure()
        return None if cause is None else await finisher.failed(cause)

    def _seconds_to_wait(self) -> float:
        """Seconds until something is due, if nothing changes before."""
        now, state, until = time.monotonic(), self._state, self._host.until
        seconds = min((self._due(clock) - time.time() for clock in self._clocks()), default=MAX_WAIT_SECONDS)
        if state.phase is None:
            seconds = max(seconds, state.began + FIRST_SYNC_SECONDS - now)
        if state.uncertain:
            seconds = min(seconds, RETRY_SECONDS)
        if self._pods_behind:
            seconds = min(seconds, self._observer.pods_due - now)
        reporters = self._replicas.due, self._output.restarts.due, self._reporter.due
        for due in (until, self._startup.due, self._partial.due, self._queue.wakes_at, *reporters):
            if due is not None:
                seconds = min(seconds, due - now)
        return seconds

    # limits

    def _clocks(self) -> list[Clock]:
        return running_clocks(self._state, self._output, self._options)

    def _due(self, clock: Clock) -> float:
        """When the limit may act, in epoch seconds."""
        return max(clock.due, self._look_again_at) if clock.limit in LOG_LIMITS else clock.due

    async def _passed_limit(self) -> Cause | None:
        """The limit that was passed first, as a cause."""
        now = time.time()
        passed = min((c for c in self._clocks() if self._due(c) <= now), key=lambda c: c.due, default=None)
        if passed is None:
            most = self._options.limits.max_restarts
            if most is None or self._state.pods.restarts <= most:
                return None
            return await self._finisher.diagnose_limit(Limit.RESTARTS, float(most))
        look = await self._look(passed) if passed.limit in LOG_LIMITS else Look(Activity.QUIET)
        if look.activity is not Activity.QUIET:
            if look.activity is Activity.UNKNOWN:
                self._look_again_at = time.time() + LOOK_AGAIN_SECONDS
            return None
        cause = await self._finisher.diagnose_limit(passed.limit, passed.seconds)
        cause = replace(cause, detail="\n".join(filter(None, (look.note, cause.detail))))
        return self._queue.explain(cause) if passed.limit is Limit.QUEUE else cause

    async def _look(self, clock: Clock) -> Look:
        """Read the job, its pods and their logs: a watch may not have shown yet that the job has ended."""
        try:
            job, pods = await read_job(self._api, self._state.ref), await job_pods(self._api, self._state.ref)
        except (ApiUnavailable, ApiStatusError):
            return Look(Activity.UNKNOWN)
        if job is None or phase_of(job).ended or wants_suspension(job):
            return Look(Activity.UNKNOWN)
        return await self._probe.look(clock, job, pods)

    async def _crash_loop(self) -> Cause | None:
        loop = self._output.restarts.crash_loop(self._options.limits.crash_loop)
        return None if loop is None else await self._finisher.diagnose_crash_loop(loop)
