"""`on_kill` in the worker's signal handler, at any moment: Airflow's state of the task decides within its 5 seconds.

A killed task raises and its job is deleted. If only the worker is stopped, the job runs on for the next try.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowTaskTimeout
from airflow.sdk.execution_time.comms import GetTaskStates

from airflow_provider_ktrain.core.kinds import Manifest
from airflow_provider_ktrain.exceptions import TrainingKilledError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from tests.operators.task_instance import Instance, Store, Supervisor, of_each_kind, supervised

AIRFLOWS_PATIENCE = 5.0  # seconds from the signal to SIGKILL


@pytest.fixture(autouse=True)
def supervisor() -> Iterator[Supervisor]:
    """Airflow's supervisor process, which has the task's state: a user has marked it failed."""
    with supervised(Supervisor(TaskInstanceState.FAILED)) as answers:
        yield answers


def check_killed(instance: Instance, match: str | None = "The task was killed", **parameters: Any) -> str:
    with pytest.raises(TrainingKilledError, match=match) as error:
        instance.execute(**parameters)
    assert instance.clock - instance.interrupted_at < AIRFLOWS_PATIENCE
    return str(error.value)


@pytest.mark.parametrize("deferrable", [False, True])
def test_kill_while_following_releases_the_job(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, deferrable: bool
) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "60")
    instance.kill_when(instance.running)
    output = check_killed(instance, deferrable=deferrable)
    assert "Its pods are being terminated." in output
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


class Hanging(Supervisor):
    """Doesn't answer requests for states, as while Airflow's API server is unavailable."""

    def __init__(self, instance: Instance) -> None:
        super().__init__(TaskInstanceState.FAILED)
        self._instance = instance

    def send(self, message: Any) -> Any:
        if isinstance(message, GetTaskStates):
            self._instance.block(60.0)
        return super().send(message)


STATES: dict[str, tuple[TaskInstanceState | Exception, bool, bool]] = {
    "failed": (TaskInstanceState.FAILED, False, False),
    "success": (TaskInstanceState.SUCCESS, False, False),
    "cleared": (TaskInstanceState.RESTARTING, False, False),
    "deleted": (TaskInstanceState.REMOVED, False, False),
    "stopped": (TaskInstanceState.RUNNING, True, False),
    "lost, and retried": (TaskInstanceState.UP_FOR_RETRY, True, True),
    "Airflow refuses": (RuntimeError("no database"), True, False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
def test_state_of_the_task_decides_about_the_job(
    instance: Instance, supervisor: Supervisor, state: str, retries: int
) -> None:
    answer, kept_with_retry, kept_without = STATES[state]
    supervisor.states = [answer]
    instance.kill_when(instance.running)
    output = check_killed(instance, match=None, deferrable=False, retries=retries)
    kept = kept_with_retry if retries else kept_without
    alive = [job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]
    assert bool(alive) is kept
    assert ("released" in output) is not kept


def test_retry_adopts_a_kept_job(instance: Instance, supervisor: Supervisor) -> None:
    supervisor.states = [TaskInstanceState.RUNNING]
    instance.kill_when(instance.running)
    check_killed(instance, "while the task was running", deferrable=False, retries=1)
    (before,) = instance.jobs()
    again = instance.execute(number=2, retries=1)
    assert again.trigger.job["uid"] == before["metadata"]["uid"]


@of_each_kind
@pytest.mark.embedded("blocks a thread for a minute outside of virtual time")
@pytest.mark.parametrize("retries", [1, 0], ids=["a retry is left", "no retry is left"])
def test_kill_without_an_answer_from_airflow_keeps_the_job_for_a_retry(instance: Instance, retries: int) -> None:
    """The request for the state uses only a part of the 5 s."""
    with supervised(Hanging(instance)):
        instance.kill_when(instance.running)
        output = check_killed(instance, "Airflow did not report the task's state", deferrable=False, retries=retries)
    assert bool([job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]) is bool(retries)
    assert ("No retry is left" in output) is not bool(retries)


class Breaks:
    """Extends an operator: raises an error of our own while the job is followed."""

    def _options(self, _: Any) -> Any:
        raise ValueError("no options")


@of_each_kind
def test_error_keeps_the_job_for_the_retry(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """The training is not affected."""
    with pytest.raises(ValueError, match="no options"):
        instance.execute(retries=1, operator=Breaks)
    (before,) = instance.jobs()
    assert "deletionTimestamp" not in before["metadata"]
    assert "runs on for the next try" in capsys.readouterr().out
    again = instance.execute(number=2, retries=1)
    assert again.trigger.job["uid"] == before["metadata"]["uid"]


@of_each_kind
def test_error_without_a_retry_releases_a_new_job(instance: Instance) -> None:
    with pytest.raises(ValueError, match="no options"):
        instance.execute(operator=Breaks)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


def test_execution_timeout_releases_the_job(instance: Instance) -> None:
    """The user set this limit, so it also applies if a retry is left."""

    class TimedOut(PyTorchJobOperator):
        def _options(self, _: Any) -> Any:
            raise AirflowTaskTimeout("execution_timeout")

    with pytest.raises(AirflowTaskTimeout):
        instance.execute(operator=TimedOut, retries=1)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


def test_kill_releases_the_job_of_an_earlier_try(instance: Instance) -> None:
    """The task is marked failed before the retry has adopted the job: nobody else would release it."""
    instance.execute(number=1, retries=1)

    class KilledEarly(PyTorchJobOperator):
        def build_manifest(self, *args: Any, **kwargs: Any) -> Manifest:
            self.on_kill()
            return super().build_manifest(*args, **kwargs)

    with pytest.raises(TrainingKilledError):
        instance.execute(number=2, retries=1, operator=KilledEarly)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


def test_kill_after_the_handover_is_left_to_the_trigger(instance: Instance) -> None:
    instance.execute(retries=0)
    assert instance.operator is not None
    instance.operator.on_kill()
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]


def test_kill_before_the_deferral_releases_the_job(instance: Instance) -> None:
    """The worker stores what the trigger needs; Airflow doesn't accept the deferral of a task that has ended."""

    class Killed(Store):
        def set(self, key: str, value: Any) -> None:
            super().set(key, value)
            if key == "ktrain_deferral" and instance.operator is not None:
                instance.operator.on_kill()

    instance.store = Killed()
    with pytest.raises(TrainingKilledError, match="The task was killed"):
        instance.execute()
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


