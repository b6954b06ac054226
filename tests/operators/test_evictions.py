"""A pod that is evicted between a worker's deferral and the trigger's first list of pods."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kubernetes import client

from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB, Kind
from airflow_provider_ktrain.exceptions import TrainingInfrastructureError
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests import clusters
from tests.clusters import TestCluster, served_version
from tests.core.manifests import replica
from tests.factories import wait_for
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance

TRAINS = "trap 'exit 0' TERM; sleep {seconds} & wait"
#: until a program ends by itself: the TrainJob's other rank does
SECONDS = {"MPIJob": 600, "TrainJob": 12}
each_kind = pytest.mark.parametrize("kind", [MPIJOB, TRAINJOB], ids=lambda kind: kind.name)


def deferred(instance: Instance, seconds: int, monkeypatch: pytest.MonkeyPatch) -> TrainingJobTrigger:
    """The trigger to which a worker that has seen the pods defers, of a training that takes so long."""
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "3")
    program = TRAINS.format(seconds=seconds)
    parameters: dict[str, Any] = {"command": ["sh", "-c", program], "nodes": 2}
    if instance.kind is MPIJOB:
        launcher, worker = replica(name="mpi"), replica(name="mpi")
        for role, runs in ((launcher, program), (worker, TRAINS.format(seconds=600))):
            role["template"]["spec"]["containers"][0] |= {"image": clusters.IMAGE, "command": ["sh", "-c", runs]}
        spec = {"mpiReplicaSpecs": {"Launcher": launcher, "Worker": worker}, "runPolicy": {"cleanPodPolicy": "Running"}}
        version = served_version(instance.cluster, MPIJOB)
        api_version = f"{MPIJOB.group}/{version}"
        parameters = {"manifest": {"apiVersion": api_version, "kind": "MPIJob", "metadata": {}, "spec": spec}}
    _, arguments = instance.execute(**parameters).trigger.serialize()
    assert arguments["handover"]["pod_history"]["existing"]["replicas"]
    return TrainingJobTrigger(**arguments)


def deciding_pod(instance: Instance) -> Any:
    """The pod with the highest index on whose end the success of the job depends; None if it is gone."""
    pods = client.CoreV1Api(instance._core.api_client).list_namespaced_pod(
        instance.cluster.namespace, label_selector=instance.selector
    )
    (job,) = instance.jobs()
    roles = [(pod, instance.kind.pod_role(pod.metadata.labels)) for pod in pods.items]
    deciding = [(role, pod) for pod, role in roles if instance.kind.completes(job, *role)]
    last = {"MPIJob": 0, "TrainJob": 1}[instance.kind.name]
    return next((pod for (_, index), pod in deciding if index == last), None)


def evict(instance: Instance) -> str:
    """Evict it, and wait until it is gone and the job has succeeded. Returns its node."""
    pod, namespace = deciding_pod(instance), instance.cluster.namespace
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod.metadata.name, namespace=namespace))
    instance._core.create_namespaced_pod_eviction(pod.metadata.name, namespace, body)
    instance.wait_ended()
    wait_for("the pod is deleted", lambda: deciding_pod(instance) is None, 60)
    return str(pod.spec.node_name)


def resumed(instance: Instance, trigger: TrainingJobTrigger) -> Any:
    async def fire() -> Any:
        return (await anext(aiter(trigger.run()))).payload

    return instance.resume(asyncio.run(fire()))


@pytest.fixture
def instance(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> Any:
    set_connection(cluster, monkeypatch)
    with Instance(cluster, kind, served_version(cluster, kind)) as made:
        yield made


@each_kind
@pytest.mark.parametrize(
    "forgotten",
    [
        pytest.param(False, id="by changes"),
        pytest.param(True, id="by events", marks=pytest.mark.embedded("sets fault switches")),
    ],
)
def test_pod_that_was_evicted_before_the_trigger_listed_pods_fails_the_task(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, forgotten: bool
) -> None:
    """After minutes, the API server has forgotten the changes, and only events show the eviction."""
    trigger = deferred(instance, SECONDS[instance.kind.name], monkeypatch)
    node = evict(instance)
    if forgotten:
        instance.cluster.admin("expire")
    with pytest.raises(TrainingInfrastructureError) as failed:
        resumed(instance, trigger)
    how = f"it was stopped on {node}" if forgotten else f"it was evicted from {node}"
    why = f"ended with exit code 0 after {how}: the training is probably incomplete"
    assert why in str(failed.value)


@each_kind
def test_job_that_ends_before_the_trigger_listed_pods_succeeds(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pod is deleted after the end, as clean-ups do."""
    trigger = deferred(instance, 6, monkeypatch)
    instance.wait_ended()
    pod = deciding_pod(instance)
    instance._core.delete_namespaced_pod(pod.metadata.name, instance.cluster.namespace)
    capsys.readouterr()
    resumed(instance, trigger)
    assert "while no process followed it" not in capsys.readouterr().out
