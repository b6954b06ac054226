"""A task's job as one process knows it: whose it is, what the rules say of it, and how it is released.

It releases the job that this process owns: `training_owner.py` decides while the job is followed, `process_end.py` when
the process ends. `submit/create_or_adopt.py` releases a job that is replaced or created again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.end_rules import (
    HURRIED,
    Event,
    Mode,
    Ownership,
    Rule,
    Situation,
    Task,
    decide,
    mode_of,
    why_ended,
)
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.identity.names import JobRef, Owner, Unreadable, annotation
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.status import Seen, seen_in, wants_suspension
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import AbsentError, Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import (
    JobChanged,
    JobRead,
    Log,
    Observed,
    annotate,
    check_cluster,
    if_not_served,
    in_served_version,
    read_job,
    read_training,
)
from airflow_provider_ktrain.engine.api.request_errors import is_canceled, retry_transient
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.release import (
    DecidedEnd,
    DecisionOnRead,
    HurriedKill,
    Released,
    ReleaseError,
    release,
)
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted

FRESH_SECONDS = 120.0  #: How long after its creation a job has made no progress worth keeping.
SUSPEND_SECONDS = 10.0  #: Time to suspend a failed job that would train again.
CONFLICT_PAUSE_SECONDS = 0.5  #: Pause before annotations are written again after a conflict.
#: Pauses between two looks for a job whose create request is on its way: the first one, doubled after each look, and
#: the longest.
FIRST_FIND_SECONDS, MAX_FIND_SECONDS = 0.2, 1.0
T = TypeVar("T")
#: What was released, and why that failed; at most one of them is set.
Result = tuple[Released | None, str]


class Submission(Protocol):
    """What is submitted."""

    async def carry_out(self, api: Api, log: Log, *, posting: Posting) -> Submitted:
        """Create or adopt the job."""

    async def find(self, api: Api) -> Submitted | None:
        """The job that this try or an earlier one has created, if `carry_out` was interrupted."""

    @property
    def delete_command(self) -> str:
        """The command with which a user deletes the job."""


class OwnedJob:
    """The job for which this process is responsible, once it is known."""

    def __init__(
        self,
        connect: Callable[[], contextlib.AbstractAsyncContextManager[Api]],
        host: Host,
        log: Log,
    ) -> None:
        self.ref: JobRef | None = None
        self.options = Options()
        self.submission: Submission | None = None  #: Set while a job may exist whose identity is unknown.
        self.posting = Posting()  #: The job's create request.
        self.last_seen: Object | None = None  #: The job as it was last read, or shown by a watch.
        self.workload: Object | None = None  #: The Workload of the job, if a watch has shown it.
        self.pods_read: dict[str, Object] = {}  #: By uid, the pods as releases have read them last.
        self.is_created = False  #: Whether this process has created it.
        self.is_followed = False  #: Whether this process has followed it.
        self.is_changing = False  #: Whether a write has begun: from then on nothing may cut it off.
        self.released: Released | None = None  #: What this process has released of it; None if it has not.
        #: Whether this process has let go of a job that exists, or may exist, and was not released.
        self.is_left = False
        self._connect, self._host, self._log = connect, host, log
        # no exit stack: of a thousand jobs that wait, each would need 1 KiB more
        self._connection: contextlib.AbstractAsyncContextManager[Api] | None = None
        self._opened: Api | None = None
        self._forget: Callable[[], None] | None = None  # removes the job from what the client recognizes its cluster by
        self._created_at = 0.0  # by timing.now
        self._unread: ApiUnavailable | None = None  # why its last read has failed

    @property
    def is_mine(self) -> bool:
        """Whether a job exists, or may exist, for which this process is responsible."""
        return self.ref is not None or self.submission is not None

    @property
    def is_fresh(self) -> bool:
        """Whether this process created the job so recently that its deletion loses no progress."""
        return self.is_created and timing.now() - self._created_at < FRESH_SECONDS

    @property
    def is_deleted(self) -> bool:
        """Whether this process has deleted it."""
        return self.released is not None and self.released.job_deleted

    @property
    def known_ref(self) -> JobRef:
        """The reference to the job."""
        if self.ref is None:
            raise KtrainError("the job is not known")
        return self.ref

    @property
    def observed(self) -> Observed | None:
        """What was seen of it last; None if it was not seen yet."""
        return None if self.last_seen is None else Observed(self.last_seen, self.workload)

    async def api(self) -> Api:
        """The client, which stays open until `close`.

        :raises AccessError: it leads to another cluster than that of the job.
        """
        if self._opened is None:
            connection = self._connect()
            api, self._connection = await connection.__aenter__(), connection
            try:
                if self.ref is not None:
                    await check_cluster(api, self.ref)
                    if self.ref.uid:
                        self._recognize_by(api, self.ref)
            except BaseException:
                await self.close()
                raise
            self._opened = api
        return self._opened

    async def close(self) -> None:
        """Close the client."""
        connection, self._connection, self._opened = self._connection, None, None
        if self._forget is not None:
            self._forget()
            self._forget = None
        if connection is not None:
            await connection.__aexit__(None, None, None)

    # whose it is

    def expect(self, submission: Submission) -> None:
        """From now on, a job of this task may exist, which an earlier try has created."""
        self.submission, self.posting = submission, Posting()

    def take(self, api: Api, submitted: Submitted) -> None:
        """From now on, this process is responsible for the job."""
        self.ref, self.last_seen, self.submission = submitted.ref, submitted.job, None
        self.is_created, self._created_at = submitted.created, timing.now()
        self._recognize_by(api, submitted.ref)

    def _recognize_by(self, api: Api, ref: JobRef) -> None:
        if self._forget is not None:
            self._forget()
        self._forget = api.add_known_object(api_paths.job(ref), ref.uid)

    def let_go(self) -> None:
        """From now on, this process is not responsible for the job."""
        self.is_left = self.is_left or (self.is_mine and self.released is None)
        self.ref = self.submission = None

    async def find_submitted(self, end: float) -> None:
        """Find the job of a submission that was interrupted: its create request may still be on its way.

        :param end: value of `timing.now` from which nothing is waited for.
        """
        submission = self.submission
        if submission is None:
            return
        if not self.posting.may_have_job:
            self.submission = None
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(end - timing.now(), 0.1)):
                await self.posting.wait()
                pause = FIRST_FIND_SECONDS
                while not await self._found(submission):
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, MAX_FIND_SECONDS)

    async def _found(self, submission: Submission) -> bool:
        """Look for the job; returns whether it is now known that it exists, or that it never will."""
        try:
            api = await self.api()
            over = self.posting.is_over
            found = await submission.find(api)
            if found is not None:
                self.take(api, found)
            elif over:
                self.submission = None
        except (Exception, asyncio.CancelledError) as e:
            if is_canceled(e):
                raise
        return self.submission is None

    # what the rules say

    def rule(self, event: Event, evidence: JobRead | Observed | None, **known: Any) -> Rule:
        """The rule that applies.

        :param evidence: see `situation`.
        :param known: further fields of the `Situation`.
        """
        return decide(self.situation(event, evidence, **known))

    def situation(
        self, event: Event, evidence: JobRead | Observed | None, *, seen: Seen | None = None, **known: Any
    ) -> Situation:
        """What is known, for the rules.

        :param evidence: job and pods as they were read for this decision; None if they were not read. Of a kill that
            has seconds, what was seen last.
        :param seen: what the read shows, if the following has observed it. Default: None, the read alone.
        :param known: further fields of the `Situation`.
        """
        if seen is None and evidence is not None:
            seen = seen_in(evidence.job, evidence.pods if isinstance(evidence, JobRead) else ())
        job = {} if evidence is None or evidence.job is ABSENT else evidence.job
        return Situation(
            event,
            seen or Seen.NOTHING,
            owner=self.owner_in(evidence),
            successor=self._host.successor,
            hurried=self._host.seconds is not None and event in HURRIED,
            fresh=self.is_fresh and (event is Event.NO_RIGHT or not self.is_followed),
            suspended=self.ref is not None and self.ref.has_suspended(job) and wants_suspension(job),
            restarts=seen is Seen.FAILED and kind_of(self.known_ref.kind).behavior.restarts_failed_jobs,
            **known,
        )

    def owner_in(self, evidence: JobRead | Observed | None) -> Ownership:
        """Whose job it is."""
        if not self.options.release or (self.ref is not None and not self.ref.owner):
            return Ownership.FOREIGN
        if self.ref is None or evidence is None or evidence.job is ABSENT:
            return Ownership.MINE
        owner = Owner.of(evidence.job)  # another try would have written its own: without one, the uid decides
        if owner is Unreadable.OWNER:
            return Ownership.UNREADABLE
        return Ownership.MINE if owner is None or owner.ti_id == self.ref.owner else Ownership.ANOTHER_TRY

    def mode(self, rule: Rule, job: Object | Absent) -> Mode | None:
        """How the rule releases the job; None if it doesn't."""
        return mode_of(rule.action, self.options.on_finish_action, seen_in(job, ()))

    def text(self, rule: Rule, event: Event, state: str = "") -> str:
        """The sentence of a rule about this job.

        :param state: of the task in Airflow, if it was asked. Default: "".
        """
        ref = self.ref
        job = "The task's job, if it exists," if ref is None else str(ref)
        command = "" if ref is None else ref.delete_command
        text = rule.text.format(job=job, command=command, next=self._host.successor, why=why_ended(event, state))
        return text if ref is None else f"{text}{if_not_served(ref, self._unread)}"

    # release

    async def read(self) -> JobRead:
        """Read the job and its pods, in another version if that of the reference isn't served any more."""
        return await self._in_served_version(read_training)

    async def read_job(self) -> Observed:
        """Read the job without its pods."""
        job = await self._in_served_version(read_job)
        self.last_seen = None if job is ABSENT else job
        return Observed(job, self.workload)

    async def _in_served_version(self, ask: Callable[[Api, JobRef], Awaitable[T]]) -> T:
        api = await self.api()
        try:
            ref, answer = await in_served_version(api, self.known_ref, functools.partial(ask, api))
        except ApiUnavailable as e:
            self._unread = e
            raise
        self.ref, self._unread = ref, None
        return answer

    @property
    def delete_command(self) -> str:
        """How a user deletes the job, and its pods if its kind may not be served any more."""
        return f"{self.known_ref.delete_command}{if_not_served(self.known_ref, self._unread)}"

    async def write(self, rule: Rule, read: JobRead, *, verify: bool = True) -> Result:
        """Release the job as a rule says, which was found by what was read. The caller logs what was released.

        :param verify: wait until its pods are gone. Default: True.
        :raises JobChanged: the job has changed since.
        """
        mode = self.mode(rule, read.job)
        return (None, "") if mode is None else await self._release(DecidedEnd(mode, read, verify))

    async def release_by_rule(
        self,
        event: Event,
        *,
        task: Task = Task.NOT_ASKED,
        timeout: float = 90,
        holds: Callable[[JobRead], bool] = lambda read: True,
    ) -> Result:
        """Read, decide and release until the job doesn't change in between.

        :param task: Airflow's answer about the task. Default: it was not asked.
        :param timeout: in seconds. Default: 90.
        :param holds: whether the rule that led here holds on a read. Default: it does.
        """
        rule: Rule | None = None

        def mode_for(read: JobRead) -> Mode | None:
            nonlocal rule
            self.last_seen = self.last_seen if read.job is ABSENT else read.job
            self.pods_read |= {pod["metadata"]["uid"]: pod for pod in read.pods}
            rule = self.rule(event, read, task=task, holds=holds(read), may_wait=False)
            return self.mode(rule, read.job)

        result = await self._release(DecisionOnRead(mode_for), timeout)
        released, error = result
        if released is not None:
            self._log.info(released.text)
        elif not error and rule is not None:
            self._log.info(self.text(rule, event))
        return result

    async def _release(self, request: DecidedEnd | DecisionOnRead, timeout: float = 90) -> Result:
        """Carry out a release, which nothing may cut off."""
        api = await self.api()
        self.is_changing = True
        try:
            released = await release(api, self.known_ref, request, timeout=timeout, say=self._log.info)
            self.released = released or self.released
            return released, ""
        except ReleaseError as e:
            self._log.warning(str(e))
            return None, str(e)
        finally:
            self.is_changing = False

    async def release_at_once(self, rule: Rule, evidence: JobRead | Observed | None, seconds: float) -> Released:
        """Release the job by one request, fenced by what the rule was found by.

        :raises JobChanged: it has changed since, or was never seen.
        :raises ReleaseError: the API server rejects the request, or doesn't answer in time.
        """
        if evidence is None:
            raise JobChanged("the job was not seen yet")
        seen = Observed(evidence.job, self.workload)
        kill = HurriedKill(self.mode(rule, seen.job) or Mode.DELETE, seen)
        self.released = await release(await self.api(), self.known_ref, kill, timeout=seconds)
        return self.released

    async def keep_from_restarting(self, read: JobRead) -> None:
        """Suspend a failed job before its logs are read, which may take minutes. Its finished pods stay."""
        ref = self.known_ref
        try:
            await release(await self.api(), ref, DecidedEnd(Mode.SUSPEND, read, False), timeout=SUSPEND_SECONDS)
        except (ReleaseError, JobChanged) as e:  # the release after the logs tries again
            self._log.warning(f"{ref} has failed, but could not be suspended and may train again.\n{e}")

    async def annotate(
        self, job: Object | Absent, annotations: Mapping[str, str], seconds: float
    ) -> tuple[Object | Absent, str]:
        """Set annotations of the job, or remove them, again after a conflict, as long as it is this try's.

        :return: the job as it is now, and why that failed; empty if it has these annotations.
        """
        end = timing.now() + seconds
        while job is not ABSENT and any((annotation(job, name) or "") != annotations[name] for name in annotations):
            try:
                write = functools.partial(annotate, await self.api(), self.known_ref, job, annotations)
                return await retry_transient(write, end), ""
            except ApiStatusError as e:
                error: KtrainError = e
                if (e.status == 409 or isinstance(e, AbsentError)) and timing.now() < end:
                    with contextlib.suppress(ApiStatusError, ApiUnavailable):
                        seen = await self.read_job()
                        job = seen.job
                        if self.owner_in(seen) is Ownership.MINE:
                            await asyncio.sleep(CONFLICT_PAUSE_SECONDS)
                            continue
            except Exception as e:  # as where the client can't be built: an annotation stops no release
                return job, str(e)
            return job, str(error)
        return job, ""
