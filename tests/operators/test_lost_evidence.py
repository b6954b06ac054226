"""A task whose requests fail, or whose try Airflow has lost, neither repeats a training nor loses its job."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowTaskTimeout, TaskDeferred

from airflow_provider_ktrain.core.identity.reaping import judge
from airflow_provider_ktrain.engine.follow.outcome import Outcome, event_of
from airflow_provider_ktrain.exceptions import TrainingKilledError
from tests.apiserver import Object
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection
from tests.operators.small_cluster import JOBS, RESULT, TRAINS_FOR, Operator, event_of_trigger, small_cluster
from tests.operators.task_instance import Instance, Supervisor, supervised

PROGRAM = ["train"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Operator, TestCluster]]:
    with small_cluster(tmp_path_factory.mktemp("small")) as made:
        yield made


@pytest.fixture
def operator(small: tuple[Operator, TestCluster]) -> Iterator[Operator]:
    made, _ = small
    made.created = made.deleted_alive = 0
    yield made
    made.api.slow("", 0)
    made.trains_for = TRAINS_FOR
    made.api.objects.clear()


@pytest.fixture
def task(small: tuple[Operator, TestCluster], operator: Operator, monkeypatch: pytest.MonkeyPatch) -> Instance:
    _, cluster = small
    set_connection(cluster, monkeypatch)
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "0")
    return Instance(cluster)


def deferred(task: Instance, **how: Any) -> TaskDeferred:
    ended = task.execute(command=PROGRAM, **how)
    assert isinstance(ended, TaskDeferred)
    return ended


def event(task: Instance, of: Any, state: str = "deferred") -> Object:
    """The event of the trigger of a deferral."""
    assert task.operator is not None
    return asyncio.run(event_of_trigger(of.trigger.serialize()[1], state, task.operator.log))


# a read or a release fails


def test_success_survives_failed_reads_after_a_deferral_timeout(task: Instance, operator: Operator) -> None:
    deferred(task, retries=1)
    task.wait_ended()
    operator.api.fail("GET", f"/{JOBS}/", 500, count=3)
    assert task.fail("Trigger timeout") == RESULT
    assert operator.created == 1


def test_success_after_a_release_that_failed_is_a_success(task: Instance, operator: Operator) -> None:
    """A limit has passed, the trigger could not release the job, and it succeeds before a worker resumes the task."""
    deferred(task, retries=1)
    task.wait_ended()
    cause = {"category": "timeout", "summary": "no log line for 600 s"}
    failed = event_of(Outcome("Running", False, cause=cause, release_error="the API server can't be reached"))
    assert task.resume(failed) == RESULT
    assert (operator.created, operator.deleted_alive) == (1, 0)


@pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
def test_success_survives_a_release_that_fails(task: Instance, operator: Operator, retries: int) -> None:
    """The job can't be deleted after its success."""
    operator.api.fail("DELETE", f"/{JOBS}/", 403, count=float("inf"))
    try:
        result = task.execute(command=PROGRAM, deferrable=False, retries=retries)
    finally:
        operator.api.clear_failures()
    assert result == RESULT
    assert not operator.alive()


# a try is lost


