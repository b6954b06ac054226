"""The worker as host of the engine: one event loop, a kill that reaches it, errors in Airflow's words."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core import kills
from airflow_provider_ktrain.core.errors import KtrainError, NoRightError
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text import UNSTORABLE
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.loop import follow
from airflow_provider_ktrain.engine.follow.messages import Handover, HostPolicy, Options, Outcome, Stop
from airflow_provider_ktrain.engine.jobs import Log, read_job
from airflow_provider_ktrain.engine.release import Mode, Released, mode_of, release
from airflow_provider_ktrain.engine.submit import Submitted
from airflow_provider_ktrain.exceptions import TrainingJobError, TrainingKilledError, airflow_error
from airflow_provider_ktrain.hooks.training import TrainingHook

T = TypeVar("T")
Object = dict[str, Any]
PAUSE = 5.0  #: seconds until following is begun again where it could not be done
KILL_SECONDS = 3.5  #: Airflow gives on_kill 5 s before SIGKILL
STATE_SECONDS = 1.5  #: of these, for Airflow's answer about the task's state
WORKED = 1200.0  #: seconds of following after which the next error is another trouble: it bears one for 600 s
FRESH = 120.0  #: seconds after its creation in which a job has done next to nothing


@contextlib.contextmanager
def as_airflow_errors() -> Iterator[None]:
    """Errors as Airflow's, with texts that its log can carry: it writes those of the causes as well."""
    try:
        with _typed_errors():
            yield
    except Exception as e:
        if not UNSTORABLE.search("".join(traceback.format_exception(e))):
            raise
        error = e if isinstance(e, TrainingJobError) else TrainingJobError(f"{type(e).__name__}: {e}")
        error.__cause__ = None
        raise error from None


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    """Our errors as Airflow's: only a `final` one is not retried."""
    try:
        yield
    except KtrainError as e:
        raise airflow_error(e) from e


class Submitting(Protocol):
    """What is submitted: `operators.submission.Submission`."""

    @property
    def is_retry(self) -> bool:
        """Whether an earlier try may have left a job."""
        ...

    async def carry_out(self, api: Api, log: Log) -> Submitted:
        """Create or adopt the job."""
        ...

    async def find(self, api: Api, *, created: bool = False) -> JobRef | None:
        """The job of this task if `carry_out` was cut off; with `created` only one that it has created."""
        ...


@dataclass(frozen=True)
class Try:
    """The try of a task that a host works for: what decides whether a job outlives it.

    :param retry_left: whether Airflow runs another try if this one fails.
    :param ask_state: asks Airflow for the task's state, of `compat.task_state`; it may block for long.
    """

    retry_left: bool
    ask_state: Callable[[], str]

    @classmethod
    def of(cls, ti: Any) -> Try:
        """:param ti: the task instance of an Airflow context."""
        ask = functools.partial(compat.task_state, ti.dag_id, ti.run_id, ti.task_id, ti.map_index)
        return cls(ti.try_number <= (ti.max_tries or 0), ask)


