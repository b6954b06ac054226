"""Follow one job until it has ended: phases, logs, limits, cause, release. One coroutine for worker and triggerer."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from airflow_provider_ktrain.core.diagnosis import job as diagnosis
from airflow_provider_ktrain.core.diagnosis import startup
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause, Limit
from airflow_provider_ktrain.core.diagnosis.pod_failures import find_failures
from airflow_provider_ktrain.core.identity import DEPLOYMENT_LABEL, JobRef, Owner, label_value
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.logs.result import RESULT_MARKER, find_result, keep_result_line
from airflow_provider_ktrain.core.logs.selection import chooser
from airflow_provider_ktrain.core.state.limits import Clock, clocks
from airflow_provider_ktrain.core.state.pod_history import PodHistory
from airflow_provider_ktrain.core.state.status import Phase, phase_of, true_conditions
from airflow_provider_ktrain.core.summary import summary_of_success
from airflow_provider_ktrain.core.text import counted
from airflow_provider_ktrain.core.timestamps import parse_timestamp
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.errors import explain, is_transient
from airflow_provider_ktrain.engine.evidence_collector import EvidenceCollector
from airflow_provider_ktrain.engine.follow.messages import Handover, Options, Outcome, Stop
from airflow_provider_ktrain.engine.follow.restarts import RestartReporter
from airflow_provider_ktrain.engine.jobs import Log, belongs, job_pods, read_job
from airflow_provider_ktrain.engine.logs.emitter import Inspect, LogLine, format_line
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from airflow_provider_ktrain.engine.logs.report import DrainReport
from airflow_provider_ktrain.engine.release import ReleaseError, mode_of, release
from airflow_provider_ktrain.engine.watch import Subscription, WatchEvent, by_label, by_name, by_uid, shared_informer

Object = dict[str, Any]
EARLY = 60.0  # seconds within which a right that is missing ends the task: later it may only be away for a while
PATIENCE = 600.0  # seconds that a refused watch (401, 403) is borne once the job is followed
FIRST_LOOK = 10.0  # seconds in which the watches must tell how the job stands, before a deadline decides alone
SETTLE = 5.0  # seconds in which the watch of the pods must tell which of them made the job end
LOOK_EVERY = 15.0  # seconds between the first looks at the events of a job that does not start; then ever longer
LOOK_SELDOM = 300.0  # seconds between them at most
LONGEST_DRAIN = 300.0  # seconds that the rest of the logs may take at the end, as long as lines come
SHORT_DRAIN = 5.0  # seconds that it may take where a limit has passed
NAMED = 3  # containers that a message about many names
TAKEOVER_AFTER = 10.0  # seconds after a handover: a trigger usually starts within 2 s, a takeover needs longer


async def follow(
    ref: JobRef,
    api: Api,
    options: Options,
    *,
    log: Log,
    stop: Stop,
    handover: Handover | None = None,
    until: float | None = None,
    fail_fast_on_forbidden: bool = False,
    shared: bool = False,
    cursor: Cursor | None = None,
) -> Outcome | Handover:
    """Follow the job to its end and release it; or, with `until` (of `time.monotonic`), hand it over then.

    :param handover: of the process that followed the job before.
    :param fail_fast_on_forbidden: a refused watch (401, 403) ends this in the first minute: for a job that was just
        created, or that is not ours to release. Any other job has lived, and an API server may refuse for a while
        after its restart.
    :param shared: one watch for all jobs of the deployment: for a process that follows many.
    :param cursor: where to go on in the logs; moved on in place. Default: the handover's.

    Whatever ends this normally has released the job or says why not. Cancelling it touches nothing: a triggerer that
    stops is no reason to end a training.
    """
    supervisor = _Supervisor(ref, api, options, log, stop, handover or Handover(), cursor)
    supervisor.fail_fast_on_forbidden, supervisor.shared = fail_fast_on_forbidden, shared
    stop_notices = api.on_notice(log.warning)
    try:
        return await supervisor.run(until)
    finally:
        stop_notices()
        await supervisor.close()


class _Supervisor:
    def __init__(
        self,
        ref: JobRef,
        api: Api,
        options: Options,
        log: Log,
        stop: Stop,
        handover: Handover,
        cursor: Cursor | None,
    ) -> None:
        self.ref = ref
        self.kind = kind_of(ref.kind)
        self.api = api
        self.options = options
        self.log = log
        self.stop = stop
        self.phase: Phase | None = None
        self.gone = False
        self.unsure = False  # whether it is there could not be asked
        self.job: Object | None = None  # as last seen; kept when it is gone
        self.pods = PodHistory(self.kind, handover.pod_history)
        self.phase_since = time.monotonic()
        self.metrics = dict(handover.metrics)
        self.watches_before = api.stats["watches"]
        self.result_line = handover.result_line  # the last one of the primary
        self.fail_fast_on_forbidden = self.shared = False
        self.releasing = False
        self.behind = False  # the watch of the pods, as the job ended
        self.last_line = time.time()
        self.began = time.monotonic()
        self.refused_since: float | None = None
        self.looked = time.monotonic()
        self.look_after = LOOK_EVERY
        self.obstacle = ""  # what was last said to keep it from starting
        self.look: Callable[[], Awaitable[None]]
        self.chosen: Callable[[Object], bool] = lambda pod: False
        self.handed_over_at = handover.handed_over_at
        self.cursor = Cursor.from_dict(handover.cursor) if cursor is None else cursor
        self.evidence = EvidenceCollector(api, self.kind, self.cursor, log)
        self.restarts = RestartReporter(self.kind, self.evidence, log, handover.pod_history.get("crashes"))
        self.logs = LogFollower(
            api,
            partial(log_line, log, self.kind),
            kind=self.kind,
            cursor=self.cursor,
            chosen=lambda pod, _: self.chosen(dict(pod)),
            inspector=self._inspector,
        )

    async def close(self) -> None:
        await self.logs.close()

    # following

    async def run(self, until: float | None) -> Outcome | Handover:
        self._announce_repeated_lines()
        stopped = asyncio.Event()
        self.stop.attach(stopped)
        jobs_path = paths.jobs(self.kind, self.ref.version, self.ref.namespace)
        pods_path = paths.core(self.ref.namespace, "pods")
        if self.shared and self.ref.submission:
            selector = f"{DEPLOYMENT_LABEL}={label_value(self.ref.deployment)}"
            jobs_informer = shared_informer(self.api, jobs_path, label_selector=selector)
            pods_informer = shared_informer(self.api, pods_path, label_selector=selector)
        else:
            jobs_informer = shared_informer(self.api, jobs_path, field_selector=f"metadata.name={self.ref.name}")
            pods_informer = shared_informer(self.api, pods_path, label_selector=self.ref.pod_selector)
        async with (
            jobs_informer.subscribe(key=by_uid(self.ref.uid) if self.ref.uid else by_name(self.ref.name)) as jobs,
            pods_informer.subscribe(key=by_label(*self.ref.pod_selector.split("="))) as pods,
        ):
            self.look = partial(self._take, jobs, pods)
            while True:
                if self.shared:
                    await self.logs.budget.awake()  # no line of its own either where another triggerer took over
                await self.look()
                outcome = await self._decide_unless(stopped)
                if outcome is not None:
                    return outcome
                if until is not None and time.monotonic() >= until:
                    await self.logs.close()
                    self._count()
                    return Handover(
                        cursor=self.cursor.to_dict(),
                        metrics=self.metrics,
                        result_line=self.result_line,
                        pod_history={**self.pods.handover(_now()), "crashes": self.restarts.handover()},
                        handed_over_at=time.time(),
                    )
                await self._wait(jobs, pods, stopped, until)

    async def _decide_unless(self, stopped: asyncio.Event) -> Outcome | None:
        """`_decide`, cut off by a kill: it may read logs and events for longer than a kill has."""
        deciding, killed = asyncio.ensure_future(self._decide()), asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait([deciding, killed], return_when=asyncio.FIRST_COMPLETED)
            if deciding.done() or self.releasing:  # a release asks first, and waits then
                return await deciding
            deciding.cancel()
            await asyncio.wait([deciding])
            return await self._killed()
        finally:
            killed.cancel()
            deciding.cancel()

    async def _decide(self) -> Outcome | None:
        """The end, if this is it."""
        if self.stop.reason is not None:
            return await self._killed()
        if self.phase is None:
            cause = await self._overdue() if time.monotonic() >= self.began + FIRST_LOOK else None
            return None if cause is None else await self._failed(cause)
        if self._superseded() and await self._superseded_indeed():
            self.log.warning(f"{self.ref} belongs to another try of this task by now; this one lets go of it")
            return Outcome(self.phase, False, superseded=True)
        if (met := set(self.options.conditions) & true_conditions(self.job or {}).keys()) and not self.gone:
            if self.phase.ended:
                await self._drain_to_the_end()
            self.log.info(f"{self.ref} has the condition {' and '.join(sorted(met))}")
            return Outcome(self.phase, True)
        if self.phase.ended:
            self.behind = await self._is_behind()
            return None if self.behind else await self._ended()
        cause = await self._overdue() or await self._crash_loop() or await self._hopeless()
        return None if cause is None else await self._failed(cause)

    async def _wait(self, jobs: Subscription, pods: Subscription, stopped: asyncio.Event, until: float | None) -> None:
        """Until something changes, is asked for or is due."""
        due = min((clock.due - time.time() for clock in self._clocks()), default=3600.0)
        if self.phase is None:
            due = max(due, self.began + FIRST_LOOK - time.monotonic())
        if self.unsure:
            due = min(due, 1.0)
        if until is not None:
            due = min(due, until - time.monotonic())
        if self.behind:
            due = min(due, self.phase_since + SETTLE - time.monotonic())
        if self._not_started:
            due = min(due, self.looked + self.look_after - time.monotonic())
        if self.restarts.due is not None:
            due = min(due, self.restarts.due - time.monotonic())
        changes = [asyncio.ensure_future(jobs.changed()), asyncio.ensure_future(pods.changed())]
        waits: list[asyncio.Future[Any]] = [*changes, asyncio.ensure_future(stopped.wait())]
        try:
            await asyncio.wait(waits, timeout=max(due, 0.01), return_when=asyncio.FIRST_COMPLETED)
            for change in changes:
                if change.done():
                    self._note(change)
        finally:
            for wait in waits:
                wait.cancel()

    def _note(self, changes: asyncio.Future[list[WatchEvent]]) -> None:
        """What a watch tells that its subscription's objects do not: what is deleted, and that it is refused."""
        error = changes.exception()
        if error is not None:
            now = time.monotonic()
            if self.refused_since is None:
                self.refused_since = now
                self.log.warning(f"{self.ref} cannot be watched now: {error}")
            early = self.fail_fast_on_forbidden and (self.phase is None or now - self.began < EARLY)
            if early or now - self.refused_since > PATIENCE:
                raise self._explained(error)
            return
        self.refused_since = None
        for seen in changes.result():
            if seen.type == "DELETED":
                uid = seen.object["metadata"]["uid"]
                if uid == self.ref.uid:
                    self.job = seen.object
                elif self._is_mine(seen.object):
                    self.pods.mark_deleted(seen.object)
                    self.restarts.mark_deleted(seen.object)
                    self.logs.observe(seen.object, deleted=True)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, ApiStatusError | ApiUnavailable):
            return explain(error, "watch", f"{self.kind.plural}.{self.kind.group} and pods", self.ref.namespace)
        return error

    def _is_mine(self, pod: Mapping[str, Any]) -> bool:
        """Known only once the job is: one that is followed by its name has no uid before."""
        return bool(self.ref.submission) or belongs(pod, self.ref)

    async def _take(self, jobs: Subscription, pods: Subscription) -> None:
        """What the watches know becomes what we know."""
        if not self.ref.uid and jobs.objects:  # named only: from now on it is this very job
            self.ref = replace(self.ref, uid=next(iter(jobs.objects)))
        job = jobs.objects.get(self.ref.uid)
        if self.ref.uid and job is None and not self.gone and jobs.synced:
            # a watch that ran before the job was created may not have heard of it; one with a selector tells of a
            # job that lost its label as if it were deleted
            try:
                job = await read_job(self.api, self.ref)
                self.gone, self.unsure = job is None, job is not None
            except (ApiUnavailable, ApiStatusError) as e:
                if self.fail_fast_on_forbidden and not is_transient(e):
                    raise
                self.unsure = True
        elif job is not None:
            self.unsure = False
        job = job or next((last for last in jobs.deleted if last["metadata"]["uid"] == self.ref.uid), None)
        if job is not None:
            if self.job is None:
                self.chosen = chooser(self.options.logs, self.kind, job)
            self.job = job
        if self.job is not None:
            mine = {uid: pod for uid, pod in pods.objects.items() if self._is_mine(pod)}
            self.pods.update(mine, _now())
            self.evidence.forget_all_but(self.pods.all)
            self.restarts.update(self.job, mine, filter(self._is_mine, pods.deleted))
            for pod in mine.values():
                self.logs.observe(pod)
        if (self.gone or self.job is not None) and pods.synced:  # without its pods, an end has no logs and no cause
            phase = phase_of(self.job, filter(self._is_mine, pods.objects.values()))
            if self.gone and not phase.ended:  # one that had ended and was deleted then (a TTL of 0) has ended so
                phase = Phase.GONE
            if phase is not self.phase:
                self._say(phase)
                self._count_phase()
                self.phase, self.phase_since = phase, time.monotonic()
                self.look_after = LOOK_EVERY
                if phase in (Phase.RUNNING, Phase.RESTARTING):
                    self.last_line = time.time()  # it was silent before because it did not run

    def _say(self, phase: Phase) -> None:
        conditions = true_conditions({} if phase is Phase.GONE else self.job or {})
        names = {Phase.QUEUED: "Suspended", Phase.PENDING: "Created", Phase.STARTING: "Created"}
        condition = conditions.get(names.get(phase, phase.value))
        why = f": {condition.message or condition.reason}" if condition else ""
        self.log.info(f"{self.ref} is {phase}{why}", phase=phase.value)

    def _count_phase(self) -> None:
        if self.phase is not None:
            name = f"seconds.{self.phase.lower()}"
            self.metrics[name] = round(self.metrics.get(name, 0) + time.monotonic() - self.phase_since, 3)

    def _count(self) -> None:
        """Add what this host has done to the metrics; once, at its end."""
        self._count_phase()
        report = self.logs.report()
        watches = self.api.stats["watches"] - self.watches_before
        done = {"log.lines": report.lines, "log.bytes": report.bytes, "watch.requests": watches}
        self.metrics |= {name: self.metrics.get(name, 0) + number for name, number in done.items()}

    def _superseded(self) -> bool:
        owner = Owner.of(self.job or {})
        return bool(self.ref.owner and owner is not None and owner.ti_id != self.ref.owner)

    async def _superseded_indeed(self) -> bool:
        """Asked of the API server: a watch may be behind, and then nobody would follow the job."""
        try:
            self.job = await read_job(self.api, self.ref) or self.job
        except (ApiUnavailable, ApiStatusError):
            self.unsure = True
            return False
        return self._superseded()

    @property
    def _not_started(self) -> bool:
        return self.phase in (Phase.PENDING, Phase.STARTING)

    async def _is_behind(self) -> bool:
        """Whether the job has ended, no pod is known that made it end, and the API server knows more of its pods.

        Jobs and pods come by two watches, of which one may be behind.
        """
        if time.monotonic() >= self.phase_since + SETTLE or self._pods_tell_the_end():
            return False
        known = {pod["metadata"]["uid"]: _phase_of_pod(pod) for pod in self.pods.live}
        try:
            there = {pod["metadata"]["uid"]: _phase_of_pod(pod) for pod in await job_pods(self.api, self.ref)}
        except (ApiUnavailable, ApiStatusError):
            return True
        return there != known

    def _pods_tell_the_end(self) -> bool:
        if self.phase is Phase.FAILED:
            return any(failure.is_latest for failure in find_failures(self.kind, self.pods.all, {}))
        if self.phase is not Phase.SUCCEEDED:
            return True
        primary = self.kind.primary(self.job or {}), 0
        return any(
            _phase_of_pod(pod) == "Succeeded" and self.kind.pod_role(pod["metadata"].get("labels") or {}) == primary
            for pod in self.pods.all
        )

    def _clocks(self) -> list[Clock]:
        options, job, phase = self.options, self.job or {}, self.phase or Phase.PENDING
        return list(
            clocks(
                job,
                self.pods.live,
                phase,
                options.limits,
                deadline=options.deadline,
                last_line=self.last_line,
                has_events=self.evidence.has_events,
            )
        )

    async def _overdue(self) -> Cause | None:
        """The limit that has passed, as a cause."""
        now = time.time()
        over = min((c for c in self._clocks() if c.due <= now), key=lambda c: c.due, default=None)
        if over and over.limit is Limit.LOG_STALL and not await self.logs.silent():
            self.last_line = now  # that nothing came proves nothing: the API server is away, or we were
            return None
        limit, amount = (over.limit, over.seconds) if over else (None, 0.0)
        most = self.options.limits.max_restarts
        if over is None and most is not None and self.pods.restarts > most:
            limit, amount = Limit.RESTARTS, float(most)
        if limit is None:
            return None
        await self._drain(min(self.options.drain_timeout, SHORT_DRAIN))
        return diagnosis.diagnose_limit(limit, amount, self.job or {}, self.pods.all, *await self._why())

    async def _crash_loop(self) -> Cause | None:
        loop = self.restarts.crash_loop(self.options.limits.crash_loop)
        if loop is None:
            return None
        await self._drain(min(self.options.drain_timeout, SHORT_DRAIN))
        seen = self.job or {}, self.pods.all, *await self._why()
        return diagnosis.diagnose_crash_loop(loop.replica, loop.failures, *seen)

    async def _hopeless(self) -> Cause | None:
        """Whether a job that does not start ever can: now and then, as it takes a look at its events."""
        if cause := startup.find_unstartable_command(self.job or {}, self.pods.all):
            return cause
        if not self._not_started or time.monotonic() - self.looked < self.look_after:
            return None
        self.looked = time.monotonic()
        self.look_after = min(self.look_after * 1.5, LOOK_SELDOM)
        waited = time.monotonic() - self.phase_since
        events = await self.evidence.read_events(self.ref, self.pods.uids)
        cause = startup.find_startup_failure(self.job or {}, self.pods.all, events, waited, _now())
        if cause is None:
            self._say_obstacle(events)
        return cause

    def _say_obstacle(self, events: list[Object]) -> None:
        """The newest Warning about the job or its pods, once: it may still start, as long as its limits let it."""
        warnings = [event for event in events if event.get("type") == "Warning"]
        if warnings:
            last = max(warnings, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))
            about = last["involvedObject"]
            told = f"{last.get('reason')} ({about.get('kind')} {about['name']})\n{last.get('message')}"
            if told != self.obstacle:
                self.log.warning(f"{self.ref} is still {self.phase}: {told}")
            self.obstacle = told

    def _inspector(self, source: LogLine) -> Inspect:
        """What sees each line of a container before the rate limit drops any: results, and the lines that tell why a
        replica failed, must not get lost in a flood.
        """
        keep = self.evidence.recorder(source)
        primary = source.index == 0 and source.role == self.kind.primary(self.job or {})

        def inspect(text: str, written: str, run: int) -> None:
            self.last_line = time.time()
            keep(text, written, run)
            if primary and RESULT_MARKER in text:
                self.result_line = keep_result_line(self.result_line, text)

        return inspect

    def _announce_repeated_lines(self) -> None:
        """Where lines come again. Nothing that a trigger can ask tells whether another one has followed the job before
        it, so the time since the handover has to do.
        """
        if self.options.logs == "none" or not self.handed_over_at:
            return
        if self.shared and time.time() - self.handed_over_at > TAKEOVER_AFTER:
            self.log.warning(
                f"Lines since {_clock(self.handed_over_at)} may be repeated: another triggerer took over, or this one "
                "started late."
            )
        if self.cursor.unreadable:
            self.log.warning("The log positions that were handed over can't be read: all lines are repeated.")
        elif self.cursor.omitted:
            since = self.cursor.since[11:19]
            self.log.warning(
                f"Lines since {since} of {self.cursor.omitted:,} containers may be repeated: "
                "the positions of that many don't fit into the trigger's arguments."
            )

    # ending

    async def _ended(self) -> Outcome:
        """The job succeeded, failed or is gone: logs, cause, release, in this order."""
        await self._drain_to_the_end()
        await self.look()  # what has changed meanwhile
        if self.phase is Phase.SUCCEEDED and not self.options.conditions:
            return await self._release(None)
        if self.phase is Phase.SUCCEEDED:
            return Outcome(self.phase, False)
        cause = diagnosis.diagnose(self.job or {}, self.pods.all, *await self._why(), gone=self.phase is Phase.GONE)
        return await self._failed(cause)

    async def _failed(self, cause: Cause) -> Outcome:
        """Say why before the release: while the task waits for a worker again, nothing else does."""
        self.restarts.report(at_once=True)
        self.log.warning("\n".join(filter(None, (cause.summary, cause.resolution))))
        return await self._release(cause)

    async def _why(self) -> tuple[list[Object], dict[str, list[str]]]:
        return await self.evidence.gather(self.ref, self.pods.all, self.pods.uids)

    async def _drain_to_the_end(self) -> None:
        """Read the rest of the logs of a job that has ended, for as long as lines come and the deadline allows."""
        timeout, longest = self.options.drain_timeout, LONGEST_DRAIN
        if self.options.deadline is not None:
            longest = max(min(longest, self.options.deadline - time.time()), SHORT_DRAIN)
        await self._drain(min(timeout, longest), longest)

    async def _drain(self, timeout: float, longest: float | None = None) -> None:
        """Read what is left of the logs, and say what is missing of them: see `LogFollower.drain`."""
        began = time.monotonic()
        report = await self.logs.drain(timeout, longest)
        for (pod, container), tally in report.containers.items():
            for gap in tally.gaps:
                self.log.warning(f"Log of {pod}/{container}: {gap}")
            if tally.dropped:
                self.log.warning(
                    f"Log of {pod}/{container}: {tally.dropped:,} lines ({tally.dropped_bytes:,} bytes) were left out "
                    "by the rate limit"
                )
        self._say_what_was_not_read(report, time.monotonic() - began)

    def _say_what_was_not_read(self, report: DrainReport, seconds: float) -> None:
        """In one line; a job that goes on when a limit ends it always has lines that are not read."""
        unread = report.unread if self.phase is not None and self.phase.ended else []
        keys = list(dict.fromkeys([*(key for key, tally in report.containers.items() if tally.late), *unread]))
        if not keys:
            return
        names = ", ".join(f"{pod}/{container}" for pod, container in keys[:NAMED])
        more = f" and {len(keys) - NAMED:,} more" if len(keys) > NAMED else ""
        lines = f"{'at least ' * bool(unread)}{counted(report.late, 'line')}" if report.late else "the last lines"
        self.log.warning(
            f"Logs are incomplete: reading them was stopped after {seconds:.0f} s. Missing: {lines} of {names}{more}."
        )

    async def _killed(self) -> Outcome:
        """A kill has seconds: the request first, everything else where time allows."""
        self.releasing = True  # nothing cuts this off
        decision = await self.stop.decision()
        cause = Cause(Category.KILLED, decision.reason)
        if decision.keep:
            self._count()
            return Outcome(self.phase or Phase.PENDING, False, cause=cause.as_dict(), metrics=self.metrics)
        return await self._release(cause, verify=False, timeout=4)

    async def _release(self, cause: Cause | None, *, verify: bool = True, timeout: float | None = None) -> Outcome:
        self.releasing = True
        self.restarts.report(at_once=True)
        succeeded = cause is None
        if cause and cause.category is Category.TIMEOUT and not self.shared:
            verify = False  # a worker has Airflow's own alarm behind it: it would interrupt a wait for pods
        released = error = ""
        kept: dict[str, str] | None = None
        if self.options.release and self.ref.uid:
            ended = self.phase is not None and self.phase.ended
            mode = mode_of(self.options.on_finish_action, succeeded=succeeded, ended=ended)
            began = time.monotonic()
            try:
                done = await release(
                    self.api,
                    self.ref,
                    mode,
                    verify=verify,
                    timeout=timeout or self.options.release_timeout,
                    spare_ended=True,
                )
                released = done.text
                # who was killed leaves it: another try may want to know how it ended
                kept = self.ref.to_dict() if done.kept and ended and self.stop.reason is None else None
                self.log.info(released)
            except ReleaseError as e:
                error = str(e)
                self.log.warning(error)
            self.metrics["seconds.release"] = round(time.monotonic() - began, 3)
        ended_at = (self.job or {}).get("status", {}).get("completionTime")
        spent = self.pods.usage(_now(), parse_timestamp(ended_at))
        self.log.info(
            summary_of_success(self.ref, self.kind, self.job or {}, spent, _now()) if succeeded else str(spent)
        )
        self._count()
        result, result_error = find_result(self.kind, self.job or {}, self.pods.all, self.result_line)
        return Outcome(
            self.phase or Phase.PENDING,
            succeeded,
            cause=None if cause is None else cause.as_dict(),
            released=released,
            release_error=error,
            kept=kept,
            usage=spent.as_dict(),
            result=result,
            result_error=result_error,
            metrics=self.metrics,
        )


def log_line(log: Log, kind: Kind, line: LogLine) -> None:
    """Log one line of a container with its replica before it. What the follower itself has to say is a warning."""
    say = log.warning if line.note else log.info
    say(
        format_line(line.text, kind, line.role, line.index, line.container),
        role=line.role,
        index=line.index,
        pod=line.pod,
    )


def _clock(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%H:%M:%S")


def _phase_of_pod(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase"))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
