"""Runs the engine in a worker: one event loop, handling of kills, and conversion of errors to Airflow's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core import kill_decision
from airflow_provider_ktrain.core.errors import KtrainError, NoRightError
from airflow_provider_ktrain.core.identity import JobRef, OnFinishAction
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text import shown
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.loop import follow
from airflow_provider_ktrain.engine.follow.messages import Handover, HostPolicy, Options, Outcome, StopSignal
from airflow_provider_ktrain.engine.job_requests import Log, read_job
from airflow_provider_ktrain.engine.job_view import current_phase
from airflow_provider_ktrain.engine.release import Mode, Released, mode_of, release
from airflow_provider_ktrain.engine.submit import Submitted
from airflow_provider_ktrain.engine.threads import in_thread
from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingKilledError, airflow_error
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.status_writer import WORKER, TaskStatusSink, question

T = TypeVar("T")
Object = dict[str, Any]
RETRY_SECONDS = 5.0  #: seconds between two attempts to follow a job
KILL_RELEASE_SECONDS = compat.SIGKILL_DELAY_SECONDS - 1.5  #: seconds to release a job after a kill
STATE_SECONDS = 1.5  #: seconds of KILL_RELEASE_SECONDS in which to wait for the task's state
#: seconds of following after which an error starts the patience again; `follow` itself retries an error for 600 s
PATIENCE_RESET_SECONDS = 1200.0
NO_PROGRESS_SECONDS = 120.0  #: seconds after its creation in which a job has made no progress worth keeping


@contextlib.contextmanager
def as_airflow_errors() -> Iterator[None]:
    """Raise the provider's errors as Airflow's. Airflow logs the whole chain: it is left out if it can't be shown."""
    try:
        with _typed_errors():
            yield
    except Exception as e:
        texts = [part for part in traceback.format_exception(e) if not part.startswith("  File ")]
        if shown(texts) == texts:
            raise
        error = e if isinstance(e, TrainingJobError) else TrainingJobError(f"{type(e).__name__}: {e}")
        error.__cause__ = None
        raise error from None


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Raise a KtrainError as an Airflow exception; one that is `final` is not retried."""
    try:
        yield
    except KtrainError as e:
        raise airflow_error(e) from e


class Submitting(Protocol):
    """What the host submits: `operators.submission.Submission`."""

    @property
    def is_retry(self) -> bool:
        """Whether an earlier try may have left a job."""
        ...

    async def carry_out(self, api: Api, log: Log) -> Submitted:
        """Create or adopt the job."""
        ...

    async def find(self, api: Api, *, created: bool = False) -> JobRef | None:
        """The task's job, if `carry_out` was interrupted. With `created`, only a job that this try has created."""
        ...


