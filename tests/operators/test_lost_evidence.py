"""A task whose requests fail, or whose try Airflow has lost, neither repeats a training nor loses its job."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowTaskTerminated, AirflowTaskTimeout, TaskDeferred

from airflow_provider_ktrain.core.identity.reaping import judge
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.exceptions import TrainingKilledError
from tests.operators.task_instance import Supervisor, supervised
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

RESULT = {"loss": 0.5}
PROGRAM = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 2"""]


def deferred(task: VirtualInstance, **how: Any) -> TaskDeferred:
    ended = task.execute(command=PROGRAM, **how)
    assert isinstance(ended, TaskDeferred)
    return ended


# a read or a release fails


def test_success_survives_failed_reads_after_a_deferral_timeout(instance: VirtualInstance) -> None:
    deferred(instance, retries=1)
    instance.wait_ended()
    instance.api.fail("GET", "/pytorchjobs/", 500, count=3)
    assert instance.fail("Trigger timeout") == RESULT
    assert instance.api.created == 1


def test_success_after_a_release_that_failed_is_a_success(instance: VirtualInstance) -> None:
    """A limit has passed, the trigger could not release the job, and it succeeds before a worker resumes the task."""
    deferred(instance, retries=1)
    instance.wait_ended()
    cause = {"category": "timeout", "summary": "no log line for 600 s"}
    failed = event_of(Outcome("Running", False, cause=cause, release_error="the API server can't be reached"))
    assert instance.resume(failed) == RESULT
    assert (instance.api.created, instance.api.deleted_alive) == (1, 0)


@pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
def test_success_survives_a_release_that_fails(instance: VirtualInstance, retries: int) -> None:
    """The job can't be deleted after its success."""
    instance.api.fail("DELETE", "/pytorchjobs/", 403, count=float("inf"))
    assert instance.execute(command=PROGRAM, deferrable=False, retries=retries) == RESULT
    assert not instance.running()


# a try is lost


@pytest.mark.parametrize("has_state", [True, False], ids=["", "below Airflow 3.3"])
def test_invalid_parameter_of_a_retry_does_not_lose_the_job(instance: VirtualInstance, has_state: bool) -> None:
    """The job of the lost try is adopted."""
    instance.has_state = has_state
    deferred(instance, retries=1)
    again: dict[str, Any] = {"number": 2, "retries": 1, "rendered": {"gpus": "no number"}}
    assert instance.execute(command=PROGRAM, deferrable=False, **again) == RESULT
    assert instance.api.created == 1


def test_retry_adopts_the_job_of_a_try_that_a_stale_event_has_failed(instance: VirtualInstance) -> None:
    """Airflow fails a deferred try by a late event of its executor. Its trigger may go on beside the retry."""
    first = deferred(instance, retries=1)
    assert instance.execute(command=PROGRAM, deferrable=False, number=2, retries=1) == RESULT
    before = list(instance.api.writes())
    with supervised(Supervisor(TaskInstanceState.UP_FOR_RETRY)):
        late = instance.event(first)
    assert not late["outcome"]["succeeded"]
    assert instance.api.writes() == before
    assert (instance.api.created, instance.api.deleted_alive) == (1, 0)


def test_success_after_a_stale_event_without_a_retry_is_left_to_the_reaper(instance: VirtualInstance) -> None:
    """The trigger frees the pods and keeps the job, whose status is the only proof of its success."""
    with supervised(Supervisor(TaskInstanceState.FAILED)):
        assert instance.event(deferred(instance))["outcome"]["succeeded"]
    (job,) = instance.jobs()
    assert not instance.running()
    verdict = judge(job, "tests", "failed", 0)
    assert verdict.orphan, verdict.reason


# an interruption


def _raise_timeout() -> None:
    raise AirflowTaskTimeout("execution_timeout")


def killed(task: VirtualInstance) -> Callable[[], None]:
    """What Airflow's signal handler does."""

    def kill() -> None:
        if task.operator is not None:
            task.operator.on_kill()

    return kill


