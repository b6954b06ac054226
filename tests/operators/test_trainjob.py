"""What TrainJobOperator submits: its parameters, as fields of `spec.trainer` and as patches of the runtime."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kubernetes import client, config

from airflow_provider_ktrain.core.checks import rbac
from airflow_provider_ktrain.core.identity.names import SUBMISSION_LABEL
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.kinds.trainjob.patches import MANAGER
from airflow_provider_ktrain.core.state.pods.objects import avoided_nodes
from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingConfigurationError
from airflow_provider_ktrain.operators.training import TrainJobOperator
from airflow_provider_ktrain.volumes import SharedMemory
from tests import clusters
from tests.clusters import TestCluster
from tests.core.manifests import runtime_patch, trainjob
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance, Object

RUNTIMES = "clustertrainingruntimes"
KUEUE = "kueue.x-k8s.io/manager"


@pytest.fixture
def task(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    set_connection(cluster, monkeypatch)
    with Instance(cluster, TRAINJOB) as made:
        yield made


def api(cluster: TestCluster) -> Any:
    return config.new_client_from_config(str(cluster.kubeconfig))


def execute(task: Instance, **parameters: Any) -> Object:
    """The TrainJob that a task submits."""
    task.execute(operator=TrainJobOperator, **parameters)
    (job,) = task.jobs()
    return job


def managers(job: Object) -> list[str]:
    """Who patches the runtime, besides Kueue: where it is installed, it does so for each TrainJob."""
    found = [entry["manager"] for entry in job["spec"].get("runtimePatches") or ()]
    return [manager for manager in found if manager != KUEUE]


def ours(job: Object) -> list[Object]:
    """Our patches of the runtime."""
    return [entry for entry in job["spec"]["runtimePatches"] if entry["manager"] == MANAGER]


def accepted(send: Callable[[], Object], refusal: str) -> Object:
    """The answer to a request that is sent again while the Trainer's webhook refuses it with these words."""
    deadline = time.monotonic() + 240
    while True:
        try:
            return send()
        except client.ApiException as e:
            if refusal not in str(e.body) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def test_parameters_reach_the_pods(task: Instance) -> None:
    node = client.CoreV1Api(api(task.cluster)).list_node().items[0].metadata.name
    job = execute(
        task,
        runtime="torch-distributed",
        args=["--epochs", "3"],
        env={"A": "1"},
        nodes="2",
        nproc_per_node=1,
        gpus=2,
        container_resources={"memory": "64Mi"},
        volumes=[SharedMemory("8Mi")],
        hosts=[node],
        node_selector={"kubernetes.io/os": "linux"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
        labels={"team": "a"},
        annotations={"example.com/note": "x"},
    )
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["args"]) == (2, 1, ["--epochs", "3"])
    # the Trainer's webhook may write a quantity as text
    assert {k: str(v) for k, v in trainer["resourcesPerNode"]["limits"].items()} == {
        "memory": "64Mi",
        "nvidia.com/gpu": "2",
    }
    assert {e["name"]: e["value"] for e in trainer["env"]}.items() >= {"A": "1", "KTRAIN_ATTEMPT": "1"}.items()
    assert managers(job) == [MANAGER]
    for pod in task.wait_pods(2):
        assert pod.metadata.labels[SUBMISSION_LABEL] == job["metadata"]["labels"][SUBMISSION_LABEL]
        assert (pod.metadata.labels["team"], pod.metadata.annotations["example.com/note"]) == ("a", "x")
        assert pod.spec.node_selector == {"kubernetes.io/os": "linux"}
        assert "nvidia.com/gpu" in {t.key for t in pod.spec.tolerations}
        (term,) = (
            pod.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution.node_selector_terms
        )
        assert term.match_expressions[0].values == [node]
        assert "/dev/shm" in {m.mount_path for m in pod.spec.containers[0].volume_mounts}


