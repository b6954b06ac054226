"""Whose job it is that a try finds: its own, one of a run that was deleted, or one whose owner can't be read."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION
from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingKilledError, TrainingUserCodeError
from airflow_provider_ktrain.operators.job_control import DeleteTrainingJobOperator
from tests.apiserver.messages import failure
from tests.operators.task_instance import Store, Supervisor, supervised
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

RESULT = {"loss": 0.5}
PROGRAM = ["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 2"""]


def change(task: VirtualInstance, owner: str | None) -> None:
    """Replace the owner annotation of the job, or remove it."""
    (job,) = task.jobs()

    def changed(one: dict[str, Any]) -> None:
        annotations = one["metadata"]["annotations"]
        annotations.pop(OWNER_ANNOTATION)
        annotations.update({} if owner is None else {OWNER_ANNOTATION: owner})

    task.api.change(task.kind.plural, job["metadata"]["name"], changed)


# its own


@pytest.mark.parametrize("retries", [1, 0])
def test_try_does_not_replace_the_failed_job_that_it_has_created(instance: VirtualInstance, retries: int) -> None:
    """The response to the create is lost, and the program has failed when the try finds its job."""
    instance.api.slow("after POST .*/pytorchjobs", 5.0)
    instance.api.replace("POST", "/pytorchjobs", failure(504))
    with pytest.raises(TrainingUserCodeError, match="exit code 3"):
        instance.execute(command=["sh", "-c", "exit 3"], deferrable=False, retries=retries)
    assert instance.api.created == 1


def test_try_ends_when_its_own_job_is_deleted(instance: VirtualInstance) -> None:
    """Somebody deletes it before the try has found it."""
    instance.api.slow("after POST .*/pytorchjobs", 5.0)
    instance.api.replace("POST", "/pytorchjobs", failure(504))

    def delete() -> None:
        instance.set_finalizers("example.com/slow")
        instance.delete()
        instance.world.after(30, instance.set_finalizers)

    instance.when(instance.running, delete)
    with pytest.raises(Exception, match="deleted by someone else"):
        instance.execute(deferrable=False)
    assert instance.api.created == 1


# a deleted run


@pytest.mark.parametrize("has_state", [True, False], ids=["", "the store was written by no try"])
def test_result_of_a_deleted_run_is_not_taken(instance: VirtualInstance, has_state: bool) -> None:
    """The run is created again with the same id, and its first try ends before it submits."""
    instance.has_state = has_state
    kept: dict[str, Any] = {"command": PROGRAM, "retries": 1, "on_finish_action": "keep_job", "deferrable": False}
    assert instance.execute(**kept) == RESULT
    (deleted,) = instance.jobs()
    instance.store, instance.has_state = Store(), True
    assert instance.execute(number=2, **kept) == RESULT
    assert (instance.jobs()[0]["metadata"]["uid"] == deleted["metadata"]["uid"]) is not has_state


# an owner that can't be read


@pytest.mark.parametrize("owner", ["", "{", '{"try_number": 1}'])
def test_retry_refuses_a_job_whose_owner_cannot_be_read(instance: VirtualInstance, owner: str) -> None:
    assert isinstance(instance.execute(retries=1), TaskDeferred)
    change(instance, owner)
    with pytest.raises(TrainingClusterError, match="its owner can't be read"):
        instance.execute(number=2, retries=1)
    assert (instance.api.created, instance.api.deleted_alive) == (1, 0)


@pytest.mark.parametrize("retries", [1, 0])
@pytest.mark.parametrize("state", [TaskInstanceState.FAILED, TaskInstanceState.RUNNING])
def test_kill_changes_no_job_whose_owner_cannot_be_read(
    instance: VirtualInstance, capsys: pytest.CaptureFixture[str], state: TaskInstanceState, retries: int
) -> None:
    changed_at: list[float] = []

    def changed() -> None:
        change(instance, "{")
        changed_at.append(instance.clock)

    instance.when(instance.running, changed)
    instance.kill_when(lambda: changed_at and instance.clock > changed_at[0] + 2)
    with supervised(Supervisor(state)), pytest.raises(TrainingKilledError):
        instance.execute(deferrable=False, retries=retries)
    assert instance.running()
    assert not [write for write in instance.api.writes() if "DELETE" in str(write)]
    assert "can't be read, and is not changed" in (log := capsys.readouterr().out)
    assert "To delete it, run: kubectl delete" in log


def test_end_of_a_job_whose_owner_cannot_be_read_is_reported(instance: VirtualInstance) -> None:
    instance.when(instance.running, lambda: change(instance, "{"))
    assert instance.execute(command=PROGRAM, deferrable=False) == RESULT
    assert len(instance.jobs()) == 1


def test_limit_ends_no_job_whose_owner_cannot_be_read(instance: VirtualInstance) -> None:
    instance.when(instance.running, lambda: change(instance, "{"))
    with pytest.raises(Exception, match="can't be read, and is not changed"):
        instance.execute(deferrable=False, log_stall_timeout=5, retries=1)
    assert instance.running()


@pytest.mark.parametrize("force", [False, True])
def test_operator_deletes_a_job_whose_owner_cannot_be_read_only_by_force(
    instance: VirtualInstance, force: bool
) -> None:
    instance.execute()
    change(instance, "{")
    assert instance.ti is not None
    job = instance.ti.xcoms["job"]
    delete = DeleteTrainingJobOperator(task_id="delete", kind=job["kind"], job_name=job["name"], force=force)
    if force:
        delete.execute(instance.context)
    else:
        with pytest.raises(Exception, match="the owner annotation can't be read"):
            delete.execute(instance.context)
    assert bool(instance.jobs()) is not force


def test_missing_owner_is_another_thing(instance: VirtualInstance) -> None:
    """Who followed the job goes on with it by its uid."""
    instance.when(instance.running, lambda: change(instance, None))
    assert instance.execute(command=PROGRAM, deferrable=False) == RESULT
    assert not instance.jobs()
