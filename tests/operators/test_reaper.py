"""The reaper operator: it releases a job only after two checks, and never a job that a process follows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION, Owner
from airflow_provider_ktrain.exceptions import TrainingConfigurationError, TrainingJobError
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator, _release
from tests.engine.tasks import EvictedApi
from tests.operators.task_instance import Instance, Supervisor, of_each_kind, supervised
from tests.operators.virtual_instance import VirtualInstance

RESULT = 'KTRAIN_RESULT {"loss": 0.5}'


@pytest.fixture
def supervisor(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Airflow reports that the task has failed, but its job exists. The deployment belongs to this test only."""
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", instance.run_id)
    with supervised(Supervisor(TaskInstanceState.FAILED)) as answers:
        instance.execute()
        yield answers


def look(instance: Instance, **parameters: Any) -> tuple[ReapTrainingJobsOperator, dict[str, Any]]:
    """The first check; returns the event that passes its findings to the second."""
    reaper = ReapTrainingJobsOperator(task_id="reap", **parameters)
    try:
        assert reaper.execute(instance.context) == []
    except TaskDeferred as deferred:
        return reaper, {"version": 1, "candidates": deferred.trigger.candidates}
    return reaper, {}


@of_each_kind
def test_orphaned_job_is_released_at_the_second_look(instance: Instance, supervisor: Supervisor) -> None:
    (job,) = instance.jobs()
    reaper, found = look(instance, dry_run=False)
    assert instance.jobs(), "not at the first"
    meta = job["metadata"]
    assert reaper.second_look(instance.context, found) == [f"{instance.kind.name} {meta['namespace']}/{meta['name']}"]
    assert not instance.jobs()
    assert not instance.running()


def test_dry_run_is_the_default(instance: Instance, supervisor: Supervisor) -> None:
    reaper, found = look(instance)
    assert len(reaper.second_look(instance.context, found)) == 1
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]


def test_max_jobs_limits_the_releases(instance: Instance, supervisor: Supervisor) -> None:
    instance.execute(number=2, max_tries=1, name="other")  # after a clear with a new name, the old job remains
    reaper, found = look(instance, dry_run=False, max_jobs=1)
    assert len(found["candidates"]) == 2
    assert len(reaper.second_look(instance.context, found)) == 1
    assert len(instance.jobs()) == 1


@pytest.mark.parametrize("state", [TaskInstanceState.DEFERRED, TaskInstanceState.UP_FOR_RETRY, None, RuntimeError()])
def test_followed_job_is_not_a_candidate(instance: Instance, supervisor: Supervisor, state: Any) -> None:
    supervisor.states = [state]
    _, found = look(instance, dry_run=False)
    assert not found
    assert instance.jobs()


def test_job_followed_again_before_the_second_look_is_kept(instance: Instance, supervisor: Supervisor) -> None:
    reaper, found = look(instance, dry_run=False)
    supervisor.states = [TaskInstanceState.RUNNING]
    assert reaper.second_look(instance.context, found) == []
    assert instance.jobs()


def test_job_adopted_before_the_second_look_is_kept(instance: Instance, supervisor: Supervisor) -> None:
    """Its task has failed again since: for the second check, this is the first check of another try's job."""
    reaper, found = look(instance, dry_run=False)
    instance.execute(number=2, retries=1, max_tries=2)
    assert reaper.second_look(instance.context, found) == []
    assert instance.jobs()


@pytest.mark.parametrize(("action", "kept"), [("delete_job", False), ("keep_job", True)])
def test_ended_job_that_was_not_deleted_is_released(
    instance: Instance, supervisor: Supervisor, action: str, kept: bool
) -> None:
    """Its task was marked between the trigger's event and `execute_complete`."""
    instance.delete()
    deferred = instance.execute(number=2, max_tries=1, command=["sh", "-c", "sleep 5"], on_finish_action=action)
    assert instance.event(deferred)["outcome"]["succeeded"]
    assert len(instance.jobs()) == 1
    reaper, found = look(instance, dry_run=False)
    assert len(reaper.second_look(instance.context, found)) == (not kept)
    assert bool(instance.jobs()) is kept


@of_each_kind
@pytest.mark.parametrize(
    ("program", "said"),
    [(f"echo '{RESULT}'; sleep 5", RESULT), ("sleep 5", "It has reported no result.")],
)
def test_success_that_airflow_did_not_take_is_logged_before_its_job_is_deleted(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str], program: str, said: str
) -> None:
    """No worker could resume the task, so that Airflow has failed it."""
    instance.delete()
    deferred = instance.execute(number=2, max_tries=1, command=["sh", "-c", program])
    assert instance.event(deferred)["outcome"]["succeeded"]
    reaper, found = look(instance, dry_run=False)
    capsys.readouterr()
    assert len(reaper.second_look(instance.context, found)) == 1
    assert not instance.jobs()
    output = capsys.readouterr().out
    assert "succeeded, but its task is failed.\nIf you clear the task, it trains again.\n" + said in output


