"""`pod_override`: a pod template that is merged into those of a job; messages say what it causes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from airflow.sdk import DAG
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_asyncio.client import V1LocalObjectReference, V1PodSpec, V1PodTemplateSpec

from airflow_provider_ktrain.core.checks.pod_override import check_pod_override
from airflow_provider_ktrain.core.errors import ManifestError, RuntimeMismatchError
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB
from airflow_provider_ktrain.core.kinds.runtimes import Served
from airflow_provider_ktrain.core.kinds.trainjob.patches import expand, patched_template
from airflow_provider_ktrain.core.manifest.job_request import manifest_hash
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, overlay
from airflow_provider_ktrain.decorators.mpijob import _MPIJobDecoratedOperator
from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.decorators.trainjob import _TrainJobDecoratedOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

from .manifests import mpijob, pytorchjob, trainjob

Json = dict[str, Any]
PRIVATE = {"serviceAccountName": "trainer", "imagePullSecrets": [{"name": "registry"}]}


def built(operator: type[Any], override: Any, **parameters: Any) -> Json:
    """The manifest of a task with this parameter, as far as it is known without a cluster."""
    with DAG("dag"):
        task = operator(task_id="train", **parameters)
    task.pod_override = override  # as a template is rendered
    task._check_parameters()
    manifest: Json = task.build_manifest(task.manifest)
    return manifest


def pods(manifest: Json) -> dict[str, Json]:
    specs = manifest["spec"].get("pytorchReplicaSpecs") or manifest["spec"]["mpiReplicaSpecs"]
    return {role: spec["template"]["spec"] for role, spec in specs.items()}


JOBS: list[tuple[type[Any], Json]] = [
    (PyTorchJobOperator, {"image": "i:1", "workers": 2}),
    (PyTorchJobOperator, {"manifest": pytorchjob()}),
    (MPIJobOperator, {"image": "i:1", "workers": 2}),
    (MPIJobOperator, {"manifest": mpijob("v1")}),
    (MPIJobOperator, {"manifest": mpijob("v2beta1")}),
]


@pytest.mark.parametrize(("operator", "parameters"), JOBS)
def test_it_is_merged_into_every_replica_or_into_a_role(operator: type[Any], parameters: Json) -> None:
    before = built(operator, None, **parameters)
    everywhere = built(operator, {"spec": PRIVATE}, **parameters)
    assert pods(everywhere) == {role: {**pod, **PRIVATE} for role, pod in pods(before).items()}
    of_workers = built(operator, {"Worker": {"spec": PRIVATE}}, **parameters)
    assert pods(of_workers) == {
        role: {**pod, **(PRIVATE if role == "Worker" else {})} for role, pod in pods(before).items()
    }
    assert len({manifest_hash(m) for m in (before, everywhere, of_workers)}) == 3, "reattach='if_unchanged' sees it"


def test_it_comes_after_the_other_options() -> None:
    override = {
        "metadata": {"labels": {"team": "b"}},
        "spec": {
            "nodeSelector": {"pool": None},
            "containers": [{"name": "pytorch", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}],
        },
    }
    options: Json = {
        "env": {"A": "1"},
        "node_selector": {"pool": "x", "disk": "ssd"},
        "labels": {"team": "a", "x": "1"},
    }
    manifest = built(PyTorchJobOperator, override, image="i:1", **options)
    template = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    assert template["metadata"]["labels"] == {"team": "b", "x": "1"}
    assert template["spec"]["nodeSelector"] == {"disk": "ssd"}
    (container,) = template["spec"]["containers"]
    assert container["env"] == [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]
    assert container["image"] == "i:1"


def test_objects_of_the_kubernetes_client_are_accepted() -> None:
    spec = V1PodSpec(containers=[], service_account_name="trainer", image_pull_secrets=[V1LocalObjectReference("r")])
    manifest = built(PyTorchJobOperator, V1PodTemplateSpec(spec=spec), image="i:1")
    assert pods(manifest)["Master"]["serviceAccountName"] == "trainer"
    assert pods(manifest)["Master"]["imagePullSecrets"] == [{"name": "r"}]


def test_role_that_the_job_does_not_have_is_left_out() -> None:
    """The number of Workers may be a template that renders to 0."""
    manifest = built(PyTorchJobOperator, {"Worker": {"spec": PRIVATE}}, image="i:1", workers=0)
    assert "serviceAccountName" not in pods(manifest)["Master"]


WRONG: list[tuple[Any, str]] = [
    ("{}", r"pod_override: .*found str; expected a pod template with[^$]*render_template_as_native_obj=True"),
    ([{"spec": {}}], r"pod_override: .*found list"),
    (
        {"worker": {"spec": {}}},
        r"pod_override\.worker: did you mean Worker\? unknown role; found worker",
    ),
    ({"spec": {}, "Worker": {}}, r"pod_override\.spec: a role is beside a field"),
    (
        {"Worker": {"containers": []}},
        r"pod_override\.Worker: invalid pod template; found containers",
    ),
    (
        {"Worker": {"spec": {"hostNetwork": "yes"}}},
        r"pod_override\.Worker\.spec\.hostNetwork: .*found 'yes'",
    ),
    ({"spec": {"containers": [{"image": "a"}]}}, r"pod_override\.spec\.containers\[0\]: an entry has no name"),
    ({"spec": {"$setElementOrder/containers": []}}, r"pod_override\.spec: the directive \$setElementOrder/containers"),
    (
        {"metadata": {"labels": {"ktrain.airflow/owner": "x"}}},
        r"pod_override\.metadata\.labels\['ktrain.airflow/owner'\]: ",
    ),
    (
        {"spec": {"containers": [{"name": "pytorch", "env": [{"name": "KTRAIN_ATTEMPT", "value": "7"}]}]}},
        r"pod_override\.spec\.containers\[0\]\.env\[0\]: KTRAIN_ATTEMPT is reserved",
    ),
]


@pytest.mark.parametrize(("override", "error"), WRONG)
def test_wrong_override_is_an_error_when_the_dag_is_parsed_and_when_it_is_rendered(override: Any, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        PyTorchJobOperator(task_id="train", image="i:1", pod_override=override)
    with pytest.raises(ManifestError, match=f"^{error}"):
        check_pod_override(override, PYTORCHJOB)


def test_value_of_a_variable_is_not_in_the_message() -> None:
    override = {"spec": {"containers": [{"name": "pytorch", "env": [{"name": "TOKEN", "value": 4711}]}]}}
    with pytest.raises(ManifestError) as error:
        check_pod_override(override, PYTORCHJOB)
    assert "pod_override.spec.containers[0].env[0].value" in str(error.value)
    assert "4711" not in str(error.value).partition("remedy")[0]


def test_template_in_it_is_left_alone_when_the_dag_is_parsed() -> None:
    PyTorchJobOperator(task_id="train", image="i:1", pod_override={"spec": {"hostNetwork": "{{ params.host }}"}})


SIDECAR = {"name": "sidecar"}
POD = "$.spec.pytorchReplicaSpecs.Worker.template.spec"
IN_JOB: list[tuple[type[Any], Json, str]] = [
    (
        PyTorchJobOperator,
        {"spec": {"containers": [SIDECAR]}},
        f"image at {POD}.containers[1].image: pod_override: container sidecar has no image",
    ),
    (
        PyTorchJobOperator,
        {"Worker": {"spec": {"containers": [{"name": "pytorch", "volumeMounts": [{"mountPath": "/d", "name": "d"}]}]}}},
        f"{POD}.containers[0].volumeMounts[0].name: pod_override: Worker has no volume d",
    ),
    (
        PyTorchJobOperator,
        {"spec": {"containers": [{"name": "pytorch", "resources": {"limits": {"cpu": "x"}}}]}},
        f"resources at {POD}.containers[0].resources.limits.cpu: pod_override: ",
    ),
    (
        PyTorchJobOperator,
        {"spec": {"containers": [{"name": "pytorch", "$patch": "delete"}, {"name": "other", "image": "i:1"}]}},
        f"container-name at {POD}.containers[0].name: pod_override: ",
    ),
    (
        TrainJobOperator,
        {"spec": {"priorityClassName": "p"}},
        "priorityClassName: pod_override: a TrainJob can't set priorityClassName of a pod",
    ),
    (
        TrainJobOperator,
        {"spec": {"containers": [{"name": "node", "envFrom": [{"secretRef": {"name": "s"}}]}]}},
        "envFrom: pod_override: a TrainJob can't set envFrom of container node",
    ),
    (TrainJobOperator, {"launcher": {"spec": {"dnsPolicy": "None"}}}, "dnsPolicy: pod_override: "),
    (
        TrainJobOperator,
        {"spec": {"containers": [{"name": "node", "resources": {"limits": {"cpu": "x"}}}]}},
        "$.spec.trainer.resourcesPerNode.limits.cpu: pod_override: ",
    ),
    (
        TrainJobOperator,
        {"spec": {"containers": [{"name": "node", "$patch": "delete"}]}},
        "pod_override.spec.containers[0].$patch: a TrainJob can't remove what its runtime sets",
    ),
    (
        TrainJobOperator,
        {"launcher": {"spec": {"containers": [{"name": "node", "image": "i:2"}]}}},
        "pod_override.launcher.spec.containers[0]: the program of job launcher can't be set",
    ),
]


@pytest.mark.parametrize(("operator", "override", "message"), IN_JOB)
def test_error_in_the_job_names_the_parameter(operator: type[Any], override: Json, message: str) -> None:
    with pytest.raises(ManifestError) as error:
        built(operator, override, image="i:1", **({"workers": 1} if operator is PyTorchJobOperator else {}))
    assert message in str(error.value)


def test_error_of_the_manifest_does_not_name_the_parameter() -> None:
    manifest = pytorchjob()
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["image"] = "not an image"
    override = {"spec": {"containers": [{"name": "pytorch", "tty": True}]}}
    with pytest.raises(ManifestError, match=r"image at \$\.spec\.\S+\.image: invalid image name"):
        built(PyTorchJobOperator, override, manifest=manifest)


def test_misspelt_field_is_an_error_that_names_the_right_one() -> None:
    with pytest.raises(ManifestError, match=r"imagePullSecret: did you mean `imagePullSecrets`\? pod_override"):
        built(PyTorchJobOperator, {"spec": {"imagePullSecret": [{"name": "a"}]}}, image="i:1")


def test_other_unknown_field_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    built(PyTorchJobOperator, {"spec": {"quantumLanes": 2}}, image="i:1")
    assert "quantumLanes: pod_override: unknown field" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["MASTER_ADDR", "PET_NNODES"])
def test_variable_that_the_operator_sets_is_a_warning(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    override = {"spec": {"containers": [{"name": "pytorch", "env": [{"name": name, "value": "x"}]}]}}
    built(PyTorchJobOperator, override, image="i:1")
    assert f"env[0]: pod_override: the operator overrides {name}" in capsys.readouterr().out


def returns_one() -> int:
    return 1


@pytest.mark.parametrize(
    ("operator", "role", "container", "parameters"),
    [
        (_PyTorchJobDecoratedOperator, "Worker", "pytorch", {"workers": 1}),
        (_MPIJobDecoratedOperator, "Launcher", "launcher", {"workers": 1}),
        (_TrainJobDecoratedOperator, "node", "node", {}),
    ],
)
def test_program_of_a_function_cannot_be_replaced(
    operator: type[Any], role: str, container: str, parameters: Json
) -> None:
    def build(**fields: Any) -> None:
        override = {role: {"spec": {"containers": [{"name": container, **fields}]}}}
        task = operator(task_id="t", python_callable=returns_one, image="i:1", pod_override=override, **parameters)
        task.command, task.args, task.env = task.launch_command(), [], {"KTRAIN_PROGRAM": "..."}  # as `execute` does
        task.build_manifest(None)

    build(securityContext={"runAsUser": 1000})
    for wrong in ({"args": ["x"]}, {"env": None} if container != "node" else {"command": ["x"]}):
        with pytest.raises(ManifestError, match=r"^pod_override: the program of .* is the function; found a change of"):
            build(**wrong)


# TrainJobs


def runtime(**jobs: list[str]) -> Json:
    replicated = [
        {
            "name": name.replace("_", "-"),
            "template": {"spec": {"template": {"spec": {"containers": [{"name": c, "image": "i:1"} for c in names]}}}},
        }
        for name, names in jobs.items()
    ]
    return {"spec": {"mlPolicy": {"numNodes": 1}, "template": {"spec": {"replicatedJobs": replicated}}}}


def patched(override: Json, of: Json) -> tuple[Json, dict[str, Json]]:
    """The TrainJob that is sent, and the pods that the Trainer creates from it, by replicated job."""
    manifest = overlay(trainjob(), JobOptions(pod_override=override))
    sent = expand(manifest, Served(True, of), name_length=20)
    jobs = patched_template(sent, of)["spec"]["replicatedJobs"]
    return sent, {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}


def test_program_of_node_goes_to_the_trainer_and_the_rest_to_patches() -> None:
    mount, user = {"name": "data", "mountPath": "/data"}, {"runAsUser": 1000}
    node = {
        "name": "node",
        "env": [{"name": "A", "value": "1"}],
        "resources": {"limits": {"cpu": "1"}},
        "volumeMounts": [mount],
        "securityContext": user,
    }
    override = {"spec": {**PRIVATE, "containers": [node], "volumes": [{"name": "data", "emptyDir": {}}]}}
    sent, result = patched(override, runtime(node=["node"], dataset_initializer=["dataset-initializer"]))
    assert sent["spec"]["trainer"]["env"][-1] == {"name": "A", "value": "1"}
    assert sent["spec"]["trainer"]["resourcesPerNode"]["limits"]["cpu"] == "1"
    (container,) = result["node"]["containers"]
    assert container == {
        "name": "node",
        "image": "i:1",
        "volumeMounts": [mount],
        "securityContext": user,
    }
    assert [v["name"] for v in result["node"]["volumes"]] == ["data"]
    for pod in result.values():
        assert {key: pod[key] for key in PRIVATE} == PRIVATE
    assert "volumes" not in result["dataset-initializer"]


def test_pod_template_of_one_job_is_sent_for_that_job() -> None:
    override = {"launcher": {"metadata": {"labels": {"a": "b"}}, "spec": {"serviceAccountName": "launcher"}}}
    _, result = patched(override, runtime(node=["node"], launcher=["node"]))
    assert result["launcher"]["serviceAccountName"] == "launcher"
    assert "serviceAccountName" not in result["node"]
    with pytest.raises(RuntimeMismatchError, match="the runtime has no job named launcher"):
        patched(override, runtime(node=["node"]))


@pytest.mark.parametrize("key", ["containers", "initContainers"])
def test_container_that_the_runtime_does_not_have_is_refused(key: str) -> None:
    added = {"name": "fetch", "volumeMounts": [{"name": "d", "mountPath": "/d"}]}
    with pytest.raises(RuntimeMismatchError, match=f"no container named fetch in {key}, and a patch can't add one"):
        patched({"spec": {key: [added]}}, runtime(node=["node"]))


# properties


SPECS = st.fixed_dictionaries(
    {},
    optional={
        "serviceAccountName": st.sampled_from(["a", "b"]),
        "nodeSelector": st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy")),
        "containers": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(["pytorch", "x", "node"])}),
            unique_by=str,
        ),
    },
)


@given(SPECS, st.sampled_from([pytorchjob(), mpijob("v1"), mpijob("v2beta1")]))
def test_applying_it_twice_is_applying_it_once(spec: Json, manifest: Json) -> None:
    before = copy.deepcopy(manifest)
    once = overlay(manifest, JobOptions(pod_override={"spec": spec}))
    assert overlay(once, JobOptions(pod_override={"spec": spec})) == once
    assert manifest == before


@pytest.mark.parametrize("kind", [PYTORCHJOB, MPIJOB, TRAINJOB])
def test_every_kind_accepts_its_roles(kind: Any) -> None:
    check_pod_override({role: {"spec": PRIVATE} for role in kind.roles}, kind)
