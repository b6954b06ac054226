"""Errors are reported before or at submit: the field, what was found, what was expected, and what to do."""

from __future__ import annotations

import copy
import json
import pathlib
from typing import Any

import pytest
import yaml
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingConfigurationError, TrainingJobError
from airflow_provider_ktrain.operators.training import MPIJobOperator
from tests.core.manifests import pytorchjob
from tests.operators.task_instance import Instance, of_each_kind


def changed(change: str) -> str:
    job = copy.deepcopy(pytorchjob())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    if change == "no container":
        replicas["Master"]["template"]["spec"]["containers"][0]["name"] = "trainer"
    else:
        replicas["Master"]["replicas"] = 2
    return yaml.safe_dump(job)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"manifest": "kind: [PyTorchJob\nspec: {}"}, ["YAML", "line"]),
        ({"manifest": "kind: Deployment\napiVersion: apps/v1\nmetadata: {}"}, ["Deployment", "PyTorchJob"]),
        ({"manifest": yaml.safe_dump(pytorchjob()), "operator": MPIJobOperator}, ["PyTorchJob", "MPIJob"]),
        ({"manifest": changed("no container")}, ["Master", "containers", "trainer", "pytorch"]),
        ({"manifest": changed("two masters")}, ["Master", "replicas", "found 2", "expected 1"]),
        ({"rendered": {"on_finish_action": "keep"}}, ["on_finish_action", "'keep'", "keep_job"]),
        ({"rendered": {"reattach": "never"}}, ["reattach", "'never'", "if_unchanged"]),
        ({"rendered": {"logs": "some"}}, ["logs", "some", "primary"]),
        ({"rendered": {"hosts": "node1"}}, ["hosts", "found 'node1'", "write ['node1']", "a list"]),
        ({"rendered": {"schedule_timeout": "10m"}}, ["schedule_timeout", "found '10m'", "timedelta(minutes=10)"]),
        ({"rendered": {"namespace": "Not A NS"}}, ["namespace", "found 'Not A NS'", "lower-case"]),
        ({"gpus": 1, "container_resources": {"nvidia.com/gpu": 2}}, ["gpus", "nvidia.com/gpu", "2", "remedy"]),
    ],
    ids=[
        "no YAML", "another kind", "another operator", "no container pytorch", "two masters", "on_finish_action",
        "reattach", "logs", "text for a list", "no duration", "no namespace's name", "gpus twice",
    ],
)  # fmt: skip
def test_parameters_invalid_on_any_cluster_are_final(
    instance: Instance, parameters: dict[str, Any], words: list[str]
) -> None:
    assert isinstance(refused(instance, parameters, words), TrainingConfigurationError)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"manifest": "jobs/missing.yaml"}, ["manifest", "jobs/missing.yaml", "can't be read", "remedy"]),
        ({"namespace": "nowhere"}, ["namespace", "nowhere", "kubectl create namespace nowhere"]),
        ({"cluster_context": "elsewhere"}, ["elsewhere"]),
    ],
    ids=["a missing file", "a missing namespace", "a missing context"],
)
def test_problems_that_can_be_fixed_outside_the_task_are_retried(
    instance: Instance, tmp_path: pathlib.Path, parameters: dict[str, Any], words: list[str]
) -> None:
    instance.folder = str(tmp_path)
    assert not isinstance(refused(instance, parameters, words), AirflowFailException)


def refused(instance: Instance, parameters: dict[str, Any], words: list[str]) -> TrainingJobError:
    """The error of `execute`. It contains all of `words`, and no job is created."""
    before = instance.all_jobs()
    with pytest.raises(TrainingJobError) as error:
        instance.execute(**parameters)
    message = str(error.value)
    assert [word for word in words if word not in message] == [], message
    assert instance.all_jobs() <= before
    assert not instance.store.get("ktrain_job")
    return error.value


def connect(monkeypatch: pytest.MonkeyPatch, instance: Instance, server: str = "", token: str = "") -> None:
    """Point the connection to another server, or change its token."""
    config = yaml.safe_load(instance.cluster.kubeconfig.read_text())
    if server:
        config["clusters"][0]["cluster"]["server"] = server
    if token:
        config["users"][0]["user"] = {"token": token}
    extra = {"kube_config": json.dumps(config)}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))


def test_missing_kubeconfig_is_a_cluster_error(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"kube_config_path": "/nowhere/kubeconfig"}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    with pytest.raises(
        TrainingClusterError, match=r"The connection 'kubernetes_default' can't be used\. .*/nowhere/kubeconfig"
    ):
        instance.execute()


def test_rejected_token_is_a_cluster_error(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, instance, token="expired-and-secret")
    with pytest.raises(TrainingClusterError, match=r"refused the credentials \(401\).*renew its token") as error:
        instance.execute()
    assert "expired-and-secret" not in str(error.value)
    assert not instance.jobs()


def test_unreachable_cluster_is_a_cluster_error(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first try has sent no job, so none is looked for."""
    connect(monkeypatch, instance, server="https://127.0.0.1:9")
    with pytest.raises(
        TrainingClusterError, match=r"the cluster can't be reached\. .*kube_config_path.*\n.*127.0.0.1:9"
    ):
        instance.execute()
    assert not instance.jobs()
    assert "kubectl delete" not in capsys.readouterr().out


@of_each_kind
def test_without_a_connection_and_a_kubeconfig_nothing_is_submitted(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes"}))
        with pytest.raises(TrainingClusterError, match="No cluster is configured"):
            instance.execute()
    assert not instance.jobs()