class WorkerHost:
    """Runs the engine's coroutines in this process, for one execution of one task.

    `kill` may come at any time, in a signal handler: while the loop runs it wakes the supervisor, else it decides over
    the job by itself. A context manager.

    :param hook: of the connection; loaded.
    :param log: where lines go.
    :param task: the try that this host works for; None for hosts that own no job.
    """

    def __init__(self, hook: TrainingHook, log: Log, task: Try | None = None) -> None:
        self.handover = Handover()
        self._created_at: float | None = None  # of a job that this host has created; time.monotonic()
        self._hook = hook
        self._log = log
        self._task = task
        self._stop = Stop(self._decide)
        self._decision: kills.KillDecision | None = None  # over the job, after a kill
        self._runner = asyncio.Runner()
        self._running = False
        self._ref: JobRef | None = None  # of a job that we have to release
        self._submitting: Submitting | None = None  # while there may be a job that we do not know yet
        self._mode_of_kill = Mode.DELETE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            undecided = error is not None and not isinstance(error, TrainingKilledError)
            if undecided and (self._ref or self._submitting):  # between create and follow, or cut off by a timeout
                if not _is_trouble(error):
                    self._run(self._release_now())
                elif self._retry_left or not (self._submitting or self._is_fresh):
                    self._keep(f"{type(error).__name__}: {error}")
                else:
                    self._run(self._release_now(created=True))
        finally:
            self._runner.close()

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
        """Whether this host created the job, and so lately that nothing is lost with it."""
        return self._created_at is not None and time.monotonic() - self._created_at < FRESH

    def _keep(self, why: str) -> None:
        ref, self._ref, self._submitting = self._ref, None, None
        what = str(ref) if ref else "If this task has a job, it"
        until = (
            "for the next try; if none comes, the reaper"
            if self._retry_left
            else "as it is. No retry is left: the reaper"
        )
        self._log.warning(f"{what} is kept {until} releases it ({why})")

    def kill(self, reason: str) -> None:
        """End this execution now, and decide over the job: in a signal handler, whatever is going on.

        :param reason: what is known; why the task ends, Airflow is asked.
        """
        self._stop.request(reason)
        if not self._running:
            self._end_killed()

    def _end_killed(self) -> None:
        if self._ref or self._submitting:
            asyncio.run(self._release_unless_kept())

    def check(self) -> None:
        """TrainingKilledError where a kill was asked for: Airflow lets a task go on after `on_kill`."""
        if self._stop.reason is not None:
            self._end_killed()
            raise TrainingKilledError(self._decision.reason if self._decision else self._stop.reason)

    def hand_over(self) -> None:
        """The job is a trigger's from here on: a kill that comes later is the trigger's to answer.

        :raises TrainingKilledError: a kill came before.
        """
        self.check()
        self._ref = None
        if self._decision is not None:  # a kill in between
            raise TrainingKilledError(self._decision.reason)

    async def _decide(self) -> kills.KillDecision:
        """Whether a killed try releases its job: by the task's state in Airflow, asked until it is known."""
        if self._decision is None or not self._decision.certain:
            state = await self._state()
            self._decision = kills.decision_for_worker(state, self._task is not None and self._task.retry_left)
            self._log.warning(_sentence(self._decision.reason))
        return self._decision

    async def _state(self) -> str:
        if self._task is None:
            return kills.UNKNOWN
        try:
            return await _in_thread(self._task.ask_state, STATE_SECONDS)
        except Exception as e:
            self._log.warning(f"The state of the task cannot be read: {type(e).__name__}: {e}")
            return kills.UNKNOWN

    async def _release_unless_kept(self) -> None:
        decision = await self._decide()
        if not decision.keep:
            await self._release_now()
        elif decision.certain:  # else it is asked again as this execution goes on, if Airflow leaves it the time
            self._ref = self._submitting = None

    def take_over(self, ref: JobRef, on_finish_action: str, handover: Handover) -> None:
        """Go on with a job that an earlier segment of this try submitted: from now on a kill releases it."""
        self._ref, self.handover = ref, handover
        self._mode_of_kill = mode_of(on_finish_action, succeeded=False, ended=False)
        self.check()

    # submit

    def submit(self, submission: Submitting, on_finish_action: str) -> Submitted:
        """Create or adopt the job."""
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
            if not working.done():  # killed while a request may be on its way
                await asyncio.wait([working], timeout=1)
            if working.done():
                return await working
            working.cancel()
            await asyncio.wait([working])
        await self._release_unless_kept()
        assert self._decision is not None
        raise TrainingKilledError(self._decision.reason)

    async def _release_now(self, *, created: bool = False) -> None:
        """In the seconds that a kill leaves: the job of this task, known or not.

        :param created: only a job that this try has created.
        """
        ref, self._ref = self._ref, None
        submission, self._submitting = self._submitting, None
        seconds = KILL_SECONDS if ref is not None else KILL_SECONDS / 2
        try:
            async with self._hook.api(ref) as api:
                if ref is None and submission is not None:
                    ref = await submission.find(api, created=created)
                    if ref is None and created and submission.is_retry:
                        self._log.warning(
                            "A job that an earlier try left is kept. No retry is left: the reaper takes it"
                        )
                if ref is not None:
                    done = await release(api, ref, self._mode_of_kill, timeout=seconds, verify=False, spare_ended=True)
                    self._log.info(done.text)
        except Exception as e:  # it must not hide why the task ends
            self._log.warning(f"The job could not be released: {e}. A reaper releases what is left")

    def call(self, ask: Callable[[Api, str], Awaitable[T]]) -> T:
        """Run one coroutine function with the API and the connection's namespace."""

        async def run() -> T:
            async with self._hook.api() as api:
                return await ask(api, self._hook.namespace or "default")

        done: T = self._run(run())
        return done

    # follow

    def watch(self, ref: JobRef, options: Options, timeout: float | None = None) -> Outcome:
        """Follow a job that others submitted: nothing is ever released. TimeoutError after `timeout` seconds."""
        ended: Outcome | Handover = self._run(asyncio.wait_for(self._follow(ref, options, None), timeout))
        assert not isinstance(ended, Handover)  # only with `until`
        return ended

    def follow(self, ref: JobRef, options: Options, until: float | None, *, patience: float = 0.0) -> Outcome | None:
        """Follow to the end: the outcome. With `until`: None where the job goes on, and `handover` is set.

        A job that cannot be followed is kept, as that proves nothing about its training. The exception is a job that
        was just created and must not be watched (403), without a retry that might: it has done nothing yet.

        :param until: of `time.monotonic`, or None.
        :param patience: seconds from the first error for which following is begun again. Default: 0.
        """
        try:
            ended: Outcome | Handover = self._run(self._follow(ref, options, until, patience))
        except Exception as e:
            self._log.warning(f"{ref} cannot be followed any more: {e}")
            if self._stop.reason is not None:
                self.check()
            if self._retry_left or not (self._is_fresh and isinstance(e, NoRightError)):
                self._keep("that it cannot be followed says nothing about its training")
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
        stopped = asyncio.Event()
        give_up: float | None = None
        while True:
            began = time.monotonic()
            try:
                return await self._follow_once(ref, options, until)
            except Exception as e:
                if give_up is None or time.monotonic() - began > WORKED:
                    give_up = time.monotonic() + patience
                never = self._is_fresh and isinstance(e, NoRightError)
                if never or self._stop.reason is not None or time.monotonic() + PAUSE > give_up:
                    raise
                self._log.warning(f"{ref} cannot be followed now: {e}. Trying again in {PAUSE:.0f} s")
            self._stop.attach(stopped)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), PAUSE)

    async def _follow_once(self, ref: JobRef, options: Options, until: float | None) -> Outcome | Handover:
        async with self._hook.api(ref) as api:
            return await follow(
                ref,
                api,
                options,
                log=self._log,
                stop=self._stop,
                handover=self.handover,
                host=HostPolicy(
                    until=until, fail_fast_on_forbidden=self._created_at is not None or not options.release
                ),
            )

    # release

    def release(self, ref: JobRef, on_finish_action: str, *, spare_ended: bool = False) -> Released:
        """Release a job that may have ended or not, by `on_finish_action`. ReleaseError where that fails."""
        self._ref = None
        done: Released = self._run(self._release_as_it_stands(ref, on_finish_action, spare_ended))
        return done

    async def _release_as_it_stands(self, ref: JobRef, on_finish_action: str, spare_ended: bool) -> Released:
        async with self._hook.api(ref) as api:
            phase = Phase.PENDING
            with contextlib.suppress(ApiStatusError, ApiUnavailable):
                phase = phase_of(await read_job(api, ref))
            mode = mode_of(on_finish_action, succeeded=phase is Phase.SUCCEEDED, ended=phase.ended)
            return await release(api, ref, mode, spare_ended=spare_ended)

    def ended(self, ref: JobRef) -> Object | None:
        """The job, if it is there and has ended; None also where that cannot be asked."""

        async def look(api: Api, _: str) -> Object | None:
            with contextlib.suppress(ApiStatusError, ApiUnavailable):
                job = await read_job(api, ref)
                return job if phase_of(job).ended else None
            return None

        return self.call(look)


def _is_trouble(error: BaseException | None) -> bool:
    """Whether this error alone ends no training: another try could go on with its job.

    A timeout of Airflow's and Ctrl-C, which are no `Exception`, are ends that somebody set.
    """
    final = isinstance(error, AirflowFailException) or (isinstance(error, KtrainError) and error.final)
    return isinstance(error, Exception) and not final


async def _in_thread(ask: Callable[[], T], seconds: float) -> T:
    """What `ask` returns; TimeoutError after so many seconds.

    In a daemon thread of its own: one of the loop's executor would be waited for as the loop closes. `ask` blocks for
    as long as Airflow's supervisor is silent, or while the main thread, which a signal handler has interrupted, holds
    the lock of the connection to it.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def answered() -> None:
        try:
            answer.set_result(ask())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=answered, name="ktrain-task-state", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(answer)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