def test_patches_of_the_manifest_are_kept(task: Instance) -> None:
    manifest = trainjob(nodes=1, image=clusters.IMAGE, command=["sleep", "600"])
    manifest["spec"]["runtimePatches"] = [runtime_patch("example.com/me", "node", nodeSelector={"a": "b"})]
    job = execute(task, manifest=manifest, node_selector={"kubernetes.io/os": "linux"})
    assert managers(job) == ["example.com/me", MANAGER]
    (pod,) = task.wait_pods(1)
    assert pod.spec.node_selector == {"a": "b", "kubernetes.io/os": "linux"}


def test_trainer_is_always_sent(task: Instance) -> None:
    """Without it no PET_* variable is set (recording 50b)."""
    manifest = trainjob()
    del manifest["spec"]["trainer"]
    job = execute(task, manifest=manifest, on_finish_action="keep_job")  # the runtime's program ends at once
    assert "trainer" in job["spec"]


def test_patches_cover_both_jobs_of_an_mpi_runtime(task: Instance) -> None:
    clusters.require(task.cluster, TRAINJOB, runtime="mpi-distributed")
    job = execute(task, runtime="mpi-distributed", nodes=2, gpus=None, labels={"team": "a"})
    (entry,) = ours(job)
    jobs = entry["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [j["name"] for j in jobs] == ["node", "launcher"]
    assert {j["template"]["spec"]["template"]["metadata"]["labels"]["team"] for j in jobs} == {"a"}


def test_deadline_is_also_set_in_the_job(task: Instance) -> None:
    job = execute(task, execution_timeout=datetime.timedelta(hours=1))
    assert job["spec"]["activeDeadlineSeconds"] == 3570 + 300


def test_a_priority_class_is_refused_with_the_reason(task: Instance) -> None:
    with pytest.raises(TrainingConfigurationError, match="can't set priorityClassName of a pod"):
        execute(task, priority_class_name="high")


def test_reserved_variables_are_final(task: Instance) -> None:
    """The webhook of the Trainer rejects these variables in the manifest."""
    with pytest.raises(TrainingConfigurationError, match="must not have reserved envs"):
        execute(task, env={"PET_NNODES": "2"})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"runtime": "nosuch"}, "ClusterTrainingRuntime nosuch does not exist"),
        ({"runtime": {"kind": "TrainingRuntime", "name": "mine"}}, "TrainingRuntime mine does not exist in namespace"),
    ],
)
def test_a_missing_runtime_may_appear_later(task: Instance, parameters: Object, message: str) -> None:
    with pytest.raises(TrainingClusterError, match=message):
        execute(task, **parameters)
    assert task.jobs() == []


def test_patches_of_unknown_jobs_are_not_sent(task: Instance) -> None:
    manifest = trainjob()
    manifest["spec"]["runtimePatches"] = [runtime_patch("example.com/me", "worker", nodeSelector={"a": "b"})]
    with pytest.raises(TrainingClusterError, match="no job named worker"):
        execute(task, manifest=manifest)
    assert task.jobs() == []


def test_a_retry_adopts_the_job_although_its_runtime_is_gone(task: Instance) -> None:
    custom = client.CustomObjectsApi(api(task.cluster))
    runtime = custom.get_cluster_custom_object(TRAINJOB.group, "v1alpha1", RUNTIMES, "torch-distributed")
    custom.create_cluster_custom_object(
        TRAINJOB.group, "v1alpha1", RUNTIMES, {**runtime, "metadata": {"name": "passing"}}
    )
    probe = {**trainjob(), "metadata": {"name": "probe"}}
    probe["spec"]["runtimeRef"] = {"name": "passing"}
    place = TRAINJOB.group, "v1alpha1", task.cluster.namespace, TRAINJOB.plural
    # the webhook has a cache
    accepted(lambda: custom.create_namespaced_custom_object(*place, probe, dry_run="All"), "must be created before")
    uid = execute(task, runtime="passing", retries=1)["metadata"]["uid"]
    custom.delete_cluster_custom_object(TRAINJOB.group, "v1alpha1", RUNTIMES, "passing")
    assert execute(task, runtime="passing", number=2, retries=1)["metadata"]["uid"] == uid