@pytest.mark.parametrize("has_state", [True, False], ids=["", "below Airflow 3.3"])
def test_invalid_parameter_of_a_retry_does_not_lose_the_job(
    task: Instance, operator: Operator, has_state: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job of the lost try is adopted."""
    task.has_state = has_state
    deferred(task, retries=1)
    again: dict[str, Any] = {"number": 2, "retries": 1, "rendered": {"gpus": "no number"}}
    assert task.execute(command=PROGRAM, deferrable=False, **again) == RESULT
    assert operator.created == 1


def test_retry_adopts_the_job_of_a_try_that_a_stale_event_has_failed(task: Instance, operator: Operator) -> None:
    """Airflow fails a deferred try by a late event of its executor. Its trigger may go on beside the retry."""
    first = deferred(task, retries=1)
    assert task.execute(command=PROGRAM, deferrable=False, number=2, retries=1) == RESULT
    before = list(operator.api.writes())
    late = event(task, first, "up_for_retry")
    assert not late["outcome"]["succeeded"]
    assert operator.api.writes() == before
    assert (operator.created, operator.deleted_alive) == (1, 0)


def test_success_after_a_stale_event_without_a_retry_is_left_to_the_reaper(task: Instance, operator: Operator) -> None:
    """The trigger frees the pods and keeps the job, whose status is the only proof of its success."""
    assert event(task, deferred(task), "failed")["outcome"]["succeeded"]
    (job,) = operator.api.objects[JOBS].values()
    assert not operator.alive()
    verdict = judge(job, "tests", "failed", 0)
    assert verdict.orphan, verdict.reason


# an interruption


@pytest.fixture
def interrupt() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Sets what a signal does in the task's process."""
    actions: list[Callable[[], None]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: actions[-1]())
    yield actions.append
    signal.signal(signal.SIGUSR1, before)


def _raise_timeout() -> None:
    raise AirflowTaskTimeout("execution_timeout")


def killed(task: Instance) -> None:
    """What Airflow's signal handler does."""
    if task.operator is not None:
        task.operator.on_kill()


def _kill(task: Instance) -> None:
    assert task.operator is not None
    task.operator.on_kill()


@pytest.mark.parametrize("seconds", [0.5, 2.0, 3.5])
@pytest.mark.parametrize("how", ["execution_timeout", "kill"])
def test_interruption_of_a_create_leaves_no_job(
    task: Instance, operator: Operator, interrupt: Any, how: str, seconds: float
) -> None:
    """The API server creates the job some seconds after the task was interrupted."""

    def on_request(line: str) -> None:
        if line.startswith("POST"):  # the whole request has been sent when the signal comes
            main = threading.main_thread().ident or 0
            asyncio.get_running_loop().call_later(0.2, signal.pthread_kill, main, signal.SIGUSR1)

    interrupt(_raise_timeout if how == "execution_timeout" else lambda: killed(task))
    operator.api.on_request = on_request
    operator.api.slow("before POST", seconds)
    expected = AirflowTaskTimeout if how == "execution_timeout" else TrainingKilledError
    try:
        with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(expected):
            task.execute(command=PROGRAM, deferrable=False)
    finally:
        operator.api.on_request = lambda line: None
    assert operator.created == 1, "the create was not interrupted"
    assert not operator.alive()


class LockedOutput(io.StringIO):
    """Receives the signal while a line is written, under a lock that isn't reentrant, as structlog's is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.lock, self.deadlocks = text, threading.Lock(), 0

    def write(self, text: str) -> int:
        if not self.lock.acquire(timeout=30):
            self.deadlocks += 1
            return 0
        try:
            if self.text in text:
                self.text = "\0"
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return super().write(text)
        finally:
            self.lock.release()


def interrupted_while_logging(line: str, task: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    output = LockedOutput(line)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        try:
            task.execute(command=PROGRAM, deferrable=False)
        finally:
            assert output.text == "\0", "the signal was not sent"
            assert not output.deadlocks


@pytest.mark.parametrize("line", ["Submitted manifest", "is Running"])
def test_kill_while_a_line_is_logged(
    task: Instance, operator: Operator, interrupt: Any, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """The signal handler sets a flag and wakes the event loop: it logs nothing and waits for no lock."""
    operator.trains_for = 600.0
    interrupt(lambda: killed(task))
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError):
        interrupted_while_logging(line, task, monkeypatch)
    assert not operator.alive()


def test_timeout_while_a_line_of_the_training_is_logged(
    task: Instance, operator: Operator, interrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's signal handler logs that `execution_timeout` has passed, and would wait for ever for its own lock."""

    def handle_timeout() -> None:
        sys.stdout.write("Process timed out\n")
        _raise_timeout()

    operator.trains_for = 600.0
    interrupt(handle_timeout)
    with pytest.raises(AirflowTaskTimeout):
        interrupted_while_logging("is Running", task, monkeypatch)
    assert not operator.alive()