@dataclass(frozen=True)
class Try:
    """The task try that a host works for; it decides whether the job is kept when the try ends.

    :param retry_left: whether Airflow retries the task if this try fails.
    :param ask_state: returns the task's state, as `compat.task_state` does; it may block for a long time.
    :param status_sink: takes the training's status. Default: None, the status isn't written.
    """

    retry_left: bool
    ask_state: Callable[[], str]
    status_sink: TaskStatusSink | None = None

    @classmethod
    def of(cls, ti: Any) -> Try:
        """:param ti: the task instance of an Airflow context."""
        ask = functools.partial(compat.task_state, ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        return cls(compat.has_tries_left(ti), ask, TaskStatusSink.of(ti, WORKER))


class WorkerHost:
    """Runs the engine's coroutines in this process, for one execution of one task. A context manager.

    `kill` may be called at any time, in a signal handler. While the event loop runs, it wakes the loop; otherwise it
    decides itself whether the job is released.

    :param hook: hook of the connection, loaded.
    :param log: the task's logger.
    :param task: the try that this host works for. Default: None, the host owns no job.
    """

    def __init__(self, hook: TrainingHook, log: Log, task: Try | None = None) -> None:
        self.handover = Handover()
        self._created_at: float | None = None  # time.monotonic() at which this host created the job
        self._hook = hook
        self._log = log
        self._task = task
        self._stop = StopSignal(self._decide, KILL_RELEASE_SECONDS)
        self._decision: kill_decision.KillDecision | None = None  # what happens to the job after a kill
        self._runner = asyncio.Runner()
        self._running = False
        self._connected = contextlib.AsyncExitStack()  # keeps client and watches open after `follow`
        self.is_connected = False  #: whether the watches of the job that was followed may still run
        self._ref: JobRef | None = None  # the job to release if this try ends early
        self._submitting: Submitting | None = None  # set while a job may exist whose identity is unknown
        self._mode_of_kill = Mode.DELETE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            undecided = error is not None and not isinstance(error, TrainingKilledError)
            if undecided and (self._ref or self._submitting):  # between submit and follow, or interrupted by a timeout
                if not _is_trouble(error):
                    self._run(self._release_now())
                elif self._retry_left or not (self._submitting or self._is_fresh):
                    self._keep(f"{type(error).__name__}: {error}")
                else:
                    self._run(self._release_now(created=True))
        finally:
            try:
                self._disconnect()
            finally:
                self._runner.close()

    def _disconnect(self) -> None:
        """Close the client and the watches that `_stay_connected` has kept open."""
        if self.is_connected:
            self.is_connected = False
            self._runner.run(self._connected.aclose())

    async def _stay_connected(self) -> None:
        """Keep the client and its watches open until this host ends: they verify the deletion of the job."""
        if not self.is_connected:
            await self._connected.enter_async_context(self._hook.api())
            self.is_connected = True

    def _run(self, coroutine: Any) -> Any:
        self._running = True
        try:
            return self._runner.run(coroutine)
        finally:
            self._running = False

    # the end of a try before the end of its job

    @property
    def _retry_left(self) -> bool:
        return self._task is not None and self._task.retry_left

    @property
    def _is_fresh(self) -> bool:
        """Whether this host created the job so recently that its deletion loses no progress."""
        return self._created_at is not None and time.monotonic() - self._created_at < NO_PROGRESS_SECONDS

    def _keep(self, why: str) -> None:
        """Keep the job although this try ends."""
        ref, self._ref, self._submitting = self._ref, None, None
        what = str(ref) if ref else "The task's job, if it exists,"
        kept = "is kept for the next try; if there is none," if self._retry_left else "is kept. No retry is left:"
        self._log.warning(f"{what} {kept} the reaper releases it.\n{why}")

    def kill(self, reason: str) -> None:
        """End this execution now and decide what happens to the job. Safe in a signal handler, at any time.

        :param reason: the reason if Airflow doesn't report the task's state.
        """
        self._stop.request(reason)
        if not self._running:
            self._end_killed()

    def _end_killed(self) -> None:
        if self._ref or self._submitting:
            asyncio.run(self._release_unless_kept())

    def check(self) -> None:
        """Raise after a kill: Airflow lets a task continue after `on_kill`.

        :raises TrainingKilledError: `kill` was called.
        """
        if self._stop.reason is not None:
            self._end_killed()
            raise TrainingKilledError(self._decision.reason if self._decision else self._stop.reason)

    def hand_over(self) -> None:
        """Give up the job: from now on the trigger follows it and handles kills.

        :raises TrainingKilledError: `kill` was called before.
        """
        self.check()
        self._ref = None
        if self._decision is not None:  # killed meanwhile
            raise TrainingKilledError(self._decision.reason)

    async def _decide(self) -> kill_decision.KillDecision:
        """Whether a killed try releases its job, by the task's state in Airflow; asked again until it is certain."""
        if self._decision is None or not self._decision.certain:
            state = await self._state()
            self._decision = kill_decision.decision_for_worker(state, self._task is not None and self._task.retry_left)
            self._log.warning(_sentence(self._decision.reason))
        return self._decision

    async def _state(self) -> str:
        """The task's state in Airflow."""
        if self._task is None:
            return kill_decision.UNKNOWN
        try:
            with question():
                return await asyncio.wait_for(in_thread(self._task.ask_state), STATE_SECONDS)
        except Exception as e:
            self._log.warning(f"The task's state can't be read from Airflow.\n{type(e).__name__}: {e}")
            return kill_decision.UNKNOWN

    async def _release_unless_kept(self) -> None:
        decision = await self._decide()
        if not decision.keep:
            await self._release_now()
        elif decision.certain:  # otherwise the state is read again later, if there is time
            self._ref = self._submitting = None

    def take_over(self, ref: JobRef, on_finish_action: OnFinishAction, handover: Handover) -> None:
        """Continue with a job that this try submitted before it deferred: from now on a kill may release it."""
        self._ref, self.handover = ref, handover
        self._mode_of_kill = mode_of(on_finish_action, succeeded=False, ended=False)
        self.check()

    # submit

    def submit(self, submission: Submitting, on_finish_action: OnFinishAction) -> Submitted:
        """Create or adopt the job.

        :param submission: what to submit.
        :param on_finish_action: what happens to the job when this try ends.
        """
        self._mode_of_kill = mode_of(on_finish_action, succeeded=False, ended=False)
        self._submitting = submission
        self.check()
        began = time.monotonic()
        submitted: Submitted = self._run(self._submit(submission))
        self.handover.metrics["seconds.submit"] = round(time.monotonic() - began, 3)
        self._ref, self._submitting = submitted.ref, None
        self._created_at = time.monotonic() if submitted.created else None
        self.check()
        return submitted

    async def _submit(self, submission: Submitting) -> Submitted:
        async with self._hook.api() as api:
            killed = asyncio.Event()
            self._stop.attach(killed)
            working = asyncio.ensure_future(submission.carry_out(api, self._log))
            waiting = asyncio.ensure_future(killed.wait())
            await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not working.done():  # killed while a request may be in flight
                await asyncio.wait([working], timeout=1)
            killed_early = self._stop.reason is not None and (not working.done() or working.exception() is not None)
            if not killed_early:
                return await working
            working.cancel()
            await asyncio.wait([working])
        await self._release_unless_kept()  # also after an error: it doesn't prove that no job was created
        assert self._decision is not None
        raise TrainingKilledError(self._decision.reason)

    async def _release_now(self, *, created: bool = False) -> None:
        """Release the task's job, known or not, in the few seconds that remain after a kill.

        :param created: only a job that this try has created. Default: False.
        """
        ref, self._ref = self._ref, None
        submission, self._submitting = self._submitting, None
        seconds = KILL_RELEASE_SECONDS if ref is not None else KILL_RELEASE_SECONDS / 2
        try:
            async with self._hook.api(ref) as api:
                if ref is None and submission is not None:
                    ref = await submission.find(api, created=created)
                    if ref is None and created and submission.is_retry:
                        self._log.warning(
                            "The job of an earlier try is kept. No retry is left: the reaper releases it."
                        )
                if ref is not None:
                    done = await release(api, ref, self._mode_of_kill, timeout=seconds, verify=False, spare_ended=True)
                    self._log.info(done.text)
        except Exception as e:  # must not hide why the task ends
            self._log.warning(f"The job could not be released. The reaper releases it.\n{e}")

    def call(self, ask: Callable[[Api, str], Awaitable[T]]) -> T:
        """Run a coroutine function with the API and the connection's namespace."""

        async def run() -> T:
            async with self._hook.api() as api:
                return await ask(api, self._hook.namespace or "default")

        done: T = self._run(run())
        return done

    # follow

    def watch(self, ref: JobRef, options: Options, timeout: float | None = None) -> Outcome:
        """Follow a job that somebody else submitted; it is never released.

        :param timeout: seconds. Default: None, no limit.
        :raises TimeoutError: the job has not ended in time.
        """
        ended: Outcome | Handover = self._run(asyncio.wait_for(self._follow(ref, options, None), timeout))
        assert not isinstance(ended, Handover)  # only with `until`
        return ended

    def follow(self, ref: JobRef, options: Options, until: float | None, *, patience: float = 0.0) -> Outcome | None:
        """Follow the job and return its outcome; None if `until` has passed, and then `handover` is set.

        After an error, `handover` is set as well: the next attempt, or the trigger, goes on at the newest line.

        A job that can't be followed is kept, because that proves nothing about its training. One exception: a job that
        was just created, without the right to watch it (403) and without a retry left. It has made no progress yet.

        :param until: a time of `time.monotonic`; None follows the job to its end.
        :param patience: seconds from the first error for which following is retried. Default: 0.
        """
        try:
            ended: Outcome | Handover = self._run(self._follow(ref, options, until, patience))
        except Exception as e:
            self._log.warning(f"Following {ref} failed.\n{e}")
            if self._stop.reason is not None:
                self.check()
            if self._retry_left or not (self._is_fresh and isinstance(e, NoRightError)):
                self._keep("Its training may still run.")
                raise
            try:
                self._log.info(self.release(ref, options.on_finish_action, spare_ended=True).text)
            except KtrainError as unreleased:
                self._log.warning(str(unreleased))
                e.add_note(str(unreleased))
            raise
        if isinstance(ended, Handover):
            self.handover = ended
            self.check()
            return None
        self._ref = None
        return ended

    async def _follow(
        self, ref: JobRef, options: Options, until: float | None, patience: float = 0.0
    ) -> Outcome | Handover:
        """Follow the job. After an error, try again for `patience` seconds."""
        stopped = asyncio.Event()
        give_up: float | None = None
        while True:
            began = time.monotonic()
            try:
                return await self._follow_once(ref, options, until)
            except Exception as e:
                if give_up is None or time.monotonic() - began > PATIENCE_RESET_SECONDS:
                    give_up = time.monotonic() + patience
                never = self._is_fresh and isinstance(e, NoRightError)
                if never or self._stop.reason is not None or time.monotonic() + RETRY_SECONDS > give_up:
                    raise
                self._log.warning(f"Following {ref} failed. Retrying in {RETRY_SECONDS:.0f} s.\n{e}")
            self._stop.attach(stopped)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), RETRY_SECONDS)

    async def _follow_once(self, ref: JobRef, options: Options, until: float | None) -> Outcome | Handover:
        sink = self._task.status_sink if self._task is not None and options.release else None
        async with self._hook.api(ref) as api, sink or contextlib.nullcontext():
            ended = await follow(
                ref,
                api,
                options,
                log=self._log,
                stop=self._stop,
                handover=self.handover,
                host=HostPolicy(
                    until=until,
                    fail_fast_on_forbidden=self._created_at is not None or not options.release,
                    status_sink=sink,
                ),
                on_failure=self._go_on_from,
            )
            if isinstance(ended, Outcome) and ended.kept:
                await self._stay_connected()
            return ended

    def _go_on_from(self, handover: Handover) -> None:
        self.handover = handover

    # release

    def release(self, ref: JobRef, on_finish_action: OnFinishAction, *, spare_ended: bool = False) -> Released:
        """Release a job, whether or not it has ended.

        :param on_finish_action: what happens to the job when this try ends.
        :param spare_ended: keep a job that has ended and delete only its running pods. Default: False.
        :raises ReleaseError: the job or its pods could not be released.
        """
        self._ref = None
        done: Released = self._run(self._release_as_it_stands(ref, on_finish_action, spare_ended))
        return done

    async def _release_as_it_stands(self, ref: JobRef, on_finish_action: OnFinishAction, spare_ended: bool) -> Released:
        async with self._hook.api(ref) as api:
            phase = Phase.PENDING
            with contextlib.suppress(ApiStatusError, ApiUnavailable):
                phase = await current_phase(api, ref)
            mode = mode_of(on_finish_action, succeeded=phase is Phase.SUCCEEDED, ended=phase.ended)
            return await release(api, ref, mode, spare_ended=spare_ended)

    def ended(self, ref: JobRef) -> Object | None:
        """The job if it exists and has ended; None also if the API server can't be reached."""

        async def look(api: Api, _: str) -> Object | None:
            with contextlib.suppress(ApiStatusError, ApiUnavailable):
                job = await read_job(api, ref)
                return job if phase_of(job).ended else None
            return None

        return self.call(look)


def _is_trouble(error: BaseException | None) -> bool:
    """Whether another try could continue with the job after this error.

    Airflow's execution timeout and Ctrl-C are not `Exception`s: they end the task on purpose.
    """
    final = isinstance(error, AirflowFailException) or (isinstance(error, KtrainError) and error.final)
    return isinstance(error, Exception) and not final


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
