"""`pod_override` on a cluster: what the pods of each kind have, and what runs in them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB
from airflow_provider_ktrain.exceptions import TrainingConfigurationError
from airflow_provider_ktrain.operators.training import MPIJobOperator, TrainJobOperator
from tests import clusters
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance

Json = dict[str, Any]
PRIVATE = {"serviceAccountName": "trainer", "imagePullSecrets": [{"name": "registry"}]}


def core(cluster: TestCluster) -> Any:
    return client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))


@pytest.fixture(scope="module")
def secret(cluster: TestCluster) -> Iterator[str]:
    """The name of a Secret, whose keys are environment variables."""
    name = "pod-override-settings"
    body = {"metadata": {"name": name}, "data": {"GREETING": base64.b64encode(b"hello").decode()}}
    core(cluster).create_namespaced_secret(cluster.namespace, body)
    yield name
    core(cluster).delete_namespaced_secret(name, cluster.namespace)


@pytest.fixture(scope="module")
def account(cluster: TestCluster) -> Iterator[None]:
    """The service account of PRIVATE, without which no pod can be created."""
    name = PRIVATE["serviceAccountName"]
    core(cluster).create_namespaced_service_account(cluster.namespace, {"metadata": {"name": name}})
    yield
    core(cluster).delete_namespaced_service_account(name, cluster.namespace)


def with_input(secret: str) -> Json:
    """A pod template: an init container writes a file, and the main container gets the variables of a Secret."""
    mount = {"name": "input", "mountPath": "/input"}
    folder = {"name": "INPUT", "value": "/input"}
    fetch = {
        "name": "fetch",
        "image": clusters.IMAGE,
        "command": ["sh", "-c", 'echo 0.25 > "$INPUT/loss"'],
        "env": [folder],
        "volumeMounts": [mount],
    }
    main = {
        "name": "pytorch",
        "envFrom": [{"secretRef": {"name": secret}}],
        "env": [folder],
        "volumeMounts": [mount],
    }
    return {"initContainers": [fetch], "containers": [main], "volumes": [{"name": "input", "emptyDir": {}}]}


@pytest.mark.programs("an init container, a volume and a Secret")
def test_init_container_and_secret_reach_the_program(instance: Instance, secret: str) -> None:
    command = ["sh", "-c", """printf 'KTRAIN_RESULT ["%s", %s]\\n' "$GREETING" "$(cat "$INPUT/loss")" """]
    result = instance.execute(command=command, deferrable=False, gpus=None, pod_override={"spec": with_input(secret)})
    assert result == ["hello", 0.25]


@pytest.mark.parametrize("role", ["", "Worker"])
def test_pods_have_the_fields(instance: Instance, role: str) -> None:
    override = {role: {"spec": PRIVATE}} if role else {"spec": PRIVATE}
    instance.execute(workers=1, gpus=None, pod_override=override)
    (job,) = instance.jobs()
    specs = job["spec"]["pytorchReplicaSpecs"]
    accounts = {name: spec["template"]["spec"].get("serviceAccountName") for name, spec in specs.items()}
    assert accounts == {"Master": None if role else "trainer", "Worker": "trainer"}
    assert specs["Worker"]["template"]["spec"]["imagePullSecrets"] == PRIVATE["imagePullSecrets"]


def test_changed_override_replaces_the_job_of_the_try_before(instance: Instance) -> None:
    parameters: Json = {"retries": 1, "reattach": "if_unchanged", "gpus": None}
    instance.execute(number=1, pod_override={"spec": {"schedulerName": "a"}}, **parameters)
    (first,) = instance.jobs()
    instance.execute(number=2, pod_override={"spec": {"schedulerName": "b"}}, **parameters)
    (second,) = instance.jobs()
    assert first["metadata"]["uid"] != second["metadata"]["uid"]


def test_error_names_the_parameter(instance: Instance) -> None:
    override = {"spec": {"containers": [{"name": "pytorch", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}]}}
    path = r"containers\[0\]\.volumeMounts\[0\]\.name: pod_override: Master has no volume data"
    with pytest.raises(TrainingConfigurationError, match=path):
        instance.execute(pod_override=override)
    assert not instance.jobs()


@pytest.mark.thorough
@pytest.mark.embedded("starts clusters of its own")
@pytest.mark.parametrize("version", ["v1", "v2beta1"])
def test_both_versions_of_an_mpijob(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with clusters.cluster(mpi_api=version) as cluster:
        set_connection(cluster, monkeypatch)
        with Instance(cluster, MPIJOB, version) as instance:
            override = {"Worker": {"spec": {**PRIVATE, "containers": [{"name": "worker", "tty": True}]}}}
            instance.execute(operator=MPIJobOperator, workers=1, gpus=None, pod_override=override)
            (job,) = instance.jobs()
            pod = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
            assert (pod["serviceAccountName"], pod["containers"][0]["tty"]) == ("trainer", True)
            launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
            assert "imagePullSecrets" not in launcher


@pytest.mark.usefixtures("account")
def test_trainjob_gets_a_patch_and_the_trainer_the_program(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_connection(cluster, monkeypatch)
    node = {
        "name": "node",
        "env": [{"name": "A", "value": "1"}],
        "securityContext": {"runAsNonRoot": False},
    }
    with Instance(cluster, TRAINJOB) as task:
        override = {"metadata": {"labels": {"team": "a"}}, "spec": {**PRIVATE, "containers": [node]}}
        task.execute(operator=TrainJobOperator, runtime="torch-distributed", gpus=None, pod_override=override)
        (job,) = task.jobs()
        assert {"name": "A", "value": "1"} in job["spec"]["trainer"]["env"]
        (pod,) = task.wait_pods(1)
        assert pod.spec.service_account_name == "trainer"
        assert [s.name for s in pod.spec.image_pull_secrets] == ["registry"]
        assert pod.metadata.labels["team"] == "a"
        (container,) = (c for c in pod.spec.containers if c.name == "node")
        assert container.security_context.run_as_non_root is False
        assert {e.name: e.value for e in container.env}["A"] == "1"


def test_what_a_patch_cannot_carry_is_refused_with_the_reason(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_connection(cluster, monkeypatch)
    container = {"name": "node", "envFrom": [{"secretRef": {"name": "s"}}]}
    with Instance(cluster, TRAINJOB) as task:
        message = r"\.envFrom: pod_override: a TrainJob can't set envFrom of container node"
        with pytest.raises(TrainingConfigurationError, match=message):
            task.execute(operator=TrainJobOperator, pod_override={"spec": {"containers": [container]}})
        assert not task.jobs()
