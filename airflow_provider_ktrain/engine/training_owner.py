"""The owner of a training's life: it submits or adopts the job, follows it, and ends it.

Worker, trigger and terminal run the same owner. What differs between them is a `Host`. Every end is decided by the
rules of `core/end_rules.py`, on a read of the job and its pods that is made for this decision.

Before a job that has not ended is released, its cause is stored where the next process of the same try finds it. A job
that has ended is its own store: its running pods are deleted, and the job when Airflow has stored the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.end_rules import LIMITS, Action, Event, Rule, deletes
from airflow_provider_ktrain.core.errors import ClusterError, KtrainError, NoRightError
from airflow_provider_ktrain.core.identity.adoption import may_have_begun
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.logs.repetition import Repetition
from airflow_provider_ktrain.core.state.pods.objects import has_ended
from airflow_provider_ktrain.core.state.status import Seen
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import ConflictPauses, JobChanged, JobRead, Log
from airflow_provider_ktrain.engine.conclusion_store import ConclusionStore
from airflow_provider_ktrain.engine.decisions import Decisions
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover
from airflow_provider_ktrain.engine.follow.following import Following, Noticed
from airflow_provider_ktrain.engine.follow.following_end import FollowingEnd
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome, cause_of
from airflow_provider_ktrain.engine.follow.repeated_lines import repeat_lines
from airflow_provider_ktrain.engine.follow.stacks import StackReader
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.follow.status_reporter import last_status, take_unfollowed
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.job_annotations import JobAnnotations
from airflow_provider_ktrain.engine.owned_job import OwnedJob, Result, Submission
from airflow_provider_ktrain.engine.process_end import ProcessEnd
from airflow_provider_ktrain.engine.submit.create_or_adopt import CodeRefusedError, Submitted
from airflow_provider_ktrain.engine.unfailing_log import UnfailingLog
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal

T = TypeVar("T")
RETRY_SECONDS = 5.0  #: Pause between two attempts to follow a job.
#: How long following must have worked before an error starts the patience again. Following itself retries a rejected
#: watch for 600 s.
PATIENCE_RESET_SECONDS = 1200.0
SNOOZE_SECONDS = 1.0  #: How long to wait before looking again at a rule that the last read did not confirm.
#: How long to wait before looking again at a job that is being deleted and still followed.
DELETION_SNOOZE_SECONDS = 60.0
#: How long to retry the read of a job that is needed because its deferral or release has failed.
UNREAD_PATIENCE_SECONDS = 900.0
UNREAD_SNOOZE_SECONDS = 5.0  #: Pause before job and pods are read again after a read has failed.
MARK_SECONDS = 60.0  #: Time to record on a job that its success is incomplete, before its pods are released.
MARK_AGAIN_SECONDS = 600.0  #: Time to try that again after the release, at most until the deadline.


class Stopped(KtrainError):
    """The process was asked to stop before the job was followed. The text is the reason."""


class Training:
    """The life of one training in one process.

    :param stop: how the process is asked to stop. Default: None, this isn't asked while it follows.
    """

    def __init__(
        self,
        connect: Callable[[], contextlib.AbstractAsyncContextManager[Api]],
        host: Host,
        log: Log,
        stop: StopSignal | None = None,
    ) -> None:
        log = UnfailingLog(log)
        self.job = OwnedJob(connect, host, log)
        self.handover = Handover()
        self._host, self._log, self._stop = host, log, stop
        self._annotations = JobAnnotations(self.job, log)
        self._process_end = ProcessEnd(self.job, host, self._positions, log)
        self.cursor: Cursor | None = None  #: Positions in the logs, updated in place.
        self._end: FollowingEnd | None = None  # of the last following that has observed the job
        self._read_of_end: JobRead | None = None  # by which the end of the job was taken
        self._store = ConclusionStore(host.status_sink, log)
        self._decisions = Decisions(self.job, self._store, log)

    def _positions(self) -> Cursor:
        if self.cursor is None:
            self.cursor = Cursor.from_dict(self.handover.cursor)
        return self.cursor

    async def close(self) -> None:
        """Close the client."""
        await self.job.close()

    # submit

    async def submit(self, submission: Submission) -> Submitted:
        """Create or adopt the job, as `call` does something."""
        if self.job.submission is not submission:
            self.job.expect(submission)
        return await self.call(lambda api: self._submit(api, submission))

    async def call(self, ask: Callable[[Api], Awaitable[T]]) -> T:
        """Do something with the client.

        :raises Stopped: the process was asked to stop; what happens to the job is decided and done.
        """

        async def work() -> T:
            return await ask(await self.job.api())

        try:
            return await self._unless_stopped(work())
        except _StopRequested:
            raise Stopped(str(cause_of(await self.stop()))) from None

    async def _submit(self, api: Api, submission: Submission) -> Submitted:
        job = self.job
        try:
            submitted = await submission.carry_out(api, self._log, posting=job.posting)
        except CodeRefusedError as refused:
            job.take(api, refused.submitted)
            return await self._without_code(refused)
        job.take(api, submitted)
        return submitted

    async def _without_code(self, refused: CodeRefusedError) -> Submitted:
        """Release a job that can't get its code, unless a container has started."""
        released, error = await self.job.release_by_rule(
            Event.CODE_REFUSED, holds=lambda read: read.job is ABSENT or not may_have_begun(read.job, read.pods)
        )
        if released is None and not error:
            self._log.warning(
                f"The code of {refused.submitted.ref} is missing and can't be sent.\n"
                f"Pods that start from now on wait for it.\n{refused.reason}"
            )
            return refused.submitted
        if released is not None:
            self.job.let_go()
        raise type(refused.reason)(f"{refused.reason}\n{error or (released.text if released else '')}")

    # follow

    async def follow(
        self,
        ref: JobRef,
        options: Options,
        *,
        until: float | None = None,
        patience: float = 0.0,
        first: Noticed | None = None,
    ) -> Outcome | Handover:
        """Follow the job to its end and end its life; or hand it over.

        An error proves nothing about the training: following is tried again for the time of `patience`.

        :param until: when to hand it over, by `timing.now`. Default: None, never.
        :param patience: seconds from the first error for which following is retried. Default: 0.
        :param first: what led here, if it may end the training. Default: None.
        :raises AccessError, UnreachableError, ClusterError: the job can't be followed.
        """
        job = self.job
        job.ref, job.options, job.is_followed = ref, options, True
        noticed, began, give_up = first, timing.now(), None
        while True:
            try:
                step = await self._unless_stopped(self._follow(until, noticed))
                if not isinstance(step, _Next):
                    return step
                noticed = None  # it was decided on
                continue
            except _StopRequested:
                return await self.stop()
            except Exception as e:
                if self._stop is not None and self._stop.reason is not None:
                    return await self.stop()
                if give_up is None or timing.now() - began > PATIENCE_RESET_SECONDS:
                    give_up = timing.now() + patience
                never = job.is_fresh and isinstance(e, NoRightError)
                if never or timing.now() + RETRY_SECONDS > give_up:
                    raise
                self._log.warning(f"{ref} can't be followed. Retrying in {RETRY_SECONDS:.0f} s.\n{e}")
            if self._stop is None:
                await asyncio.sleep(RETRY_SECONDS)
            elif await self._stop.wait(RETRY_SECONDS):
                return await self.stop()
            noticed, began = first, timing.now()

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Do something, and cancel it when the process is asked to stop, unless it is changing the job."""
        if self._stop is None:
            return await work
        working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
            is_let_go = self.job.is_followed and not self.job.is_mine  # only the streams are still being closed
            if working.done() or self.job.is_changing or is_let_go:
                return await working
            working.cancel()
            await asyncio.wait([working])
            raise _StopRequested
        finally:
            working.cancel()
            stopped.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    async def _follow(self, until: float | None, first: Noticed | None) -> Outcome | Handover | _Next:
        """Follow the job from the handover on, until it is over or the reading of its logs begins again."""
        async with self._following() as following:
            noticed, give_up = first, timing.now() + UNREAD_PATIENCE_SECONDS
            while True:
                if noticed is None:
                    noticed = await following.next(until)
                rule, read = await self._decisions.rule_for(following, noticed)
                step = await self._carry_out(rule, read, following, noticed)
                if not isinstance(step, _Next) or step is _Next.START_OVER:
                    return step
                if step is _Next.FOLLOW_ON or noticed is not first:
                    noticed = None
                elif timing.now() > give_up:
                    ref = self.job.known_ref
                    # The API server answered no read of the job for as long as an end of this process may wait.
                    raise ClusterError(f"{ref} can't be read. To delete it, run: {ref.delete_command}")
                else:
                    await asyncio.sleep(SNOOZE_SECONDS)

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[Following]:
        """The following of the job, from the handover on."""
        job = self.job
        state = JobState(job.known_ref, self.handover)
        state.job = job.last_seen  # one that had ended was not "deleted by somebody else"
        # a job that this process has just created is not followed through an outage of rights
        fail_fast = job.is_created or not job.options.release
        api = await job.api()
        context = FollowContext(api, state, self._log, job.options, self._host, fail_fast, self._positions())
        sink = self._host.status_sink  # when it is left, it publishes nothing more: no status replaces a later one
        left = sink if isinstance(sink, contextlib.AbstractAsyncContextManager) else contextlib.nullcontext()
        async with left, Following(context) as following:
            try:
                yield following
            except Exception:
                self.handover = await following.end.hand_over()
                raise
            finally:
                if following.state.phase is not None:
                    self._end = following.end
                job.last_seen, job.workload = following.state.job or job.last_seen, following.workload
                if job.ref is not None:  # the job was not let go of
                    job.ref = replace(following.state.ref, version=job.ref.version)

    async def _carry_out(
        self, rule: Rule, read: JobRead | None, following: Following, noticed: Noticed
    ) -> Outcome | Handover | _Next:
        match rule.action:
            case Action.FOLLOW | Action.LOOK_AGAIN:
                seconds = UNREAD_SNOOZE_SECONDS if read is None else SNOOZE_SECONDS
                if rule.action is Action.FOLLOW and noticed.event is Event.BEING_DELETED:
                    seconds = DELETION_SNOOZE_SECONDS
                following.snooze(noticed, seconds)
                return _Next.LOOK_AGAIN if rule.action is Action.LOOK_AGAIN else _Next.FOLLOW_ON
            case Action.ANNOTATE:
                if not await self._annotations.record_stopped_pod(following):
                    following.snooze(noticed, UNREAD_SNOOZE_SECONDS)
                return _Next.FOLLOW_ON
            case Action.HAND_OVER:
                return await following.end.hand_over()
            case Action.LET_GO:
                self._log.warning(self.job.text(rule, noticed.event))
                self.job.let_go()
                return replace(await following.end.outcome(None, full=False), succeeded=False, superseded=True)
            case Action.REPORT:
                return await self._report(following, noticed)
            case Action.TAKE_END | Action.TAKE_END_INCOMPLETE | Action.TAKE_END_SUSPENDED if read is not None:
                return await self._take_end(following, rule, read)
            case Action.TAKE_STORED_CAUSE if read is not None:
                return await self._take_stored_cause(following, noticed, rule, read)
            case Action.LEAVE:
                raise KtrainError(self.job.text(rule, noticed.event))
        return await self._release_running(following, noticed)

    async def stop(self) -> Outcome:
        """The process was asked to stop: decide what happens to the job, and do it.

        :return: has the last status of a training whose task was killed. A process with time has one only of a job that
            was released. One that has seconds makes no request for it.
        """
        ref = self.job.ref
        text, error = await self._process_end.stop()
        reason = (self._stop.reason if self._stop is not None else None) or "the process was asked to stop"
        summary, _, detail = (text or reason).partition("\n")
        cause, status = Cause(Category.KILLED, summary, detail), dict[str, Any]()
        if (killed := self._process_end.killed) and ref is not None:
            has_time = self._host.seconds is None
            status = await self._last_status(ref, Cause(Category.KILLED, killed, text) if has_time else cause)
            status = status and {**status, "ended": not self.job.is_left, "job_deleted": self.job.is_deleted}
            if status.get("usage") and not has_time:  # the pods go on until they have ended
                status["usage"] = {**status["usage"], "at_least": True}
        return Outcome(
            "Pending", False, cause=cause.as_dict(), release_error=error, metrics=self.handover.metrics, status=status,
            usage={} if self.job.is_left else status.get("usage", {}),  # a try that adopts the job counts all of it
        )  # fmt: skip

    async def _last_status(self, ref: JobRef, cause: Cause) -> dict[str, Any]:
        """The last status of a training whose task was killed, and whose job was released."""
        if self._end is not None:
            return await self._end.last_status(cause)

        def take() -> Callable[[], dict[str, Any]]:
            state = JobState(ref, self.handover)
            state.job = self.job.last_seen
            state.pods.update(self.job.pods_read, (), timing.utc_now())
            return take_unfollowed(state, self._host.status_sink, cause)

        return await last_status(take, self._log)

    async def interrupted(self, event: Event) -> None:
        """An error ends the try: decide what happens to the job, and do it. The caller raises the error.

        :param event: ERROR, NO_RIGHT, FINAL_ERROR, DEADLINE, INTERRUPT or KILL.
        """
        await self._process_end.interrupted(event)

    # carry out

    async def _report(self, following: Following, noticed: Noticed) -> Outcome:
        """Report the state of a job that somebody else submitted."""
        end, conditions = following.end, self.job.options.conditions
        if noticed.event is Event.CONDITION:
            return await end.outcome_of_condition()
        if noticed.event in LIMITS:
            end.report_failure(cause := await following.cause_of(noticed))
            return await end.outcome(cause)
        await end.read_remainder_of_ended_job(releases=False)
        if following.state.seen is Seen.SUCCEEDED:
            outcome = await end.outcome(None, full=not conditions)
            return replace(outcome, succeeded=False) if conditions else outcome
        cause = await end.cause_of_end()
        end.report_failure(cause)
        return await end.outcome(cause)

    async def _take_end(self, following: Following, rule: Rule, read: JobRead) -> Outcome:
        """The job has ended, or is gone: read the logs, find the cause, free its pods; in this order."""
        job, end, seen = self.job, following.end, following.seen
        ref = job.known_ref
        if rule.action is Action.TAKE_END_SUSPENDED:
            await job.keep_from_restarting(read)
        if seen is Seen.INCOMPLETE:  # what shows this may be gone for the next process, and the log may have a result
            annotated, _ = await job.annotate(read.job, following.state.stopped_pods_annotation, MARK_SECONDS)
            read = replace(read, job=annotated)
        await end.read_remainder_of_ended_job(releases=True)
        seen, unmarked = following.seen, ""
        if seen in (Seen.SUCCEEDED, Seen.INCOMPLETE):
            read, unmarked = await self._annotations.mark(following, read, MARK_SECONDS)
        cause = None if seen is Seen.SUCCEEDED else await end.cause_of_end()
        if cause is not None:
            end.report_failure(cause)
        said_already = False
        try:
            result = await job.write(rule, read)
        except JobChanged:
            result, said_already = await job.release_by_rule(Event.END_CHANGED), True
        if unmarked and seen is Seen.INCOMPLETE:  # Airflow stores a success before a retry could look at the job
            left = MARK_AGAIN_SECONDS if job.options.deadline is None else job.options.deadline - timing.epoch()
            read, unmarked = await self._annotations.mark(following, read, min(MARK_AGAIN_SECONDS, left))
            if unmarked:
                self._log.warning(f"{ref} could not be marked. A retry may take it for a success.\n{unmarked}")
        await end.read_remainder_after_release(deleted=result[0] is not None)
        released = result[0]
        kept = read.job is not ABSENT and deletes(job.options.on_finish_action, seen)
        said = "" if released is None or said_already else released.freed if kept else released.text
        if released is not None:  # running pods are gone: the deletion of the job must not count them again
            self._read_of_end = replace(read, pods=[pod for pod in read.pods if has_ended(pod)])
        job.let_go()  # a request to stop changes nothing any more, also while the outcome is logged
        outcome = await end.outcome(cause, released=said)
        return _with_release(outcome, result, kept=ref if kept else None, ended=ref)

    async def _take_stored_cause(
        self, following: Following, noticed: Noticed, rule: Rule, read: JobRead
    ) -> Outcome | _Next:
        """An earlier process of this try has released the job, or has begun to: complete that."""
        job = self.job
        cause = noticed.cause or self._store.found or Cause(Category.UNKNOWN, job.text(rule, noticed.event))
        try:
            result = await job.write(rule, read)
        except JobChanged:
            following.snooze(noticed, SNOOZE_SECONDS)
            return _Next.LOOK_AGAIN
        following.end.report_failure(cause)
        outcome = await following.end.outcome(cause, released=_text(result))
        job.let_go()
        return _with_release(outcome, result)

    async def _release_running(self, following: Following, noticed: Noticed) -> Outcome | Handover | _Next:
        """A rule ends a job that has not ended: find the cause, read again, store the cause, release the job."""
        job, end = self.job, following.end
        cause = await following.cause_of(noticed)  # the logs are read, which takes seconds
        rule, read = await self._decisions.rule_for(following, noticed)
        stored, pauses = False, ConflictPauses()
        async with following.stack_reader(noticed, read) as stacks:
            while rule.action in (Action.RELEASE, Action.RELEASE_NOW) and read is not None:
                if not stored:
                    cause = following.with_ended_primary(cause)
                    waits = rule.action is Action.RELEASE and stacks.are_expected
                    if not waits:
                        end.report_failure(cause)
                    if noticed.event is not Event.RELEASE_FAILED:  # the process whose release failed has stored it
                        await self._store.put(job.known_ref, noticed, cause)
                    stored = True
                try:
                    if waits:
                        cause, result = await self._write_and_explain(rule, read, end, stacks, noticed, cause)
                    else:
                        result = await job.write(rule, read, verify=rule.action is Action.RELEASE)
                except JobChanged:
                    await pauses.wait()
                    rule, read = await self._decisions.rule_for(following, noticed)
                    continue
                outcome = await end.outcome(cause, released=_text(result))
                job.let_go()
                return _with_release(outcome, result)
        # an unanswered deletion may be the reason for which the job is gone, being deleted, or can't be read
        is_kept = read is not None and read.job is not ABSENT and not following.state.is_being_released
        if stored and is_kept:
            self._store.retract()
        step = await self._carry_out(rule, read, following, noticed)
        if not isinstance(step, _Next):
            return step
        self.handover = await end.hand_over()  # the reading of logs has ended: begin again where it stopped
        return _Next.START_OVER

    async def _write_and_explain(
        self, rule: Rule, read: JobRead, end: FollowingEnd, stacks: StackReader, noticed: Noticed, cause: Cause
    ) -> tuple[Cause, Result]:
        """Release a running job. The cause is logged when the stacks that its pods print are read, or are late.

        :raises JobChanged: the job has changed since it was read. The cause is logged if all streams had ended before.
        """
        logged = False

        async def report() -> Cause:
            nonlocal logged
            explained, lines = cause, list[str]()
            try:
                explained, lines = await stacks.explain(cause)
            except Exception as e:
                self._log.warning(f"The stacks of the pods can't be explained.\n{e!r}")
            end.report_failure(explained, lines)
            logged = True
            if explained is not cause:  # for the training page, and the next process, while the pods still end
                await self._store.put(self.job.known_ref, noticed, explained)
            return explained

        await stacks.open()
        reporting = asyncio.create_task(report())
        try:
            result = await self.job.write(rule, read)
            try:
                return await reporting, result
            except asyncio.CancelledError:
                if not logged:
                    end.report_failure(cause)
                raise
        finally:
            reporting.cancel()

    # after the end

    async def repeat_lines(self, deferral: Deferral, repetition: Repetition, seconds: float) -> None:
        """Log the lines of the trigger again. A request to stop ends this; it changes nothing.

        :param seconds: after which it ends.
        :raises TimeoutError: the job could not be read in that time.
        """

        async def repeat() -> None:
            async with asyncio.timeout(seconds):
                read = await self.job.read()
            await repeat_lines(
                await self.job.api(), self._log, read, deferral, repetition, seconds - timing.now() + began
            )

        began, self.job.ref = timing.now(), deferral.job
        try:
            await self._unless_stopped(repeat())
        except _StopRequested:
            pass
        finally:
            self.job.let_go()

    async def outcome_stored(self, ref: JobRef, event: Event) -> str:
        """Delete a job that has ended, or free its pods if its status is the only proof; returns why that failed.

        :param ref: the job.
        :param event: OUTCOME_STORED, OUTCOME_NOT_STORED, SUCCESS_FOUND or KEPT_UNRELEASED.
        """
        job = self.job
        job.ref, job.options = ref, Options()
        read, self._read_of_end = self._read_of_end, None
        try:
            if read is not None and read.job is not ABSENT and read.job["metadata"]["uid"] == ref.uid:
                with contextlib.suppress(JobChanged):
                    return (await job.write(job.rule(event, read), read))[1]
            return (await job.release_by_rule(event))[1]
        finally:
            job.let_go()


class _StopRequested(Exception):
    """The process was asked to stop."""


class _Next(enum.Enum):
    """What follows a decision that has not ended this process' part in the training."""

    FOLLOW_ON = enum.auto()
    LOOK_AGAIN = enum.auto()  #: Nothing was decided: the job is looked at again.
    START_OVER = enum.auto()  #: Following begins again at the handover, because the logs are not read any more.


def _text(result: Result) -> str:
    return "" if result[0] is None else result[0].text


def _with_release(
    outcome: Outcome, result: Result, *, kept: JobRef | None = None, ended: JobRef | None = None
) -> Outcome:
    """The outcome with what was released.

    :param kept: an ended job that is deleted when Airflow has stored the outcome. Default: none.
    :param ended: a job that has ended. Default: none.
    """
    released, error = result
    return replace(
        outcome,
        released=_text(result) if kept is None or released is None else f"{kept} has ended. {released.freed}".rstrip(),
        release_error=error,
        kept=None if kept is None else kept.to_dict(),
        unreleased=ended.to_dict() if error and ended is not None and kept is None else None,
        metrics={**outcome.metrics, **({} if released is None else {"seconds.release": released.seconds})},
    )