@pytest.mark.usefixtures("without_kueue")
def test_patches_of_other_managers_do_not_change_the_hash(task: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """Kueue adds an entry to runtimePatches."""
    job = execute(task, retries=1)
    custom = client.CustomObjectsApi(api(task.cluster))
    place = TRAINJOB.group, "v1alpha1", task.cluster.namespace, TRAINJOB.plural, job["metadata"]["name"]
    custom.patch_namespaced_custom_object(*place, {"spec": {"suspend": True}})
    changed_patches = {"spec": {"runtimePatches": [{"manager": KUEUE}, *ours(job)]}}
    # patches can't change while a node is active
    accepted(lambda: custom.patch_namespaced_custom_object(*place, changed_patches), "is still active")
    task.execute(operator=TrainJobOperator, number=2, retries=1, env={"CHANGED": "1"})
    (changed,) = [line for line in capsys.readouterr().out.splitlines() if "Changed: " in line]
    assert "runtimePatches" not in changed
    assert "$.spec.trainer" in changed


def test_a_dry_run_creates_nothing(task: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    assert task.execute(operator=TrainJobOperator, dry_run=True, volumes=[SharedMemory()]) is None
    assert task.jobs() == []
    assert "slow-failure" in (out := capsys.readouterr().out)
    assert "Dry run: no errors found in TrainJob" in out


# missing rights


FAILED = {"version": 1, "max_tries": 1, "nodes": {"gpu-7": "node 0 has a broken GPU"}}
AVOIDS: dict[str, Any] = {"number": 2, "retries": 1, "avoid_failed_nodes": True}


def test_node_of_an_earlier_try_is_avoided_by_a_patch(task: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    task.store["ktrain_failed_nodes"] = FAILED
    job = execute(task, **AVOIDS)
    (entry,) = ours(job)
    (replicated,) = entry["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert avoided_nodes(replicated["template"]["spec"]["template"]) == ["gpu-7"]
    assert "gpu-7: node 0 has a broken GPU" in capsys.readouterr().out


def connect_with_role(task: Instance, monkeypatch: pytest.MonkeyPatch, *, cluster_runtimes: bool) -> None:
    """Give the connection the rights that `ktrain rbac` prints, and no others."""
    core, rights = client.CoreV1Api(api(task.cluster)), client.RbacAuthorizationV1Api(api(task.cluster))
    name, namespace = f"reader-{task.key.run_id}", task.cluster.namespace
    core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    create = {
        "Role": lambda made: rights.create_namespaced_role(namespace, made),
        "RoleBinding": lambda made: rights.create_namespaced_role_binding(namespace, made),
        "ClusterRole": rights.create_cluster_role,
        "ClusterRoleBinding": rights.create_cluster_role_binding,
    }
    for made in rbac.objects(namespace, name, name, cluster_runtimes=cluster_runtimes):
        create[made["kind"]](made)
    token = core.create_namespaced_service_account_token(name, namespace, {"spec": {"audiences": []}}).status.token
    extra = {"kube_config": json.dumps(clusters.with_token(task.cluster.kubeconfig, token)), "namespace": namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))


def test_without_the_right_to_read_the_runtime_nothing_is_patched(
    task: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connect_with_role(task, monkeypatch, cluster_runtimes=False)
    with pytest.raises(TrainingClusterError, match="nodeSelector can't be applied"):
        execute(task, node_selector={"a": "b"})
    job = execute(task, execution_timeout=datetime.timedelta(hours=1))
    assert managers(job) == []
    assert "activeDeadlineSeconds" in job["spec"]
    assert f"no right to get {RUNTIMES}.{TRAINJOB.group}" in capsys.readouterr().out


def test_the_printed_cluster_role_is_enough_to_patch_pods(task: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    connect_with_role(task, monkeypatch, cluster_runtimes=True)
    assert managers(execute(task, node_selector={"kubernetes.io/os": "linux"})) == [MANAGER]
