"""The API of Kueue: discovery, schemas, status, tables, and what its webhooks do to jobs. Nothing admits a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from components.raw_client import Client
from ktrain_embedded.cluster import EmbeddedCluster

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
HOME = f"{KUEUE}/namespaces/default"
PYTORCHJOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
TRAINJOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs"
QUEUE = {"kueue.x-k8s.io/queue-name": "team-a"}
MERGE = {"Content-Type": "application/merge-patch+json"}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with EmbeddedCluster(images={"busybox": None}, kueue=True) as cluster:
        yield Client(cluster)


def workload(name: str) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "pytorch", "image": "busybox"}]}}
    spec = {"queueName": "team-a", "podSets": [{"name": "master", "count": 1, "template": template}]}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": {"name": name}, "spec": spec}


def pytorchjob(name: str, labels: dict[str, str]) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "pytorch", "image": "busybox", "command": ["sleep", "60"]}]}}
    spec = {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": template}}}
    meta = {"name": name, "labels": labels}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": meta, "spec": spec}


def test_kueue_is_served_on_request_only(client: Client, cluster: EmbeddedCluster) -> None:
    assert client("GET", "/apis/kueue.x-k8s.io").json["preferredVersion"]["version"] == "v1beta2"
    assert Client(cluster)("GET", "/apis/kueue.x-k8s.io").status == 404
    served = {resource["name"] for resource in client("GET", KUEUE).json["resources"]}
    kinds = {"resourceflavors", "clusterqueues", "localqueues", "workloads", "workloadpriorityclasses"}
    assert kinds | {"workloads/status", "localqueues/status", "clusterqueues/status"} == served
    schemas = client("GET", f"/openapi/v3{KUEUE}").json["components"]["schemas"]
    assert schemas["io.x-k8s.kueue.v1beta2.Workload"]["properties"]["spec"]["properties"]["active"]["default"] is True


def test_status_of_a_workload_is_a_subresource(client: Client) -> None:
    made = client("POST", f"{HOME}/workloads?fieldValidation=Strict", workload("apart"))
    assert (made.status, made.json["spec"]["active"]) == (201, True)
    condition = {
        "type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "couldn't assign flavors",
        "lastTransitionTime": "2026-11-22T02:01:57Z", "observedGeneration": 1,
    }  # fmt: skip
    patched = client("PATCH", f"{HOME}/workloads/apart/status", {"status": {"conditions": [condition]}}, MERGE)
    assert patched.json["status"]["conditions"] == [condition]
    paused = client("PATCH", f"{HOME}/workloads/apart", {"spec": {"active": False}}, MERGE).json
    assert (paused["spec"]["active"], paused["status"]["conditions"]) == (False, [condition])
    assert paused["metadata"]["generation"] == 2


def test_kubectl_columns_of_workloads_and_queues(client: Client) -> None:
    table = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"}
    queue = {"kind": "LocalQueue", "metadata": {"name": "team-a"}, "spec": {"clusterQueue": "gpus"}}
    assert client("POST", f"{HOME}/localqueues", {"apiVersion": "kueue.x-k8s.io/v1beta2", **queue}).status == 201
    queues = client("GET", f"{HOME}/localqueues", headers=table).json
    assert [c["name"] for c in queues["columnDefinitions"]] == [
        "Name", "ClusterQueue", "Pending Workloads", "Admitted Workloads",
    ]  # fmt: skip
    assert queues["rows"][0]["cells"] == ["team-a", "gpus", None, None]
    client("POST", f"{HOME}/workloads", workload("shown"))
    columns = client("GET", f"{HOME}/workloads", headers=table).json["columnDefinitions"]
    assert [c["name"] for c in columns] == ["Name", "Queue", "Reserved in", "Admitted", "Finished", "Age"]


def test_job_with_a_queue_is_created_suspended(client: Client) -> None:
    queued = client("POST", PYTORCHJOBS, pytorchjob("queued", QUEUE)).json
    free = client("POST", PYTORCHJOBS, pytorchjob("free", {})).json
    assert queued["spec"]["runPolicy"]["suspend"] is True
    assert not free["spec"].get("runPolicy", {}).get("suspend")


def test_queued_trainjob_gets_an_entry_for_patches_of_kueue(client: Client) -> None:
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"command": ["sleep", "60"]}}
    job = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": spec}
    made = client("POST", TRAINJOBS, {**job, "metadata": {"name": "queued", "labels": QUEUE}}).json["spec"]
    assert made["suspend"] is True
    empty: dict[str, Any] = {"template": {"spec": {}}}
    assert made["runtimePatches"] == [{"manager": "kueue.x-k8s.io/manager", "trainingRuntimeSpec": empty}]


def test_the_queue_of_a_running_job_is_immutable(client: Client) -> None:
    client("POST", PYTORCHJOBS, pytorchjob("moves", QUEUE))
    other = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "other"}}}
    assert client("PATCH", f"{PYTORCHJOBS}/moves", other, MERGE).status == 200
    assert client("PATCH", f"{PYTORCHJOBS}/moves", {"spec": {"runPolicy": {"suspend": False}}}, MERGE).status == 200
    removed = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}}
    refused = client("PATCH", f"{PYTORCHJOBS}/moves", removed, MERGE)
    why = 'metadata.labels[kueue.x-k8s.io/queue-name]: Invalid value: "": field is immutable'
    assert refused.status == 403
    assert refused.json["message"] == f'admission webhook "vpytorchjob.kb.io" denied the request: {why}'
