"""Parameters of operators before a cluster is contacted: templated, parsed and merged into the manifest."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from airflow.sdk import DAG

from airflow_provider_ktrain.exceptions import TrainingConfigurationError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.volumes import ClaimVolume, SharedMemory
from tests.core.manifests import pytorchjob
from tests.operators.task_instance import Ti

SHARED = ClaimVolume("{{ params.claim }}", "/data")


def rendered(native: bool = False, **parameters: Any) -> PyTorchJobOperator:
    """A task with rendered templates, as Airflow passes it to `execute`."""
    with DAG("dag", render_template_as_native_obj=native):
        task = PyTorchJobOperator(task_id="train", image="i:1", **parameters)
    context: Any = {"params": {"n": 2, "nodes": ["a", "b"], "claim": "team-a"}, "ti": Ti("run", 1, 0), "dag": task.dag}
    task.render_template_fields(context)
    task._check_parameters()
    return task


@pytest.mark.parametrize(("configured", "resource"), [("", "nvidia.com/gpu"), ("google.com/tpu", "google.com/tpu")])
def test_gpus_request_the_default_accelerator(configured: str, resource: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR", configured)
    (replica,) = rendered(gpus=4).build_manifest(None)["spec"]["pytorchReplicaSpecs"].values()
    assert replica["template"]["spec"]["containers"][0]["resources"]["limits"] == {resource: 4}


@pytest.mark.parametrize("native", [False, True])
def test_numbers_can_be_templates(native: bool) -> None:
    task = rendered(
        native,
        workers="{{ params.n }}",
        gpus="{{ params.n }}",
        nproc_per_node="{{ params.n }}",
        replicas={"Worker": "{{ params.n }}"},
        container_resources={"memory": "{{ params.n }}Gi"},
        priority_class_name="class-{{ params.n }}",
        tolerations=[{"key": "pool-{{ params.n }}", "operator": "Exists"}],
        volumes=[SHARED, SharedMemory("{{ params.n }}Gi")],
    )
    spec = task.build_manifest(None)["spec"]
    assert spec["nprocPerNode"] == "2"
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    pod = worker["template"]["spec"]
    assert worker["replicas"] == 2
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "2Gi", "nvidia.com/gpu": 2}
    assert (pod["priorityClassName"], pod["tolerations"][0]["key"]) == ("class-2", "pool-2")
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "team-a"}
    assert pod["volumes"][1]["emptyDir"]["sizeLimit"] == "2Gi"
    assert SHARED.claim == "{{ params.claim }}"  # another task may use it as well


def test_submitted_parameters_are_template_fields() -> None:
    seen = set(PyTorchJobOperator.template_fields)
    assert {"workers", "replicas", "gpus", "container_resources", "tolerations", "affinity", "volumes"} <= seen


def test_template_of_a_list_needs_native_objects() -> None:
    assert rendered(True, hosts="{{ params.nodes }}").hosts == ["a", "b"]
    with pytest.raises(Exception, match=r"hosts: .*render_template_as_native_obj=True"):
        rendered(hosts="{{ params.nodes }}")


@pytest.mark.parametrize("wrong", [{"command": "python3 train.py"}, {"max_restarts": "some"}, {"labels": ["a"]}])
def test_invalid_parameter_fails_before_any_request(wrong: dict[str, Any]) -> None:
    """There is no connection, so the error is raised before any request."""
    with DAG("dag"):
        task = PyTorchJobOperator(task_id="train", image="i:1")
    for name, value in wrong.items():  # as a template is rendered
        setattr(task, name, value)
    context: Any = {"ti": Ti("run", 1, 0)}
    with pytest.raises(TrainingConfigurationError, match=f"^{next(iter(wrong))}: invalid parameter; found .*expected"):
        task.execute(context)


def test_limits_can_be_text_when_a_task_resumes() -> None:
    """Airflow creates a new operator then and doesn't run `execute`, which checks the parameters."""
    as_text: dict[str, Any] = {"max_restarts": "3", "crash_loop_limit": "4"}
    with DAG("dag"):
        task = PyTorchJobOperator(task_id="train", image="i:1", **as_text)
    limits = task._options({"metadata": {}}).limits
    assert (limits.max_restarts, limits.crash_loop) == (3, 4)


def test_parameters_stay_as_they_are() -> None:
    """Values computed from them are part of the request."""
    with DAG("dag"):
        task = PyTorchJobOperator(task_id="train", image="i:1", workers="2")
    task.gpus = "two"  # as a template is rendered
    before = dict(vars(task))
    context: Any = {"ti": Ti("run", 1, 0)}
    request = task._request(context)
    assert vars(task) == before
    assert request.invalid is not None


def test_other_documents_of_the_manifest_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    others: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token"}},
    ]
    with DAG("dag"):
        task = PyTorchJobOperator(task_id="train", manifest=yaml.safe_dump_all([others[0], pytorchjob(), others[1]]))
    task.build_manifest(task.manifest)
    output = capsys.readouterr().out
    for title in ("ConfigMap settings", "Secret token"):
        assert output.count(f"Manifest: {title} is not submitted, only the training job is: create it before") == 1


def test_warnings_about_a_manifest_are_one_record(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = pytorchjob()
    manifest["spec"]["cleanPodPolicy"] = "None"
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["image"] = "no-tag"
    with DAG("dag"):
        task = PyTorchJobOperator(task_id="train", manifest=manifest)
    task.build_manifest(task.manifest)
    output = capsys.readouterr().out
    assert output.count("[warning") == 1
    assert "image-tag at $.spec" in output
    assert "legacy-run-policy at $.spec.cleanPodPolicy: training-operator ignores cleanPodPolicy" in output