@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.5])
@pytest.mark.parametrize("how", ["execution_timeout", "kill"])
def test_interruption_of_a_create_leaves_no_job(instance: VirtualInstance, how: str, seconds: float) -> None:
    """The API server creates the job some seconds after the task was interrupted."""

    def on_request(line: str) -> None:
        if line.startswith("POST"):  # the whole request has been sent when the signal comes
            instance.world.after(0.2, instance.interrupt)

    instance.on_interrupt(_raise_timeout if how == "execution_timeout" else killed(instance))
    instance.api.on_request = on_request
    instance.api.slow("before POST", seconds)
    expected = AirflowTaskTimeout if how == "execution_timeout" else TrainingKilledError
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(expected):
        instance.execute(command=PROGRAM, deferrable=False)
    assert instance.api.created == 1, "the create was not interrupted"
    assert not instance.jobs()


class LockedOutput(io.StringIO):
    """Receives the signal while a line is written, under a lock that isn't reentrant, as structlog's is."""

    def __init__(self, text: str, interrupt: Callable[[], None]) -> None:
        super().__init__()
        self.text, self.interrupt, self.lock, self.deadlocks = text, interrupt, threading.Lock(), 0

    def write(self, text: str) -> int:
        if not self.lock.acquire(timeout=30):
            self.deadlocks += 1
            return 0
        try:
            if self.text in text:
                self.text = "\0"
                self.interrupt()
            return super().write(text)
        finally:
            self.lock.release()


def interrupted_while_logging(line: str, task: VirtualInstance, monkeypatch: pytest.MonkeyPatch) -> Any:
    output = LockedOutput(line, task.interrupt)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        try:
            return task.execute(command=PROGRAM, deferrable=False)
        finally:
            assert output.text == "\0", "the signal was not sent"
            assert not output.deadlocks


@pytest.mark.parametrize("line", ["Submitted manifest", "is Running"])
def test_kill_while_a_line_is_logged(instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """The signal handler sets a flag and wakes the event loop: it logs nothing and waits for no lock."""
    instance.on_interrupt(killed(instance))
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError):
        interrupted_while_logging(line, instance, monkeypatch)
    assert not instance.jobs()


@pytest.mark.parametrize("state", [TaskInstanceState.RUNNING, TaskInstanceState.FAILED])
def test_kill_while_the_success_is_logged(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch, state: TaskInstanceState
) -> None:
    """The job has succeeded and its pods are released: nothing is left to decide, and the result is not lost."""
    instance.on_interrupt(killed(instance))
    with supervised(Supervisor(state)):
        assert interrupted_while_logging("succeeded after", instance, monkeypatch) == RESULT
    assert not instance.jobs()


def test_worker_that_is_terminated_after_its_success_says_that_the_training_had_ended(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped while the success is logged, and again, by an exception, while its job can't be deleted."""
    kill, stops = killed(instance), 0

    def handle_sigterm() -> None:
        nonlocal stops
        stops += 1
        kill()
        if stops == 1:
            instance.api.fail("DELETE", "/pytorchjobs/", 503, count=float("inf"))
            sent = len(instance.api.requests)
            instance.when(lambda: "DELETE" in str(instance.api.requests[sent:]), instance.interrupt)
        else:
            raise AirflowTaskTerminated("Task received SIGTERM signal")

    instance.on_interrupt(handle_sigterm)
    with (
        supervised(Supervisor(TaskInstanceState.FAILED)) as supervisor,
        pytest.raises(TrainingKilledError, match="after its training had ended"),
    ):
        interrupted_while_logging("succeeded after", instance, monkeypatch)
    assert stops == 2
    assert supervisor.asked
    assert not instance.running()


def test_timeout_while_a_line_of_the_training_is_logged(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's signal handler logs that `execution_timeout` has passed, and would wait for ever for its own lock."""

    def handle_timeout() -> None:
        sys.stdout.write("Process timed out\n")
        _raise_timeout()

    instance.on_interrupt(handle_timeout)
    with pytest.raises(AirflowTaskTimeout):
        interrupted_while_logging("is Running", instance, monkeypatch)
    assert not instance.jobs()
