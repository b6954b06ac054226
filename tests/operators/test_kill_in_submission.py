"""A kill while the submission fails, and a kill while the client is closed after the deferral."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowTaskTerminated, TaskDeferred

from airflow_provider_ktrain.core.errors import ClusterError
from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction
from airflow_provider_ktrain.engine.submit.create_or_adopt import Posting, Submitted
from airflow_provider_ktrain.exceptions import TrainingKilledError
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.worker_host import WorkerHost
from tests.operators.task_instance import Supervisor, Ti, supervised


class NoClusterHook(TrainingHook):
    """Gives no client: nothing in this test sends a request."""

    @contextlib.asynccontextmanager
    async def api(self, ref: JobRef | None = None) -> AsyncIterator[Any]:
        yield None


class FailingSubmission:
    """Is killed, and fails at the same time. `searched` is set when the job is looked for afterwards."""

    host: WorkerHost
    searched = False

    async def carry_out(self, api: Any, log: Any, *, posting: Posting) -> Submitted:
        self.host.kill("the task received SIGTERM")
        raise ClusterError("the API server can't create the job now")

    @property
    def delete_command(self) -> str:
        return "kubectl delete"

    async def find(self, api: Any) -> Submitted | None:
        self.searched = True
        return None


def test_error_of_a_killed_submission_does_not_keep_the_job() -> None:
    """The request may have created the job although the submission failed, and after a kill no retry adopts it."""
    submission = FailingSubmission()
    host = WorkerHost(NoClusterHook(), logging.getLogger(__name__), Ti("run", 1, 1))
    submission.host = host
    host.expect(submission, OnFinishAction.DELETE_JOB)
    killed = pytest.raises(TrainingKilledError, match="was killed before it had submitted a job")
    with supervised(Supervisor(None)), killed, host:
        host.submit(submission)
    assert submission.searched


class KilledHook(NoClusterHook):
    """Its client is being closed when the task is killed.

    :param error: what the signal handler raises, besides calling `on_kill`. None: nothing.
    """

    host: WorkerHost
    was_closed = False

    def __init__(self, error: type[BaseException] | None) -> None:
        super().__init__()
        self._error = error

    @contextlib.asynccontextmanager
    async def api(self, ref: JobRef | None = None) -> AsyncIterator[Any]:
        yield None
        was_closed, self.was_closed = self.was_closed, True
        self.host.kill("the task received SIGTERM")
        if self._error is not None and not was_closed:
            raise self._error


@pytest.mark.parametrize("error", [None, AirflowTaskTerminated])
def test_kill_after_the_deferral_looks_for_the_job(error: type[BaseException] | None) -> None:
    """Airflow rejects the deferral of a task that was killed, so no trigger will release the job."""
    submission, hook = FailingSubmission(), KilledHook(error)
    hook.host = WorkerHost(hook, logging.getLogger(__name__), Ti("run", 1, 1))
    hook.host.expect(submission, OnFinishAction.DELETE_JOB)

    async def open_client(api: Any, namespace: str) -> None: ...

    hook.host.call(open_client)
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError), hook.host:
        raise TaskDeferred(trigger=None, method_name="execute_complete")
    assert submission.searched


class CutOffHook(NoClusterHook):
    """While its client and the event loop are closed, a signal comes, whose handler raises an exception.

    :param rounds: of the loop until then.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds
        self.raised = threading.Event()

    @contextlib.asynccontextmanager
    async def api(self, ref: JobRef | None = None) -> AsyncIterator[Any]:
        yield None
        loop, main = asyncio.get_running_loop(), threading.main_thread().ident or 0

        def wait_or_raise() -> None:
            self._rounds -= 1
            if self._rounds == 0:
                signal.pthread_kill(main, signal.SIGUSR1)
                assert self.raised.wait(60)
            if self._rounds > 0:
                loop.call_soon(wait_or_raise)

        loop.call_soon(wait_or_raise)


@pytest.mark.parametrize("rounds", range(1, 9))
def test_exception_while_the_event_loop_is_closed_does_not_keep_the_job(rounds: int) -> None:
    """The run that looks for the job opens the loop again if it must."""
    submission, hook = FailingSubmission(), CutOffHook(rounds)
    host = WorkerHost(hook, logging.getLogger(__name__), Ti("run", 1, 1))
    host.expect(submission, OnFinishAction.DELETE_JOB)

    def on_signal(*_: object) -> None:
        hook.raised.set()
        raise SystemExit

    async def open_client(api: Any, namespace: str) -> None: ...

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        host.call(open_client)
        ends = pytest.raises((SystemExit, TaskDeferred))
        with supervised(Supervisor(TaskInstanceState.FAILED)), ends as ended, host:
            raise TaskDeferred(trigger=None, method_name="execute_complete")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert submission.searched == (ended.type is SystemExit)  # the last rounds come after the loop is closed
    assert submission.searched or rounds > 1