@pytest.mark.parametrize(("state", "kept"), [(TaskInstanceState.FAILED, False), (TaskInstanceState.RUNNING, True)])
def test_kill_while_following_after_a_failed_trigger(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str],
    state: TaskInstanceState, kept: bool,
) -> None:  # fmt: skip
    instance.execute(retries=1)
    supervisor.states = [state]
    capsys.readouterr()
    output: list[str] = []

    def follows() -> bool:
        output.append(capsys.readouterr().out)
        return "is Running" in "".join(output)

    instance.kill_when(follows)
    with pytest.raises(TrainingKilledError):
        instance.fail("Trigger failure", traceback=["ImportError: no module\n"])
    assert bool([job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]) is kept


def test_kill_before_the_first_request_creates_no_job(instance: Instance) -> None:
    """Airflow lets `execute` continue after `on_kill`."""

    class KilledEarly(PyTorchJobOperator):
        def build_manifest(self, *args: Any, **kwargs: Any) -> Manifest:
            self.on_kill()
            return super().build_manifest(*args, **kwargs)

    with pytest.raises(TrainingKilledError, match=r"(?i)the task was killed"):
        instance.execute(operator=KilledEarly)
    assert not instance.jobs()


def test_kill_suspends_a_job_that_is_kept(instance: Instance) -> None:
    instance.kill_when(instance.running)
    check_killed(instance, deferrable=False, on_finish_action="keep_job")
    (job,) = instance.jobs()
    assert job["spec"]["runPolicy"]["suspend"] is True


@of_each_kind
def test_kill_during_the_create_releases_the_job(instance: Instance) -> None:
    """The task is killed at about the time at which the response to its create arrives."""
    instance.kill_when(instance.jobs)
    check_killed(instance, deferrable=False)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


@of_each_kind
@pytest.mark.embedded("sets fault switches")
def test_kill_during_submission_creates_no_job(instance: Instance) -> None:
    instance.cluster.admin("status", status=503, verb="create", path=f"/{instance.kind.plural}", seconds=60)
    try:
        instance.kill_when(lambda: "ktrain_submission" in instance.store)
        check_killed(instance, deferrable=False)
    finally:
        instance.cluster.admin("clear")
    assert not instance.jobs()


@of_each_kind
@pytest.mark.embedded("sets fault switches")
def test_kill_retries_while_the_api_server_is_unavailable(instance: Instance) -> None:
    """Requests are retried for as long as Airflow allows it, beyond the seconds reserved for a kill."""

    def away() -> bool:
        if instance.running():
            instance.cluster.admin("status", status=503, path=f"/{instance.kind.plural}", seconds=3.0)
        return bool(instance.running())

    instance.kill_when(away)
    with pytest.raises(TrainingKilledError, match=r"(?i)the task was killed"):
        instance.execute(deferrable=False)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())
