"""The API of the Kubeflow Trainer and of JobSet: discovery, schemas, tables, and what the API server does besides."""

from __future__ import annotations

import pytest

from components.raw_client import Client, eventually
from ktrain_embedded.cluster import EmbeddedCluster

TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
HOME = f"{TRAINER}/namespaces/default/trainjobs"


def trainjob(name: str) -> dict[str, object]:
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"command": ["sleep", "60"]}, "suspend": True}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": spec}


def test_schema_has_the_overrides_of_a_trainjob(cluster: EmbeddedCluster) -> None:
    client = Client(cluster)
    document = client("GET", "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1").json
    schema = document["components"]["schemas"]["org.kubeflow.trainer.v1alpha1.TrainJob"]
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainjobs.trainer.kubeflow.org"
    definition = client("GET", crd).json["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for spec in (schema["properties"]["spec"], definition["properties"]["spec"]):
        assert "runtimePatches" in spec["properties"]
        assert not {"podSpecOverrides", "podTemplateOverrides"} & spec["properties"].keys()


def test_runtimes_exist_from_the_start(cluster: EmbeddedCluster) -> None:
    listed = Client(cluster)("GET", f"{TRAINER}/clustertrainingruntimes").json
    assert [x["metadata"]["name"] for x in listed["items"]] == ["mpi-distributed", "torch-distributed"]


def runtime(
    name: str, *jobs: dict[str, object], kind: str = "ClusterTrainingRuntime", **more: object
) -> dict[str, object]:
    spec = {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": list(jobs)}}, **more}
    labels = {"trainer.kubeflow.org/support": "deprecated"}
    head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": kind}
    return {**head, "metadata": {"name": name, "labels": labels}, "spec": spec}


def replicated(container: str = "node", **more: object) -> dict[str, object]:
    pod = {"containers": [{"name": container, "image": "i"}]}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": {"template": {"spec": pod}}}
    return {"name": "node", "template": template, **more}


@pytest.mark.parametrize(
    ("kind", "home"),
    [("ClusterTrainingRuntime", TRAINER), ("TrainingRuntime", f"{TRAINER}/namespaces/default")],
)
def test_a_deprecated_runtime_warns_whoever_uses_it(cluster: EmbeddedCluster, kind: str, home: str) -> None:
    """clustertrainingruntime_webhook.go 2.3; not recorded."""
    client, plural = Client(cluster), f"{kind.lower()}s"
    made = client("POST", f"{home}/{plural}", runtime("old", replicated(), kind=kind))
    assert made.status == 201
    assert f'{kind} \\"old\\" is deprecated and will be removed' in made.header("Warning")
    job = trainjob(f"uses-{plural}")
    job["spec"] = {"runtimeRef": {"name": "old", "kind": kind}, "suspend": True}
    made = client("POST", HOME, job)
    assert made.status == 201
    assert f'Referenced {kind} \\"old\\" is deprecated' in made.header("Warning")
    client("DELETE", f"{HOME}/uses-{plural}")
    client("DELETE", f"{home}/{plural}/old")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (replicated(replicas=2), "replicatedJobs[0].replicas: Invalid value: 2: always must be 1"),
        (replicated("main"), "must contain the required container for the ancestor: trainer"),
    ],
)
def test_a_runtime_with_mistakes_is_denied(cluster: EmbeddedCluster, job: dict[str, object], message: str) -> None:
    refused = Client(cluster)("POST", f"{TRAINER}/clustertrainingruntimes", runtime("wrong", job))
    assert refused.status == 403
    assert 'admission webhook "validator.clustertrainingruntime.trainer.kubeflow.org" denied' in refused.json["message"]
    assert message in refused.json["message"]


def test_patches_cannot_be_changed_while_pods_are_active(cluster: EmbeddedCluster) -> None:
    """Not even together with the suspension (jobset.go 2.3; not recorded)."""
    client = Client(cluster)
    job = trainjob("active")
    job["spec"] = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {"image": "docker.io/library/ktrain-runtime:local", "command": ["sleep", "60"]},
    }
    assert client("POST", HOME, job).status == 201

    def is_active() -> bool:
        status = client("GET", f"{HOME}/active").json.get("status") or {}
        return any(entry["active"] for entry in status.get("jobsStatus") or ())

    eventually(is_active)
    patch = {"spec": {"suspend": True, "runtimePatches": [{"manager": "example.com/me"}]}}
    refused = client("PATCH", f"{HOME}/active", patch, {"Content-Type": "application/merge-patch+json"})
    assert refused.status == 403
    assert "when the JobSet's ReplicatedJob node is still active" in refused.json["message"]
    client("DELETE", f"{HOME}/active")


def test_nodes_of_an_mpi_runtime_without_a_job_for_them_are_denied(cluster: EmbeddedCluster) -> None:
    client = Client(cluster)
    policy = {"mpi": {"runLauncherAsNode": True}}
    made = client("POST", f"{TRAINER}/clustertrainingruntimes", runtime("alone", replicated(), mlPolicy=policy))
    assert made.status == 201
    job = trainjob("nodes")
    job["spec"] = {"runtimeRef": {"name": "alone"}, "trainer": {"numNodes": 2}, "suspend": True}
    refused = client("POST", HOME, job)
    assert refused.status == 403
    assert "spec.trainer.numNodes: Invalid value: 2: must have 1 when MPI" in refused.json["message"]
    client("DELETE", f"{TRAINER}/clustertrainingruntimes/alone")


def test_a_runtime_has_one_policy(cluster: EmbeddedCluster) -> None:
    wrong = runtime("wrong", replicated(), mlPolicy={"torch": {}, "mpi": {}})
    refused = Client(cluster)("POST", f"{TRAINER}/clustertrainingruntimes", wrong)
    assert refused.status == 422
    assert "spec.mlPolicy: Invalid value: Only one of the policy can be configured" in refused.json["message"]


def test_an_object_that_is_being_deleted_keeps_its_name(cluster: EmbeddedCluster) -> None:
    client = Client(cluster)
    body = {"metadata": {"name": "going", "finalizers": ["example.com/hold"]}}
    path = "/api/v1/namespaces/default/configmaps"
    assert client("POST", path, body).status == 201
    client("DELETE", f"{path}/going")
    refused = client("POST", path, body)
    assert refused.json["message"] == 'object is being deleted: configmaps "going" already exists'
    client(
        "PATCH", f"{path}/going", {"metadata": {"finalizers": None}}, {"Content-Type": "application/merge-patch+json"}
    )


def test_resource_versions_of_an_earlier_cluster_have_expired(cluster: EmbeddedCluster) -> None:
    refused = Client(cluster)("GET", f"{HOME}?resourceVersion=1&resourceVersionMatch=Exact")
    assert (refused.status, refused.json["reason"]) == (410, "Expired")


def test_termination_message_falls_back_to_the_log(cluster: EmbeddedCluster) -> None:
    client = Client(cluster)
    container = {
        "name": "main", "image": "busybox", "imagePullPolicy": "Never", "command": ["sh", "-c", "echo why; exit 3"],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }  # fmt: skip
    path = "/api/v1/namespaces/default/pods"
    body = {"metadata": {"name": "tells"}, "spec": {"restartPolicy": "Never", "containers": [container]}}
    assert client("POST", path, body).status == 201

    def message() -> str:
        status = client("GET", f"{path}/tells").json["status"].get("containerStatuses") or [{"state": {}}]
        return str(status[0]["state"].get("terminated", {}).get("message", ""))

    eventually(message)
    assert message() == "why\n"
    client("DELETE", f"{path}/tells")
