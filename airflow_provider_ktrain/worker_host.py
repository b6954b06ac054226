"""Runs the owner of a training in a worker: one event loop in a thread, and the signals of the main thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from airflow.sdk.exceptions import AirflowFailException, AirflowTaskTerminated, AirflowTaskTimeout, TaskDeferred

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.end_rules import Event, Successor
from airflow_provider_ktrain.core.errors import KtrainError, NoRightError
from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction
from airflow_provider_ktrain.core.logs.repetition import Repetition
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.api.threads import LoopThread
from airflow_provider_ktrain.engine.follow.deferral import Deferral, Handover
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome, cause_of
from airflow_provider_ktrain.engine.host import Host
from airflow_provider_ktrain.engine.owned_job import Submission
from airflow_provider_ktrain.engine.submit.create_or_adopt import Submitted
from airflow_provider_ktrain.engine.training_owner import Stopped, Training
from airflow_provider_ktrain.engine.watch.wakeup import StopSignal
from airflow_provider_ktrain.exceptions import TrainingKilledError
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.status_writer import WORKER, TaskStatusSink, ask_state

T = TypeVar("T")
REFRESH_SECONDS = 15.0  #: Time between two statuses of a job that runs.
STOP_SECONDS = compat.SIGKILL_DELAY_SECONDS - 1.5  #: Time to end after SIGTERM.


class WorkerHost:
    """Runs a `Training` in this process, for one execution of one task. A context manager.

    :param hook: hook of the connection, loaded.
    :param ti: Airflow's task instance, whose try this process runs. Default: None, it owns no job.
    :param loop: where it runs. Default: a thread of its own.
    """

    def __init__(self, hook: TrainingHook, log: Log, ti: Any = None, loop: LoopThread | None = None) -> None:
        self._hook = hook
        self._loop = LoopThread() if loop is None else loop
        self._stop = StopSignal()
        self._killed: TrainingKilledError | None = None  # the end after a kill
        sink = None if ti is None else TaskStatusSink.of(ti, WORKER)
        successor = Successor.NEXT_TRY if ti is not None and compat.has_tries_left(ti) else Successor.NOBODY
        ask = None if ti is None else functools.partial(ask_state, ti, log)
        host = Host(STOP_SECONDS, ask, successor, status_sink=sink, refresh_seconds=lambda: REFRESH_SECONDS)
        self._training = Training(hook.api, host, log, self._stop)

    @classmethod
    def connected(cls, operator: Any, ti: Any = None, loop: LoopThread | None = None) -> Self:
        """A host with the client of a connection, which is read now.

        :raises AccessError: the connection can't be read.
        """
        hook = TrainingHook(operator.kubernetes_conn_id, operator.cluster_context)
        hook.load()
        return cls(hook, operator.log, ti, loop)

    @property
    def handover(self) -> Handover:
        """What the next process needs to know."""
        return self._training.handover

    @property
    def has_left_job(self) -> bool:
        """After its end: whether a job may still hold accelerators, because it exists, or may exist, unreleased."""
        return self._training.job.is_left

    @property
    def has_deleted_job(self) -> bool:
        """Whether it has deleted its job."""
        return self._training.job.is_deleted

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end(error)
            self._close()
            self._end(None)  # a kill that came while this was closed: no other process would release the job
        except BaseException as raised:
            self._end(raised)
            raise
        finally:
            self._close()

    def _close(self) -> None:
        if self._loop.is_open:
            self._run(self._training.close())
            self._loop.close()

    def _end(self, error: BaseException | None) -> None:
        """Decide what happens to the job if this execution ends before its training.

        A SIGTERM may raise an exception at any line, besides calling `on_kill` (apache/airflow#73395). Airflow would
        fail the task without a retry because of it, so it is replaced.
        """
        if isinstance(error, TrainingKilledError):
            return
        if self._stop.reason is not None and self._training.job.is_mine:
            self.check()
        if isinstance(error, TaskDeferred) or error is None:  # the training has ended, or its trigger is responsible
            return
        match error:
            case AirflowTaskTimeout():
                self._run(self._training.interrupted(Event.DEADLINE))
            case KeyboardInterrupt():
                self._run(self._training.interrupted(Event.INTERRUPT))
            case AirflowTaskTerminated():
                self.kill("Airflow has terminated the task")
                self.check()
            case NoRightError():
                self._run(self._training.interrupted(Event.NO_RIGHT))
            case Exception():
                final = isinstance(error, AirflowFailException) or (isinstance(error, KtrainError) and error.final)
                self._run(self._training.interrupted(Event.FINAL_ERROR if final else Event.ERROR))
            case _:
                self._run(self._training.interrupted(Event.KILL))

    def _run(self, work: Awaitable[T]) -> T:
        """Run a coroutine in the event loop, which is opened again after `_close`."""
        try:
            return self._loop.run(work)
        except Stopped as e:
            self._killed = TrainingKilledError(str(e))
            raise self._killed from None

    def kill(self, reason: str) -> None:
        """Ask this execution to end. A signal handler may call this: it sets a flag and wakes the event loop."""
        self._stop.request(reason)

    def check(self) -> None:
        """Raise after a kill: Airflow lets a task continue after `on_kill`.

        :raises TrainingKilledError: `kill` was called; what happens to the job is decided and done.
        """
        if self._stop.reason is None:
            return
        if self._killed is None:
            self._killed = TrainingKilledError(str(cause_of(self._run(self._training.stop()))))
        raise self._killed

    def expect(self, submission: Submission, on_finish_action: OnFinishAction) -> None:
        """From now on, a job of this task may exist."""
        self._training.job.options = Options(on_finish_action=on_finish_action)
        self._training.job.expect(submission)
        self.check()

    def submit(self, submission: Submission) -> Submitted:
        """Create or adopt the job, which `expect` has announced."""
        self.check()
        began = self._loop.now()
        submitted = self._run(self._training.submit(submission))
        self.handover.metrics["seconds.submit"] = round(self._loop.now() - began, 3)
        return submitted

    def follow(
        self,
        ref: JobRef,
        options: Options,
        until: float | None,
        *,
        patience: float = 0.0,
        first: Noticed | None = None,
    ) -> Outcome | None:
        """Follow the job as `Training.follow` does; None if `until` has passed, and then `handover` is set."""
        self.check()
        ended = self._run(self._training.follow(ref, options, until=until, patience=patience, first=first))
        if isinstance(ended, Handover):
            self._training.handover = ended
            self.check()
            return None
        if self._stop.reason is not None and not ended.succeeded:
            self._killed = TrainingKilledError(str(cause_of(ended)))
        return ended

    def follow_on(self, deferral: Deferral, until: float | None, *, patience: float, first: Noticed) -> Outcome | None:
        """Follow a job that this try submitted before it deferred: from now on a kill may release it."""
        training = self._training
        training.job.ref, training.job.options, training.handover = deferral.job, deferral.options, deferral.handover
        return self.follow(deferral.job, deferral.options, until, patience=patience, first=first)

    def watch(self, ref: JobRef, options: Options, timeout: float | None = None) -> Outcome:
        """Follow a job that somebody else submitted; it is never released."""

        async def watching() -> Outcome | Handover:
            async with asyncio.timeout(timeout):
                return await self._training.follow(ref, options)

        try:
            ended = self._run(watching())
        except TimeoutError:
            self._run(self._training.interrupted(Event.WAIT_EXPIRED))
            raise
        assert not isinstance(ended, Handover)  # only with `until`
        return ended

    def repeat_lines(self, deferral: Deferral, repetition: Repetition, seconds: float) -> None:
        """Log the lines of the trigger again, as `Training.repeat_lines` does. A kill only ends this."""
        self._run(self._training.repeat_lines(deferral, repetition, seconds))

    def outcome_stored(self, ref: JobRef, event: Event) -> str:
        """Delete a job that has ended; returns why that failed, or an empty string.

        :param event: OUTCOME_STORED, OUTCOME_NOT_STORED, SUCCESS_FOUND or KEPT_UNRELEASED.
        """
        return self._run(self._training.outcome_stored(ref, event))

    def call(self, ask: Callable[[Api, str], Awaitable[T]]) -> T:
        """Run a coroutine function with the API and the connection's namespace."""
        return self._run(self._training.call(lambda api: ask(api, self._hook.namespace or "default")))
