"""The owner of a training's life: it submits or adopts the job, follows it, and ends it.

Worker, trigger and terminal run the same owner. What differs between them is a `Host`. Every end is decided by the
rules of `core/ending.py`, on a read of the job and its pods that is made for this decision, and this module is the only
caller of `release` for a task's job.

Before a job that has not ended is released, its cause is stored where the next process of the same try finds it. A job
that has ended is its own store: its running pods are deleted, and the job when Airflow has stored the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from airflow_provider_ktrain.core.adoption import may_have_begun
from airflow_provider_ktrain.core.diagnosis.exit_code import EndedPrimary
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.ending import (
    ALIVE,
    LIMITS,
    Action,
    Event,
    Ownership,
    Rule,
    Seen,
    Situation,
    Successor,
    Task,
    decide,
    deletes,
    task_of,
)
from airflow_provider_ktrain.core.errors import KtrainError, NoRightError
from airflow_provider_ktrain.core.identity import JobRef, Owner
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.reporting.conclusion import Conclusion
from airflow_provider_ktrain.core.state.status import seen_in
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.following import Following, Noticed
from airflow_provider_ktrain.engine.follow.last_lines import last_lines
from airflow_provider_ktrain.engine.follow.messages import (
    FollowPolicy,
    Handover,
    Options,
    Outcome,
    StopSignal,
    cause_of,
)
from airflow_provider_ktrain.engine.job_requests import JobRead, Log, read_job, read_training
from airflow_provider_ktrain.engine.release import (
    JobChanged,
    Mode,
    Released,
    ReleaseError,
    release,
    release_now,
    release_others,
)
from airflow_provider_ktrain.engine.submit import CodeRefusedError, EndJob, Posting, Submitted

Object = dict[str, Any]
T = TypeVar("T")
RETRY_SECONDS = 5.0  #: between two attempts to follow a job
#: of following after which an error starts the patience again; following itself retries a rejected watch for 600 s
PATIENCE_RESET_SECONDS = 1200.0
FRESH_SECONDS = 120.0  #: after its creation in which a job has made no progress worth keeping
REST_SECONDS = 1.0  #: until a rule that a read didn't confirm is looked at again
UNREAD_REST_SECONDS = 5.0  #: until job and pods are read again after a read has failed
STATUS_LAG_SECONDS = 20.0  #: in which the job's status may not show yet that its primary container has ended
LAST_READ_SECONDS = 5.0  #: for the read of a process that ends
SUSPEND_SECONDS = 10.0  #: to suspend a failed job that would train again
LATE_SECONDS = 30.0  #: beyond its time in which a process that is still alive goes on to try
STATE_SECONDS = 1.5  #: for one answer about the task's state, in a process that has seconds
STATE_INTERVAL = 5.0  #: between two questions about the task's state
RELEASE_SECONDS = 300.0  #: after a kill, to retry an unreachable API server and to wait for the pods
#: how a kill is named, by the task's state
KILLED_BY = {"none": "cleared", "restarting": "cleared", "absent": "its run was deleted"}
MODES = {
    Action.FREE_PODS: Mode.DELETE_PODS,
    Action.CONCLUDE: Mode.DELETE_PODS,
    Action.DELETE_ENDED: Mode.DELETE,
    Action.CONCLUDE_STORED: Mode.DELETE,
}


class Stopped(KtrainError):
    """The process was asked to stop before the job was followed. The text is the reason."""


class Submission(Protocol):
    """What is submitted."""

    async def carry_out(self, api: Api, log: Log, *, posting: Posting, end_job: EndJob) -> Submitted:
        """Create or adopt the job."""
        ...

    async def find(self, api: Api) -> Submitted | None:
        """The job that this try or an earlier one has created, if `carry_out` was interrupted."""
        ...


@dataclass(frozen=True)
class Host:
    """The process in which an owner works.

    :param seconds: that the process may still take when it was asked to stop, or when the deadline has passed. Default:
        None, as long as it needs.
    :param ask_state: returns the task's state in Airflow, in at most the given seconds; empty if there is no answer.
        Default: None, there is no task: being asked to stop is the user's own word.
    :param successor: who continues with the job when this process stops while its task goes on. Default: nobody.
    :param patience: seconds for which the task's state is asked for again while it decides nothing. Default: 0.
    :param policy: how it follows, and where statuses and conclusions go. Default: as a worker without a task.
    """

    seconds: float | None = None
    ask_state: Callable[[float], Awaitable[str]] | None = None
    successor: Successor = Successor.NOBODY
    patience: float = 0.0
    policy: FollowPolicy = field(default_factory=FollowPolicy)


class Training:
    """The life of one training in one process.

    :param connect: opens the client for the cluster; with a reference it checks that the job is there.
    :param host: the process.
    :param log: the task's logger.
    :param stop: how the process is asked to stop. Default: None, this isn't asked while it follows.
    """

    def __init__(
        self,
        connect: Callable[[JobRef | None], contextlib.AbstractAsyncContextManager[Api]],
        host: Host,
        log: Log,
        stop: StopSignal | None = None,
    ) -> None:
        self.ref: JobRef | None = None  #: the job, once it is known
        self.options = Options()
        self.handover = Handover()
        self.cursor: Cursor | None = None  #: positions in the logs, updated in place
        self._connect, self._host, self._log, self._stop = connect, host, log, stop
        self._stack = contextlib.AsyncExitStack()
        self._opened: Api | None = None
        self._submission: Submission | None = None  # set while a job may exist whose identity is unknown
        self._posting = Posting()
        self._job: Object | None = None  # as last seen
        self._ended: JobRead | None = None  # the read by which an ended job was concluded
        self._created_at: float | None = None  # time.monotonic() at which this process created the job
        self._followed = False  # whether this process has followed the job
        self._changing = False  # whether a write has begun: from then on nothing may cut it off
        #: time.monotonic() at which this end of the primary was first seen by a read for the event
        self._near_end: dict[tuple[Event, EndedPrimary | None], float] = {}
        self._unread_said = False

    @property
    def is_fresh(self) -> bool:
        """Whether this process created the job so recently that its deletion loses no progress."""
        return self._created_at is not None and time.monotonic() - self._created_at < FRESH_SECONDS

    @property
    def owns_job(self) -> bool:
        """Whether a job exists, or may exist, for which this process is responsible."""
        return self.ref is not None or self._submission is not None

    # the client

    async def api(self) -> Api:
        """The client, which stays open until `close`."""
        if self._opened is None:
            self._opened = await self._stack.enter_async_context(self._connect(self.ref))
        return self._opened

    async def close(self) -> None:
        """Close the client."""
        self._opened = None
        await self._stack.aclose()

    # submit

    def expect(self, submission: Submission) -> None:
        """From now on, a job of this task may exist, which an earlier try has created."""
        self._submission, self._posting = submission, Posting()

    async def submit(self, submission: Submission) -> Submitted:
        """Create or adopt the job.

        :raises Stopped: the process was asked to stop; what happens to the job is decided and done.
        """
        self.expect(submission)
        try:
            return await self._unless_stopped(self._submit(submission))
        except _StopRequested:
            stopped = await self.stop()
            raise Stopped(str(cause_of(stopped))) from None

    async def _submit(self, submission: Submission) -> Submitted:
        api = await self.api()
        try:
            submitted = await submission.carry_out(
                api, self._log, posting=self._posting, end_job=functools.partial(self._end_existing, api)
            )
        except CodeRefusedError as e:
            submitted = await self._without_code(api, e)
        self._take(api, submitted)
        return submitted

    def _take(self, api: Api, submitted: Submitted) -> None:
        """From now on, this process is responsible for the job."""
        self.ref, self._job, self._submission = submitted.ref, submitted.job, None
        self._created_at = time.monotonic() if submitted.created else None
        self._stack.callback(api.add_known_object(api_paths.job(submitted.ref), submitted.ref.uid))

    async def _without_code(self, api: Api, refused: CodeRefusedError) -> Submitted:
        """Release a job that can't get its code, unless a container has started."""
        submitted = refused.submitted
        self._take(api, submitted)

        def mode(read: JobRead) -> Mode | None:
            begun = read.job is not None and may_have_begun(read.job, read.pods)
            rule = decide(self._situation(Event.CODE_REFUSED, read, holds=not begun))
            return self._mode(rule, read)

        try:
            released = await release_others(api, submitted.ref, mode)
        except ReleaseError as e:
            raise type(refused.reason)(f"{refused.reason}\n{e}") from None
        if released is not None:
            self.ref = None
            raise type(refused.reason)(f"{refused.reason}\n{released.text}")
        self._log.warning(
            f"The code of {submitted.ref} is missing and can't be sent.\nPods that start from now on wait for it.\n"
            f"{refused.reason}"
        )
        return submitted

    async def _end_existing(self, api: Api, ref: JobRef, read: JobRead) -> None:
        """Release a job of an earlier try, which `core.adoption.decide` replaces.

        :raises JobChanged: the job has changed since it was read.
        """
        self._log.info((await release(api, ref, Mode.DELETE, read)).text)

    async def _find_submitted(self, end: float) -> None:
        """Find the job of a submission that was interrupted: its create request may still be on its way.

        :param end: value of `time.monotonic` from which nothing is waited for.
        """
        submission = self._submission
        if submission is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(end - time.monotonic(), 0.1)):
                await self._posting.wait()
                api = await self.api()
                while True:
                    with contextlib.suppress(ApiStatusError, ApiUnavailable, KtrainError):
                        found = await submission.find(api)
                        if found is not None:
                            self._take(api, found)
                            return
                        if self._posting.is_over:
                            self._submission = None
                            return
                    await asyncio.sleep(0.2)

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

        :param ref: the job.
        :param options: how the task wants it to be followed.
        :param until: when to hand it over, by `time.monotonic`. Default: None, never.
        :param patience: seconds from the first error for which following is retried. Default: 0.
        :param first: what led here, if it may end the training. Default: None.
        :raises AccessError, UnreachableError, ClusterError: the job can't be followed.
        """
        self.ref, self.options, self._followed = ref, options, True
        give_up: float | None = None
        while True:
            began = time.monotonic()
            try:
                return await self._unless_stopped(self._follow_once(until, first))
            except _StopRequested:
                return await self.stop()
            except Exception as e:
                if give_up is None or time.monotonic() - began > PATIENCE_RESET_SECONDS:
                    give_up = time.monotonic() + patience
                never = self.is_fresh and isinstance(e, NoRightError)
                if self._stop is not None and self._stop.reason is not None:
                    return await self.stop()
                if never or time.monotonic() + RETRY_SECONDS > give_up:
                    raise
                self._log.warning(f"{ref} can't be followed. Retrying in {RETRY_SECONDS:.0f} s.\n{e}")
            if await self._pause(RETRY_SECONDS):
                return await self.stop()

    async def _pause(self, seconds: float) -> bool:
        """Wait; returns whether the process was asked to stop meanwhile."""
        if self._stop is not None:
            return await self._stop.wait(seconds)
        await asyncio.sleep(seconds)
        return False

    async def _unless_stopped(self, work: Awaitable[T]) -> T:
        """Do something, and cancel it when the process is asked to stop, unless it is changing the job."""
        if self._stop is None:
            return await work
        working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
            if working.done() or self._changing:
                return await working
            working.cancel()
            await asyncio.wait([working])
            raise _StopRequested
        finally:
            working.cancel()
            stopped.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    async def _follow_once(self, until: float | None, first: Noticed | None) -> Outcome | Handover:
        api = await self.api()
        assert self.ref is not None
        while True:
            if self.cursor is None:
                self.cursor = Cursor.from_dict(self.handover.cursor)
            following = Following(
                api, self.ref, self.options, log=self._log, handover=self.handover, policy=self._policy,
                cursor=self.cursor,
            )  # fmt: skip
            following.state.job = self._job  # a job that has been seen ended is not "deleted by somebody else"
            async with following:
                try:
                    ended = await self._follow_to_the_end(following, until, first)
                except Exception:
                    self.handover = await following.closing.hand_over()
                    raise
                finally:
                    self._job = following.state.job
                    self.ref = self.ref and following.state.ref  # unless the job was let go of
            if not isinstance(ended, _StartOver):
                return ended
            first = None

    @property
    def _policy(self) -> FollowPolicy:
        """How this process follows; a job that it has just created is not followed through an outage of rights."""
        policy = self._host.policy
        fail_fast = self._created_at is not None or not self.options.release
        sink = policy.status_sink if self.options.release else None
        return replace(policy, fail_fast_on_forbidden=fail_fast, status_sink=sink)

    async def _follow_to_the_end(
        self, following: Following, until: float | None, first: Noticed | None
    ) -> Outcome | Handover | _StartOver:
        noticed = first
        while True:
            if noticed is None:
                noticed = await following.next(until)
            ended = await self._settle(following, noticed)
            if ended is not None:
                return ended
            if noticed is first and self._unread_said:  # it was not read yet
                await asyncio.sleep(UNREAD_REST_SECONDS)
                continue
            noticed = None

    async def _settle(self, following: Following, noticed: Noticed) -> Outcome | Handover | _StartOver | None:
        """Decide on what was noticed, and carry it out. None: the job is followed on."""
        rule, read = await self._decide(following, noticed)
        match rule.action:
            case Action.FOLLOW | Action.LOOK_AGAIN:
                following.rest(noticed, UNREAD_REST_SECONDS if read is None else REST_SECONDS)
                return None
            case Action.HAND_OVER:
                return await following.closing.hand_over()
            case Action.LET_GO:
                self._log.warning(self._text(rule))
                self._let_go()
                return replace(await following.closing.outcome(None, full=False), succeeded=False, superseded=True)
            case Action.REPORT:
                return await self._report(following, noticed)
            case Action.CONCLUDE:
                return await self._conclude(following, read or JobRead(None, []))
            case Action.CONCLUDE_STORED:
                return await self._conclude_stored(following, read or JobRead(None, []))
            case Action.KEEP:
                raise KtrainError(self._text(rule))
        return await self._release_running(following, noticed)

    # decide

    async def _decide(self, following: Following, noticed: Noticed) -> tuple[Rule, JobRead | None]:
        """The rule that applies, and the read by which it was found; None if nothing was read."""
        event = noticed.event
        if not self.options.release or event is Event.HAND_OVER:
            return decide(self._situation(event, None)), None
        assert self.ref is not None
        try:
            read = await read_training(await self.api(), self.ref)
            seen = await following.observe(read)
            holds = await following.still_holds(noticed) if event in LIMITS and seen in ALIVE else True
        except (ApiStatusError, ApiUnavailable) as e:
            self._say_unread(noticed, e)
            return decide(self._situation(event, None)), None
        self._unread_said = False
        if holds is None:
            return decide(self._situation(event, None)), None
        stored = seen is Seen.GONE or event is Event.BEING_DELETED
        situation = self._situation(event, read, seen=seen, holds=holds)
        if stored and situation.owner is Ownership.MINE:
            situation = replace(situation, cause_stored=await self._stored_conclusion() is not None)
        if seen is Seen.PRIMARY_ENDED:
            since = self._near_end.setdefault((event, following.state.ended_primary), time.monotonic())
            situation = replace(situation, may_wait=time.monotonic() - since < STATUS_LAG_SECONDS)
        return decide(situation), read

    def _situation(
        self, event: Event, read: JobRead | None, *, seen: Seen | None = None, holds: bool = True
    ) -> Situation:
        """What is known, for the rules.

        :param read: job and pods as they were read for this decision; None if they were not read.
        :param seen: what the read shows, if the following has observed it. Default: None, the read alone.
        """
        if seen is None:
            seen = Seen.NOTHING if read is None else seen_in(read.job, read.pods)
        return Situation(
            event,
            seen,
            owner=self._owner_in(read),
            successor=self._host.successor,
            holds=holds,
            hurried=self._host.seconds is not None and event in (Event.KILL, Event.INTERRUPT, Event.DEADLINE),
            fresh=self.is_fresh and (event is Event.NO_RIGHT or not self._followed),
        )

    def _owner_in(self, read: JobRead | None) -> Ownership:
        if not self.options.release or self.ref is None or not self.ref.owner:
            return Ownership.FOREIGN
        if read is None or read.job is None:
            return Ownership.MINE
        owner = Owner.of(read.job)
        return Ownership.MINE if owner is not None and owner.ti_id == self.ref.owner else Ownership.ANOTHER_TRY

    def _say_unread(self, noticed: Noticed, error: Exception) -> None:
        """Log once per outage that nothing is decided."""
        if not self._unread_said:
            what = noticed.limit or noticed.event
            self._log.warning(f"{self.ref} is kept, because it can't be read now ({what}). Reading it again.\n{error}")
        self._unread_said = True

    def _mode(self, rule: Rule, read: JobRead) -> Mode | None:
        """How the rule releases the job; None if it doesn't."""
        if rule.action in (Action.RELEASE, Action.RELEASE_NOW):
            seen = seen_in(read.job, read.pods)
            return Mode.DELETE if deletes(self.options.on_finish_action, seen) else Mode.SUSPEND
        return MODES.get(rule.action)

    def _text(self, rule: Rule, state: str = "") -> str:
        """The sentence of a rule about this job.

        :param state: of the task in Airflow, if it was asked. Default: "".
        """
        ref = self.ref
        job = "The task's job, if it exists," if ref is None else str(ref)
        command = "" if ref is None else ref.delete_command
        return rule.text.format(job=job, command=command, state=KILLED_BY.get(state, state))

    def _let_go(self) -> None:
        """From now on, this process is not responsible for the job."""
        self.ref = self._submission = None

    # carry out, while the job is followed

    async def _report(self, following: Following, noticed: Noticed) -> Outcome:
        """Report the state of a job that somebody else submitted."""
        closing, seen = following.closing, following.state.seen
        if noticed.event is Event.CONDITION:
            return await closing.outcome_of_condition(self.options.conditions)
        await closing.read_rest_of_ended_job(releases=False)
        if seen is Seen.SUCCEEDED:
            waits_for_others = bool(self.options.conditions)
            outcome = await closing.outcome(None, full=not waits_for_others)
            return replace(outcome, succeeded=False) if waits_for_others else outcome
        cause = await closing.cause_of_end()
        closing.report_failure(cause)
        return await closing.outcome(cause)

    async def _conclude(self, following: Following, read: JobRead) -> Outcome:
        """The job has ended, or is gone: read the logs, find the cause, free its pods; in this order."""
        assert self.ref is not None
        closing, seen, ref = following.closing, following.state.seen, self.ref
        if seen is Seen.FAILED and following.state.kind.restarts_failed_jobs:
            await self._keep_from_restarting(read)
        await closing.read_rest_of_ended_job(releases=True)
        cause = None if seen is Seen.SUCCEEDED else await closing.cause_of_end()
        if cause is not None:
            closing.report_failure(cause)
        released, error = await self._release(Event.ENDED, Mode.DELETE_PODS, read)
        await closing.read_rest_after_release(deleted=released is not None)
        outcome = await closing.outcome(cause)
        self._ended = read if released is not None and read.job is not None else None
        self._let_go()
        kept = read.job is not None and deletes(self.options.on_finish_action, seen)
        return _with_release(outcome, released, error, kept=ref if kept else None)

    async def _keep_from_restarting(self, read: JobRead) -> None:
        """Suspend a failed job before its logs are read, which may take minutes. Its finished pods stay."""
        assert self.ref is not None
        try:
            await release(await self.api(), self.ref, Mode.SUSPEND, read, verify=False, timeout=SUSPEND_SECONDS)
        except (ReleaseError, JobChanged) as e:  # the release after the logs tries again
            self._log.warning(f"{self.ref} has failed, but could not be suspended and may train again.\n{e}")

    async def _conclude_stored(self, following: Following, read: JobRead) -> Outcome:
        """An earlier process of this try has released the job, or has begun to: complete that."""
        stored = await self._stored_conclusion()
        assert stored is not None
        cause = cause_of(Outcome("Gone", False, cause=stored.cause()))
        following.closing.report_failure(cause)
        released, error = await self._release(Event.BEING_DELETED, Mode.DELETE, read)
        outcome = await following.closing.outcome(cause)
        self._let_go()
        return _with_release(outcome, released, error)

    async def _release_running(self, following: Following, noticed: Noticed) -> Outcome | Handover | _StartOver:
        """A rule ends a job that has not ended: find the cause, read again, store the cause, release the job."""
        closing = following.closing
        cause = await following.cause_of(noticed)  # the logs are read, which takes seconds
        rule, read = await self._decide(following, noticed)
        stored = False
        while rule.action in (Action.RELEASE, Action.RELEASE_NOW) and read is not None:
            if not stored:
                if (ended := following.state.ended_primary) is not None:
                    cause = replace(cause, detail="\n".join(filter(None, (f"{ended}.", cause.detail))))
                closing.report_failure(cause)
                await self._store(noticed, cause)
                stored = True
            self._changing = True
            try:
                mode = self._mode(rule, read) or Mode.DELETE
                verify = rule.action is Action.RELEASE
                released, error = await self._write(mode, read, timeout=self.options.release_timeout, verify=verify)
                outcome = await closing.outcome(cause)
                self._let_go()
                return _with_release(outcome, released, error)
            except JobChanged:
                rule, read = await self._decide(following, noticed)
            finally:
                self._changing = False
        if stored and self._host.policy.status_sink is not None:
            self._host.policy.status_sink.retract()
        if rule.action in (Action.CONCLUDE, Action.CONCLUDE_STORED, Action.LET_GO):
            ended_now = await self._settle(following, noticed)
            if ended_now is not None:
                return ended_now
        self.handover = await closing.hand_over()  # reading of logs has ended: begin again where it stopped
        return _StartOver()

    async def _store(self, noticed: Noticed, cause: Cause) -> None:
        """Store why the job is released, for the next process of this try. GPUs come first: the wait is short."""
        sink, ref = self._host.policy.status_sink, self.ref
        if sink is None or ref is None:
            return
        conclusion = Conclusion(
            ref.uid, ref.owner, ref.submission, event=noticed.event.name.lower(), category=str(cause.category),
            summary=cause.summary, resolution=cause.resolution, replica=cause.replica,
            limit=str(noticed.limit or ""), decided_at=time.time(), failed_nodes=cause.failed_nodes,
        )  # fmt: skip
        if not await sink.conclude(conclusion.to_dict(sink.mask)):
            self._log.warning(
                "The cause could not be stored in Airflow in time. If this process ends now, it may be lost."
            )

    async def _stored_conclusion(self) -> Conclusion | None:
        """Why an earlier process of this try has released this job; None if that isn't stored."""
        sink, ref = self._host.policy.status_sink, self.ref
        if sink is None or ref is None:
            return None
        stored = Conclusion.from_dict(await sink.concluded())
        return stored if stored is not None and stored.belongs_to(ref) else None

    # carry out

    async def _write(
        self, mode: Mode, read: JobRead, *, timeout: float, verify: bool = True
    ) -> tuple[Released | None, str]:
        """Release the job as it was read; returns the result, or why it failed.

        :raises JobChanged: the job has changed since.
        """
        assert self.ref is not None
        try:
            released = await release(await self.api(), self.ref, mode, read, timeout=timeout, verify=verify)
        except ReleaseError as e:
            self._log.warning(str(e))
            return None, str(e)
        self._log.info(released.text)
        return released, ""

    async def _release(self, event: Event, mode: Mode, read: JobRead) -> tuple[Released | None, str]:
        """Free the pods of a job that has ended or is gone; decide again if it has changed since it was read."""
        self._changing = True
        try:
            return await self._write(mode, read, timeout=self.options.release_timeout)
        except JobChanged:
            return await self._release_as_read(event)
        finally:
            self._changing = False

    async def _release_as_read(
        self, event: Event, *, task: Task = Task.NOT_ASKED, timeout: float | None = None
    ) -> tuple[Released | None, str]:
        """Read, decide and release until the job doesn't change in between; returns the result, or why it failed."""
        assert self.ref is not None
        rule: Rule | None = None

        def mode(read: JobRead) -> Mode | None:
            nonlocal rule
            rule = decide(replace(self._situation(event, read), task=task))
            return self._mode(rule, read)

        self._changing = True
        try:
            released = await release_others(
                await self.api(), self.ref, mode, timeout=timeout or self.options.release_timeout
            )
        except ReleaseError as e:
            self._log.warning(str(e))
            return None, str(e)
        finally:
            self._changing = False
        if released is not None:
            self._log.info(released.text)
        elif rule is not None:
            self._log.info(self._text(rule))
        return released, ""

    # the end of a process

    async def stop(self) -> Outcome:
        """The process was asked to stop: decide what happens to the job, and do it."""
        reason = (self._stop.reason if self._stop is not None else None) or "the process was asked to stop"
        event = Event.INTERRUPT if self._host.ask_state is None else Event.KILL
        end = self._stop_in_seconds if self._host.seconds is not None else self._stop_with_time
        text, error = await end(event)
        self._let_go()
        summary, _, detail = (text or reason).partition("\n")
        cause = Cause(Category.KILLED, summary, detail)
        metrics = self.handover.metrics
        return Outcome("Pending", False, cause=cause.as_dict(), release_error=error, metrics=metrics)

    async def _task(self, seconds: float) -> tuple[Task, str]:
        """What Airflow answers about the task, and the state itself."""
        if self._host.ask_state is None:
            return Task.NOT_ASKED, ""
        state = await self._host.ask_state(seconds)
        return task_of(state), state

    async def _ask_task_twice(self) -> tuple[Task, str]:
        task, state = await self._task(STATE_SECONDS)
        return await self._task(STATE_SECONDS) if task is Task.UNKNOWN else (task, state)

    async def _last_read(self) -> JobRead | None:
        """One read of the job and its pods in a process that ends; None if there is no answer."""
        assert self.ref is not None
        with contextlib.suppress(ApiStatusError, ApiUnavailable, TimeoutError, KtrainError):
            async with asyncio.timeout(min(LAST_READ_SECONDS, self._host.seconds or LAST_READ_SECONDS)):
                return await read_training(await self.api(), self.ref)
        return None

    async def _stop_in_seconds(self, event: Event) -> tuple[str, str]:
        """End with one request, fenced by what was seen last. Returns the sentence for the user, and what failed."""
        assert self._host.seconds is not None
        end = time.monotonic() + self._host.seconds
        late = end + LATE_SECONDS
        task, state = await self._ask_task_twice() if event is Event.KILL else (Task.NOT_ASKED, "")
        await self._find_submitted(end - 1.0)
        if self.ref is None:
            return "The task was killed before it had submitted a job.", ""
        seen_last = None if self._job is None else JobRead(self._job, [])  # it may show the end, or another owner
        read = seen_last if event is Event.KILL else await self._last_read()
        while True:
            situation = replace(self._situation(event, read), task=task, may_wait=False)
            rule = decide(situation)
            text, error = self._text(rule, state), ""
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.5)):
                    if rule.action is Action.RELEASE_NOW:
                        if self._job is None:
                            raise JobChanged("the job was not seen yet")
                        text = f"{text}\n{await self._release_at_once(end)}"
                    elif rule.action is Action.FREE_PODS and read is not None:
                        pods = await read_training(await self.api(), self.ref)
                        await release(await self.api(), self.ref, Mode.DELETE_PODS, pods, verify=False, timeout=1)
            except JobChanged:
                with contextlib.suppress(ApiStatusError, ApiUnavailable, TimeoutError):
                    async with asyncio.timeout(max(end - time.monotonic(), 0.5)):
                        self._job = await read_job(await self.api(), self.ref)
                        read = JobRead(self._job, [])
                        continue
                error = f"It could not be read. To delete it, run: {self.ref.delete_command}"
            except (KtrainError, TimeoutError) as e:
                command = self.ref.delete_command
                error = f"The request was not answered. To delete the job, run: {command}\n{e}".rstrip()
            self._log.warning(f"{text}\n{error}".rstrip())
            if not error or time.monotonic() > late:
                return text, error
            end = late  # the process may not be killed yet

    async def _release_at_once(self, end: float) -> str:
        assert self.ref is not None
        assert self._job is not None
        seen = seen_in(self._job, ())
        mode = Mode.DELETE if deletes(self.options.on_finish_action, seen) else Mode.SUSPEND
        seconds = end - time.monotonic()
        return (await release_now(await self.api(), self.ref, mode, self._job, timeout=seconds)).text

    async def _stop_with_time(self, event: Event) -> tuple[str, str]:
        """End after as many reads as that takes. Returns the sentence for the user, and what failed."""
        end, before = time.monotonic() + self._host.patience, ""
        if not self.options.release:
            return "", ""
        await self._find_submitted(time.monotonic() + LAST_READ_SECONDS)
        if self.ref is None:
            return "Interrupted before a job was submitted.", ""
        while True:
            task, state = await self._task(max(end - time.monotonic(), STATE_SECONDS))
            may_wait = time.monotonic() < end or task not in (Task.CHANGING, Task.UNKNOWN)
            rule = decide(replace(self._situation(event, None), task=task, may_wait=may_wait))
            if rule.action is not Action.LOOK_AGAIN or task not in (Task.CHANGING, Task.UNKNOWN):
                break
            if state != before:
                self._log.info(f"The process was asked to stop while its task is {state or 'in an unknown state'}.")
            before = state
            await asyncio.sleep(min(STATE_INTERVAL, self._host.patience))
        if rule.action is Action.KEEP:
            self._log.warning(f"{self._text(rule, state)}\nThe task is {state or 'in an unknown state'}.")
            return self._text(rule, state), ""
        if event is Event.KILL:
            self._log.info(f"The task is {state}. Releasing {self.ref}.")
        api, ref = await self.api(), self.ref
        cursor = self.cursor or Cursor.from_dict(self.handover.cursor)
        async with last_lines(api, ref, self.options.logs, cursor, self._log):
            released, error = await self._release_as_read(event, task=task, timeout=RELEASE_SECONDS)
        return self._text(rule, state) if released is None else released.text, error

    async def interrupted(self, event: Event) -> None:
        """An error ends the try: decide what happens to the job, and do it. It must not hide the error.

        :param event: ERROR, NO_RIGHT, FINAL_ERROR, DEADLINE, INTERRUPT or KILL.
        """
        if not self.owns_job:
            return
        if event in (Event.DEADLINE, Event.INTERRUPT, Event.KILL):
            await self._stop_in_seconds(event)
            self._let_go()
            return
        await self._find_submitted(time.monotonic() + (self._host.seconds or LAST_READ_SECONDS))
        if self.ref is None:
            if self._submission is not None:
                self._log.warning(
                    "A job may have been created: the API server doesn't respond. The next try adopts it."
                )
            return
        read = await self._last_read()
        rule = decide(replace(self._situation(event, read), may_wait=False))
        if read is not None and self._mode(rule, read) is not None:
            await self._release_as_read(event)
        else:
            self._log.warning(self._text(rule))
        self._let_go()

    # after the end

    async def outcome_stored(self, ref: JobRef, event: Event) -> str:
        """Delete a job that has ended, or free its pods if its status is the only proof; returns why that failed.

        :param ref: the job, which `on_finish_action` deletes.
        :param event: OUTCOME_STORED, OUTCOME_NOT_STORED or SUCCESS_FOUND.
        """
        self.ref, self.options = ref, Options()
        read, self._ended = self._ended, None
        try:
            if read is not None and read.job is not None and read.job["metadata"]["uid"] == ref.uid:
                rule = decide(self._situation(event, read))
                if (mode := self._mode(rule, read)) is not None:
                    with contextlib.suppress(JobChanged):
                        return (await self._write(mode, read, timeout=self.options.release_timeout))[1]
            return (await self._release_as_read(event))[1]
        finally:
            self._let_go()


class _StopRequested(Exception):
    """The process was asked to stop."""


@dataclass(frozen=True)
class _StartOver:
    """The job is followed on, from the handover."""


def _with_release(outcome: Outcome, released: Released | None, error: str, *, kept: JobRef | None = None) -> Outcome:
    """The outcome with what was released.

    :param kept: an ended job that is deleted when Airflow has stored the outcome. Default: none.
    """
    seconds: Mapping[str, float] = {} if released is None else {"seconds.release": released.seconds}
    return replace(
        outcome,
        released="" if released is None else released.text,
        release_error=error,
        kept=None if kept is None else kept.to_dict(),
        metrics={**outcome.metrics, **seconds},
    )