@pytest.mark.embedded("sets fault switches")
def test_unreadable_result_of_a_success_does_not_keep_its_job(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.delete()
    deferred = instance.execute(number=2, max_tries=1, command=["sh", "-c", "sleep 5"])
    assert instance.event(deferred)["outcome"]["succeeded"]
    reaper, found = look(instance, dry_run=False)
    instance.cluster.admin("status", status=403, path="/log")
    assert len(reaper.second_look(instance.context, found)) == 1
    assert not instance.jobs()
    assert "Its result is unknown: the log of Master 0 could not be read to its end" in capsys.readouterr().out


def test_concurrent_reapers_release_a_job_once(instance: Instance, supervisor: Supervisor) -> None:
    (one, found), (other, same) = look(instance, dry_run=False), look(instance, dry_run=False)
    assert found == same
    assert len(one.second_look(instance.context, found)) == 1
    assert other.second_look(instance.context, same) == []


def test_job_whose_pods_would_be_recreated_is_deleted() -> None:
    """A finished job is kept without pods, but an evicted MPIJob is deleted because its pods would be recreated."""
    evicted, completed = EvictedApi(), EvictedApi(completionTime="2026-11-21T10:00:00Z")
    asyncio.run(_release(evicted.ref, evicted, "ns"))
    asyncio.run(_release(completed.ref, completed, "ns"))
    assert evicted.job is None
    assert completed.job is not None
    assert not completed.pods


def test_jobs_of_another_deployment_are_not_candidates(
    instance: Instance, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", "another")
    _, found = look(instance, dry_run=False)
    assert not found


def test_reaper_needs_a_deployment_id(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID")
    with pytest.raises(TrainingConfigurationError, match=r"deployment_id.*AIRFLOW__KTRAIN__DEPLOYMENT_ID"):
        look(instance)


def test_job_followed_again_during_the_releases_is_kept(instance: Instance, supervisor: Supervisor) -> None:
    """Each release may take a minute."""
    instance.execute(number=2, max_tries=1, name="other")
    reaper, found = look(instance, dry_run=False)
    assert len(found["candidates"]) == 2
    supervisor.states = [*[TaskInstanceState.FAILED] * 3, TaskInstanceState.RUNNING]  # first both, then each
    assert len(reaper.second_look(instance.context, found)) == 1
    assert len(instance.jobs()) == 1


@pytest.mark.embedded("changes a job between two requests")
def test_job_adopted_before_its_release_is_not_reported(
    instance: VirtualInstance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another try adopts it after Airflow has said that the task is failed, and before the release reads the job."""

    class Adopting(Supervisor):
        def send(self, message: Any) -> Any:
            answer = super().send(message)
            if self.asked == 2:  # the first question was for the second check
                (job,) = instance.jobs()
                owner = Owner.of(job)
                assert isinstance(owner, Owner)
                adopted = {OWNER_ANNOTATION: replace(owner, try_number=2, ti_id="next").annotation()}
                name = job["metadata"]["name"]
                instance.api.change(instance.kind.plural, name, lambda j: j["metadata"]["annotations"].update(adopted))
            return answer

    reaper, found = look(instance, dry_run=False)
    with supervised(Adopting(TaskInstanceState.FAILED)):
        assert reaper.second_look(instance.context, found) == []
    assert instance.jobs()
    assert "belongs to another try now. Nothing was released." in capsys.readouterr().out


@pytest.mark.embedded("sets fault switches")
def test_failed_release_does_not_stop_the_others(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.execute(number=2, max_tries=1, name="other")
    reaper, found = look(instance, dry_run=False)
    first, second = (job["metadata"]["name"] for job in instance.jobs())
    instance.cluster.admin("status", status=500, verb="get", path=f"/pytorchjobs/{first}$")
    try:
        released = reaper.second_look(instance.context, found)
    finally:
        instance.cluster.admin("clear")
    namespace = instance.cluster.namespace
    assert released == [f"PyTorchJob {namespace}/{second}"]
    assert [job["metadata"]["name"] for job in instance.jobs()] == [first]
    assert f"PyTorchJob {namespace}/{first} was not released. The next run tries again" in capsys.readouterr().out


# namespaces


def test_one_namespace_can_be_a_string(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = look(instance, namespaces=instance.cluster.namespace)
    assert len(found["candidates"]) == 1
    where = f"of deployment '{instance.run_id}' in namespace '{instance.cluster.namespace}': 1 left over"
    assert f"Checked 1 job {where}" in capsys.readouterr().out


def test_searched_namespaces_are_logged(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    here = instance.cluster.namespace
    instance.delete()
    _, found = look(instance, namespaces=[here, "kube-system", here])
    assert not found
    message = f"Checked 0 jobs of deployment '{instance.run_id}' in namespaces '{here}', 'kube-system': 0 left over"
    assert message in capsys.readouterr().out


@pytest.mark.parametrize("namespaces", ["nowhere", ["kube-system", "nowhere"]], ids=["string", "list"])
def test_missing_namespace_fails_the_reaper(
    instance: Instance, supervisor: Supervisor, namespaces: str | list[str]
) -> None:
    with pytest.raises(TrainingJobError, match=r"Namespace 'nowhere' does not exist\. .* leads to http"):
        look(instance, namespaces=namespaces)


@pytest.mark.embedded("sets fault switches")
def test_reaper_continues_without_the_right_to_read_namespaces(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Role that `ktrain rbac` prints is namespaced and grants no right to read namespaces."""
    instance.cluster.admin("status", status=403, verb="get", path="/api/v1/namespaces/")
    _, found = look(instance)
    assert len(found["candidates"]) == 1
    assert f"Can't check that namespace '{instance.cluster.namespace}' exists" in capsys.readouterr().out
