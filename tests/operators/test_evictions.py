"""A pod that is evicted between a worker's deferral and the trigger's first list of pods."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB
from airflow_provider_ktrain.exceptions import TrainingInfrastructureError
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.core.manifests import replica
from tests.operators.task_instance import first_event
from tests.operators.virtual_instance import VirtualInstance

pytestmark = pytest.mark.embedded("needs the scripted API server")

TRAINS = "trap 'exit 0' TERM; sleep {seconds} & wait"
#: Time until a program ends by itself: the TrainJob's other rank does.
SECONDS = {"MPIJob": 600, "TrainJob": 12}
each_kind = pytest.mark.parametrize("instance", [MPIJOB, TRAINJOB], indirect=True, ids=["mpijob", "trainjob"])


def deferred(instance: VirtualInstance, seconds: int, monkeypatch: pytest.MonkeyPatch) -> TrainingJobTrigger:
    """The trigger to which a worker that has seen the pods defers, of a training that takes so long."""
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "3")
    program = TRAINS.format(seconds=seconds)
    parameters: dict[str, Any] = {"command": ["sh", "-c", program], "nodes": 2}
    if instance.kind is MPIJOB:
        launcher, worker = replica(name="mpi"), replica(name="mpi")
        for role, runs in ((launcher, program), (worker, TRAINS.format(seconds=600))):
            role["template"]["spec"]["containers"][0] |= {"image": "image", "command": ["sh", "-c", runs]}
        spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": {"cleanPodPolicy": "Running"}}
        parameters = {
            "manifest": {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {}, "spec": spec}
        }
    trigger = instance.trigger(instance.execute(**parameters))
    assert trigger.handover["pod_history"]["existing"]["replicas"]
    return trigger


def deciding_pod(instance: VirtualInstance) -> str:
    """The pod with the highest index on whose end the success of the job depends."""
    (job,) = instance.jobs()
    roles = {pod["metadata"]["name"]: instance.kind.pod_role(pod["metadata"]["labels"]) for pod in instance.pods()}
    deciding = [(role, name) for name, role in roles.items() if instance.kind.completes(job, *role)]
    return max(deciding)[1]


@each_kind
@pytest.mark.parametrize("forgotten", [False, True], ids=["by changes", "by events"])
def test_pod_that_was_evicted_before_the_trigger_listed_pods_fails_the_task(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    """After minutes, the API server has forgotten the changes, and only events show the eviction."""
    trigger = deferred(instance, SECONDS[instance.kind.name], monkeypatch)
    instance.api.evict(deciding_pod(instance))
    instance.wait_ended()
    if forgotten:
        instance.api.expire()
    with pytest.raises(TrainingInfrastructureError) as failed:
        instance.resume(first_event(trigger))
    how = "it was stopped on node-1" if forgotten else "it was evicted from node-1"
    why = f"ended with exit code 0 after {how}: the training is probably incomplete"
    assert why in str(failed.value)


@each_kind
def test_job_that_ends_before_the_trigger_listed_pods_succeeds(
    instance: VirtualInstance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pod is deleted after the end, as clean-ups do."""
    trigger = deferred(instance, 6, monkeypatch)
    instance.wait_ended()
    instance.api.remove("pods", deciding_pod(instance))
    capsys.readouterr()
    instance.resume(first_event(trigger))
    assert "was not observed" not in capsys.readouterr().out
