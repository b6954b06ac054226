"""Follows one job: phases, logs, clocks, warnings. Workers, triggerers and `ktrain run` run the same code.

`Following.next` returns what may end the training's life. It changes nothing and decides nothing: the owner
(`engine/training_owner.py`) reads the job, lets the following observe what was read, and asks whether the rule still
holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from airflow_provider_ktrain.core.diagnosis import job_rules as diagnosis
from airflow_provider_ktrain.core.diagnosis.crash_loop import CrashLoop
from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.end_rules import Event
from airflow_provider_ktrain.core.identity.names import DEPLOYMENT_LABEL, JobRef, label_value
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.deadline import seconds_to_deadline
from airflow_provider_ktrain.core.state.limits import Clock, Limit, clocks
from airflow_provider_ktrain.core.state.pods.pod_changes import MAX_CLOCK_SKEW_SECONDS
from airflow_provider_ktrain.core.state.status import Phase, Seen, shown_conditions
from airflow_provider_ktrain.core.text.output import masked_log
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import JobRead
from airflow_provider_ktrain.engine.follow.activity import LOG_LIMITS, ActivityProbe
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part
from airflow_provider_ktrain.engine.follow.disruptions import DisruptionReporter
from airflow_provider_ktrain.engine.follow.following_end import FollowingEnd
from airflow_provider_ktrain.engine.follow.observer import Observer
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.replicas import PartialStartWarning, ReplicaReporter
from airflow_provider_ktrain.engine.follow.stacks import StackReader
from airflow_provider_ktrain.engine.follow.startup import StartupChecks
from airflow_provider_ktrain.engine.follow.status_reporter import StatusReporter
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from airflow_provider_ktrain.engine.watch.informer import SharedInformer, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_label, by_name, by_uid
from airflow_provider_ktrain.engine.watch.stripping import stripped

log = masked_log(__name__)
FIRST_SYNC_SECONDS = 10.0  #: How long to wait for the first lists of job and pods before a limit may pass without them.
RETRY_SECONDS = 1.0  #: Pause before the API server is asked again after a failed request.
MAX_WAIT_SECONDS = 3600.0  #: How long to wait when nothing changes and no limit is due.


@dataclass(frozen=True)
class Noticed:
    """What may end the training's life.

    :param amount: its value, in seconds or restarts. Default: 0.
    """

    event: Event
    limit: Limit | None = None
    amount: float = 0.0
    cause: Cause | None = None
    loop: CrashLoop | None = None


class Following:
    """One job that is followed in this process; a context manager."""

    def __init__(self, context: FollowContext) -> None:
        self._context, self._options, self._host = context, context.options, context.host
        self.state = context.state
        self._output = JobOutput(context)
        self._broken: list[Part] = []  # whose reports have raised an error
        self._snoozed_until: dict[tuple[Event, Limit | None], float] = {}  # by event, in epoch seconds
        self._suspension_noticed = False
        self._annotated = 0, 0  # versions of the pods of which the job's annotation is complete
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            context, output = self._context, self._output
            stack.push_async_callback(output.close)
            stack.callback(context.api.on_notice(context.log.warning))
            watches = _watches_of(context.api, self.state.ref, shared=self._host.shared)
            jobs, pods = [
                await stack.enter_async_context(informer.subscribe(key=key, news=context.news))
                for informer, key in watches
            ]
            self._queue = QueueFollower(context)
            self._observer = Observer(context, output, self._queue, [informer for informer, _ in watches], jobs, pods)
            disruptions = DisruptionReporter(context)
            self._startup = StartupChecks(context, output.evidence.events, self._observer.seconds_away_since)
            reporter = StatusReporter(context, output, self._queue, disruptions, self._startup, self._running_clocks)
            self._probe = ActivityProbe(context, output)
            self._replicas = ReplicaReporter(context)
            self._parts = (
                self._queue, self._observer, self._startup, output.restarts, PartialStartWarning(context),
                self._replicas, disruptions, reporter,
            )  # fmt: skip
            stack.push_async_callback(self._close_parts)
            self.end = FollowingEnd(context, output, self._observer, reporter)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _close_parts(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # of a job that waits, a stack would need 1 KiB
            for part in self._parts:
                stack.push_async_callback(part.close)

    # what is noticed

    async def next(self, until: float | None = None) -> Noticed:
        """Wait until something may end the training's life.

        :param until: when to hand the job over, by `timing.now`. Default: None, never.
        """
        while True:
            if self._host.shared:
                # a triggerer that stalled lost its triggers to another one, which logs the same lines
                await log_socket().awake(self._host.began())
            if await self._observer.update():
                self._startup.phase_changed()
            if (noticed := await self._notice()) is not None:
                return noticed
            await self._report()  # a first status would replace the cause that an earlier process has stored
            if until is not None and timing.now() >= until:
                return Noticed(Event.HAND_OVER)
            await self._observer.wait(max(self._seconds_to_wait(until), 0.01))

    def snooze(self, noticed: Noticed, seconds: float) -> None:
        """Don't notice the same again for that many seconds, although nothing has changed."""
        self._snoozed_until[noticed.event, noticed.limit] = timing.epoch() + seconds

    def _is_snoozed(self, event: Event, limit: Limit | None = None) -> bool:
        return self._snoozed_until.get((event, limit), 0.0) > timing.epoch()

    async def _notice(self) -> Noticed | None:
        state = self.state
        if state.phase is None:
            syncing = timing.now() < state.began + FIRST_SYNC_SECONDS
            return None if syncing else self._passed_limit()
        if state.superseded and not self._is_snoozed(Event.OWNED_BY_OTHERS):
            return Noticed(Event.OWNED_BY_OTHERS)
        met = set(self._options.conditions) & shown_conditions(state.job or {}, state.phase)
        if met and not state.gone:
            return Noticed(Event.CONDITION)
        if state.phase.ended:
            event = Event.MISSING if state.gone else Event.ENDED
            return None if self._is_snoozed(event) else Noticed(event)
        if state.is_being_released and not self._is_snoozed(Event.BEING_DELETED):
            return Noticed(Event.BEING_DELETED)
        was, self._suspension_noticed = self._suspension_noticed, state.phase is Phase.SUSPENDED
        if self._suspension_noticed and not was:
            return Noticed(Event.SUSPENDED)
        for find in (self._stopped_pod, self._passed_limit, self._restarts, self._crash_loop, self._diverged):
            if (found := find()) is not None:
                return found
        if not self._is_snoozed(Event.QUEUE_VERDICT) and (cause := await self._queue.find_failure()) is not None:
            return Noticed(Event.QUEUE_VERDICT, cause=cause)
        if not self._is_snoozed(Event.STARTUP_RULE) and (cause := await self._startup.find_failure()) is not None:
            return Noticed(Event.STARTUP_RULE, cause=cause)
        return None

    def _passed_limit(self) -> Noticed | None:
        """The limit that was passed first."""
        passed = min((c for c in self._clocks() if c.due <= timing.epoch()), key=lambda c: c.due, default=None)
        if passed is None:
            return None
        event = Event.DEADLINE if passed.limit is Limit.EXECUTION else Event.LIMIT
        return Noticed(event, passed.limit, passed.seconds)

    def _stopped_pod(self) -> Noticed | None:
        """Whether the success of the job may be incomplete for a reason that its annotation doesn't have yet."""
        pods = self.state.pods
        versions = pods.stopped_version, pods.groups.shown_version if self.state.is_annotated else 0
        if versions == self._annotated or not self._options.release or self._is_snoozed(Event.STOPPED_POD):
            return None
        if self.state.stopped_pods_annotation:
            return Noticed(Event.STOPPED_POD)
        self._annotated = versions
        return None

    def _restarts(self) -> Noticed | None:
        most = self._options.limits.max_restarts
        if most is None or self.state.pods.restarts <= most or self._is_snoozed(Event.RESTARTS, Limit.RESTARTS):
            return None
        return Noticed(Event.RESTARTS, Limit.RESTARTS, float(most))

    def _crash_loop(self) -> Noticed | None:
        loop = self._output.restarts.crash_loop(self._options.limits.crash_loop)
        if loop is None or self._is_snoozed(Event.CRASH_LOOP, Limit.CRASH_LOOP):
            return None
        return Noticed(Event.CRASH_LOOP, Limit.CRASH_LOOP, loop=loop)

    def _diverged(self) -> Noticed | None:
        if not self._output.divergence.is_suspected or self._is_snoozed(Event.LIMIT, Limit.NAN):
            return None
        return Noticed(Event.LIMIT, Limit.NAN)

    def _clocks(self) -> list[Clock]:
        """The limits that run, later by the time in which nothing could be observed, and due after their snooze.

        Time in which the API server was away doesn't count, unless a condition is unchanged since before. Even then
        the cluster has some seconds to change it afterwards. The deadline always counts.
        """
        away_since, postponed = self._observer.seconds_away_since, []
        for clock in self._running_clocks():
            event = Event.LIMIT
            due = clock.due
            if clock.limit is Limit.EXECUTION:
                event = Event.DEADLINE
            elif clock.limit not in LOG_LIMITS:  # a read of the logs covers that time
                due += away_since(clock.due - clock.seconds) - away_since(clock.unchanged_since)
                due = max(due, self._observer.recovered_at(due))
            due = max(due, self._snoozed_until.get((event, clock.limit), 0.0))
            postponed.append(replace(clock, due=due))
        return postponed

    def _running_clocks(self) -> list[Clock]:
        state, options, output = self.state, self._options, self._output
        return list(
            clocks(
                state.job or {},
                state.pods.groups,
                state.phase or Phase.PENDING,
                options.limits,
                deadline=options.deadline,
                deadline_seconds=seconds_to_deadline(state.job or {}),
                last_line=output.last_line_at,
                progress_since=None if options.limits.progress is None else output.progress_since(),
                has_events=output.evidence.events.exist,
                had_pods=state.pods.any,
            )
        )

    @property
    def workload(self) -> dict[str, Any] | None:
        """Kueue's Workload of the job, if its watch shows one."""
        return self._queue.workload

    # what was read or written

    def wrote(self, job: Mapping[str, Any]) -> None:
        """Take the job as this process has changed it: the watch shows that later."""
        self.state.job = stripped(dict(job))

    def record_unread(self, asked: float) -> None:
        """Take that a read has failed, which began at `asked`, in epoch seconds."""
        self._observer.record_unread(asked)

    async def observe(self, read: JobRead) -> Seen:
        """Take what was read from the API server, and return what it shows."""
        await self._observer.take(read)
        return self.seen

    @property
    def seen(self) -> Seen:
        """What was observed last. A result that was printed before a pod was stopped proves the training complete."""
        seen, state = self.state.seen, self.state
        if seen is not Seen.SUCCEEDED or not state.why_incomplete:
            return seen
        stopped_at = min((one.at for one in state.ends.stopped), default=0.0)
        proved = self._output.result.printed_before(stopped_at - MAX_CLOCK_SKEW_SECONDS)
        return seen if proved else Seen.INCOMPLETE

    async def still_holds(self, noticed: Noticed) -> bool | None:
        """Whether the rule that was noticed holds on what was observed last. None: a further read has failed."""
        now, snoozed_before, self._snoozed_until = timing.epoch(), self._snoozed_until, {}
        try:
            match noticed.event:
                case Event.QUEUE_VERDICT | Event.STARTUP_RULE if self._observer.recovered_at(now) > now:
                    return False  # a start that nobody could report is reported now
                case Event.LIMIT if noticed.limit is Limit.NAN:
                    return await self._output.divergence.confirms()
                case Event.LIMIT:
                    return await self._still_passed(noticed)
                case Event.RESTARTS:
                    return self._restarts() is not None
                case Event.CRASH_LOOP:
                    return self._crash_loop() is not None
                case Event.QUEUE_VERDICT:
                    return await self._queue.find_failure() is not None
                case Event.STARTUP_RULE:
                    return await self._startup.find_failure(at_once=True) is not None
                case _:
                    return True
        finally:
            self._snoozed_until = snoozed_before

    async def _still_passed(self, noticed: Noticed) -> bool | None:
        """Whether a limit has passed by what was read, and for silence by what all logs show now."""
        now = timing.epoch()
        clock = next((c for c in self._clocks() if c.limit is noticed.limit and c.due <= now), None)
        if clock is None or clock.limit not in LOG_LIMITS:
            return clock is not None
        return await self._probe.confirms(clock)

    async def cause_of(self, noticed: Noticed) -> Cause:
        """Why the training is ended by a rule, with the last log lines. Reading of logs ends with this."""
        if noticed.cause is not None:
            return noticed.cause
        known = f"{self.state.ref} is ended by {noticed.limit or noticed.event}"
        category = diagnosis.category_of(noticed.limit)
        return await self.end.diagnosed(self._cause_of_running_job(noticed), known, category)

    async def _cause_of_running_job(self, noticed: Noticed) -> Cause:
        evidence = await self.end.evidence_of_running_job()
        if noticed.loop is not None:
            return diagnosis.diagnose_crash_loop(noticed.loop, evidence)
        limit, diverged = noticed.limit or Limit.EXECUTION, self._output.divergence.cause
        if limit is Limit.NAN and diverged is not None:
            return diverged
        step = self._output.training_metrics.step
        cause = diagnosis.diagnose_limit(limit, noticed.amount, evidence, step=step, replicas=self._replicas.line)
        if limit in LOG_LIMITS and (unread := self._probe.unread_replicas):
            cause = replace(cause, detail="\n".join(filter(None, (unread, cause.detail))))
        return self._queue.explain(cause) if limit is Limit.QUEUE else cause

    def stack_reader(self, noticed: Noticed, read: JobRead | None) -> StackReader:
        """What reads the stacks that pods print when a limit releases the job that a hang can pass; else nothing."""
        hangs = noticed.event is Event.DEADLINE or noticed.limit in LOG_LIMITS
        limit = (noticed.limit or Limit.EXECUTION) if hangs and self.state.phase is Phase.RUNNING else None
        pods = [] if read is None else read.pods
        return StackReader(self._context, self._output, limit, noticed.amount, pods)

    def with_ended_primary(self, cause: Cause) -> Cause:
        """The cause, with how the program ended if the job's status doesn't show that yet."""
        ended = self.state.ended_primary
        return cause if ended is None else replace(cause, detail="\n".join(filter(None, (f"{ended}.", cause.detail))))

    # reports

    async def _report(self) -> None:
        """Log and publish what has changed. An error must not end the following of the job: it is logged once."""
        for part in self._parts:
            try:
                await part.observe()
            except Exception:
                if part not in self._broken:
                    log.exception("The state of %s can't be reported completely.", self.state.ref)
                    self._broken.append(part)

    def _seconds_to_wait(self, until: float | None) -> float:
        now, state = timing.now(), self.state
        clocks = [] if state.ended else self._clocks()
        seconds = min((clock.due - timing.epoch() for clock in clocks), default=MAX_WAIT_SECONDS)
        if state.phase is None:
            seconds = max(seconds, state.began + FIRST_SYNC_SECONDS - now)
        if state.uncertain:
            seconds = min(seconds, RETRY_SECONDS)
        for snoozed_until in self._snoozed_until.values():
            if (snoozed := snoozed_until - timing.epoch()) > 0:
                seconds = min(seconds, snoozed)
        snoozed_part = self._queue if self._is_snoozed(Event.QUEUE_VERDICT) else None
        for due in (until, *(part.due for part in self._parts if part is not snoozed_part)):
            if due is not None:
                seconds = min(seconds, due - now)
        return seconds


def _watches_of(api: Api, ref: JobRef, *, shared: bool) -> list[tuple[SharedInformer, Key]]:
    """The watches of a job and of its pods, each with the key by which to subscribe."""
    kind = kind_of(ref.kind)
    jobs, pods = api_paths.jobs(kind, ref.version, ref.namespace), api_paths.core(ref.namespace, "pods")
    selector, of_pods, field_selector = "", ref.pod_selector, f"metadata.name={ref.name}"
    if shared and ref.submission:
        selector, field_selector = f"{DEPLOYMENT_LABEL}={label_value(ref.deployment)}", ""
        # pods that may lack our labels are selected by the operator's label, whatever its value
        of_pods = selector if kind.behavior.labels_pods else kind.behavior.pod_name_label
    label, _, value = ref.pod_selector.partition("=")
    job = shared_informer(api, jobs, label_selector=selector, field_selector=field_selector)
    return [
        (job, by_uid(ref.uid) if ref.uid else by_name(ref.name)),
        (shared_informer(api, pods, label_selector=of_pods), by_label(label, value)),
    ]
