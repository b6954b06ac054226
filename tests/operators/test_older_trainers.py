"""Trainers before 2.2: a submission is refused, and a job that runs there is adopted, released and reaped.

Their TrainJobs have no runtimePatches, so the pods don't have the labels of the task.
"""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingJobError, TrainingKilledError
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator
from tests.operators.task_instance import Supervisor, supervised
from tests.operators.virtual_instance import VirtualInstance

pytestmark = [
    pytest.mark.embedded("needs the scripted API server"),
    pytest.mark.parametrize("instance", [TRAINJOB], indirect=True, ids=["TrainJob"]),
]
OLDER = {"2.0": "podSpecOverrides", "2.1": "podTemplateOverrides"}
older = pytest.mark.parametrize("version", OLDER)
TRAINS = ["sh", "-c", """sleep 600; echo 'KTRAIN_RESULT {"loss": 0.5}'"""]
FAILS = ["sh", "-c", "sleep 600; exit 3"]
AGAIN: dict[str, Any] = {"number": 2, "retries": 1, "deferrable": False}


def submitted(instance: VirtualInstance, version: str, *command: str) -> str:
    """The uid of a job without patches on an older Trainer, as an earlier release has submitted it."""
    instance.api.trainer, instance.api.serves_schemas = OLDER[version], False
    with supervised(Supervisor(TaskInstanceState.DEFERRED)):
        assert isinstance(instance.execute(command=[*command], retries=1, deferrable=True), TaskDeferred)
    instance.api.serves_schemas = True
    (job,) = instance.jobs()
    assert "runtimePatches" not in job["spec"]
    assert not instance.pods(), "with the labels of the task"
    return str(job["metadata"]["uid"])


@pytest.mark.parametrize(
    ("field", "found"), [(OLDER["2.0"], "2.0"), (OLDER["2.1"], "2.1"), ("others", "older than 2.2")]
)
def test_submission_is_refused_and_may_be_retried(instance: VirtualInstance, field: str, found: str) -> None:
    instance.api.trainer = field
    with pytest.raises(TrainingClusterError) as error:
        instance.execute(command=TRAINS, deferrable=False)
    assert not isinstance(error.value, AirflowFailException)
    first = str(error.value).splitlines()[0]
    assert f"the cluster's Kubeflow Trainer is {found}: TrainJobs can be submitted only to 2.2 or newer" in first
    assert "have Kubeflow Trainer upgraded; a retry or a clear then submits the job" in str(error.value)
    assert instance.api.created == 0
    instance.api.trainer = ""
    assert instance.execute(command=TRAINS, **AGAIN) == {"loss": 0.5}


@older
def test_clear_releases_the_job_before_it_is_refused(instance: VirtualInstance, version: str) -> None:
    submitted(instance, version, *TRAINS)
    with pytest.raises(TrainingClusterError, match="TrainJobs can be submitted only to"):
        instance.execute(command=TRAINS, number=3, retries=0, deferrable=False)
    assert not instance.jobs()
    assert not instance.api.pods


@pytest.mark.thorough
@older
def test_retry_adopts_the_job_and_follows_it_to_its_end(instance: VirtualInstance, version: str) -> None:
    submitted(instance, version, *TRAINS)
    assert instance.execute(command=TRAINS, **AGAIN) == {"loss": 0.5}
    assert (instance.api.created, instance.api.deleted_alive) == (1, 0)
    assert not instance.jobs()
    assert not instance.api.pods


@pytest.mark.thorough
@pytest.mark.sampled(2)
@older
def test_failed_job_has_a_cause_and_is_released(instance: VirtualInstance, version: str) -> None:
    submitted(instance, version, *FAILS)
    with pytest.raises(TrainingJobError, match="exit code 3"):
        instance.execute(command=FAILS, **AGAIN)
    assert not instance.jobs()
    assert not instance.api.pods


@older
def test_kill_releases_the_job(instance: VirtualInstance, version: str) -> None:
    submitted(instance, version, *TRAINS)
    instance.kill_when(lambda: any(pod["status"]["phase"] == "Running" for pod in instance.api.pods.values()))
    with supervised(Supervisor(TaskInstanceState.FAILED)), pytest.raises(TrainingKilledError):
        instance.execute(command=TRAINS, **AGAIN)
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())
    assert (instance.api.created, instance.api.deleted_alive) == (1, 1)


@older
def test_orphan_is_reaped(instance: VirtualInstance, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", instance.run_id)
    submitted(instance, version, *TRAINS)
    reaper = ReapTrainingJobsOperator(task_id="reap", dry_run=False)
    with supervised(Supervisor(TaskInstanceState.FAILED)):
        with pytest.raises(TaskDeferred) as deferred:
            reaper.execute(instance.context)
        found = {"version": 1, "candidates": deferred.value.trigger.candidates}
        assert len(reaper.second_look(instance.context, found)) == 1
    assert not instance.jobs()
    assert not instance.api.pods
