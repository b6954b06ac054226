"""PersistentVolumeClaims are directories of the state folder; PriorityClasses give pods their priority."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.raw_client import Client
from ktrain_embedded.cluster import EmbeddedCluster
from ktrain_embedded.objects import priorities
from ktrain_embedded.objects.errors import ApiError

PODS, CLAIMS = "/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/persistentvolumeclaims"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture
def api(cluster: EmbeddedCluster) -> Client:
    return Client(cluster)


@pytest.fixture
def name() -> str:
    return f"t-{secrets.token_hex(3)}"


def claim(name: str) -> dict[str, Any]:
    resources = {"requests": {"storage": "1Gi"}}
    return {"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteMany"], "resources": resources}}


def pod(name: str, script: str, claimed: str = "", **spec: Any) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "main", "image": "busybox", "command": ["sh", "-c", script]}
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claimed}}] if claimed else []
    if claimed:
        container["volumeMounts"] = [{"name": "v", "mountPath": "/data"}]
    made = {"containers": [container], "restartPolicy": "Never", "volumes": volumes, **spec}
    return {"metadata": {"name": name}, "spec": made}


def wait_for(api: Client, path: str, fits: Callable[[Any], bool]) -> Any:
    """The object, when it fits."""
    until = time.monotonic() + 240
    while not fits(found := api("GET", path).json):
        assert time.monotonic() < until, found
        time.sleep(0.05)
    return found


def phase(wanted: str) -> Callable[[Any], bool]:
    return lambda obj: obj.get("status", {}).get("phase") == wanted


def test_data_of_a_claim_outlives_its_pods_and_goes_with_the_claim(
    cluster: EmbeddedCluster, api: Client, name: str
) -> None:
    assert api("POST", CLAIMS, claim(name)).status == 201
    bound = wait_for(api, f"{CLAIMS}/{name}", phase("Bound"))
    assert bound["status"]["capacity"] == {"storage": "1Gi"}
    volume = api("GET", f"/api/v1/persistentvolumes/{bound['spec']['volumeName']}").json
    directory = Path(volume["spec"]["hostPath"]["path"])
    assert cluster.state_dir in directory.parents
    for number, script in enumerate(("echo saved > /data/checkpoint", "grep saved /data/checkpoint")):
        api("POST", PODS, pod(f"{name}-{number}", script, name))
        wait_for(api, f"{PODS}/{name}-{number}", phase("Succeeded"))
        api("DELETE", f"{PODS}/{name}-{number}")
    assert (directory / "checkpoint").read_text() == "saved\n"
    api("DELETE", f"{CLAIMS}/{name}")
    wait_for(api, f"/api/v1/persistentvolumes/{bound['spec']['volumeName']}", lambda answer: answer.get("code") == 404)
    assert not directory.exists()


def test_a_pod_waits_for_its_claim(api: Client, name: str) -> None:
    api("POST", PODS, pod(name, "true", name))
    waiting = wait_for(api, f"{PODS}/{name}", lambda obj: bool(obj.get("status", {}).get("conditions")))
    (condition,) = waiting["status"]["conditions"]
    assert condition["reason"] == "Unschedulable"
    assert condition["message"].startswith(f'0/1 nodes are available: persistentvolumeclaim "{name}" not found.')
    api("POST", CLAIMS, claim(name))
    wait_for(api, f"{PODS}/{name}", phase("Succeeded"))
    for path in (PODS, CLAIMS):
        api("DELETE", f"{path}/{name}")


def test_a_claim_needs_an_access_mode_and_a_size(api: Client, name: str) -> None:
    answer = api("POST", CLAIMS, {"metadata": {"name": name}, "spec": {}})
    assert answer.status == 422
    assert "spec.accessModes: Required value: at least 1 access mode is required" in answer.json["message"]
    assert "spec.resources[storage]: Required value" in answer.json["message"]


def test_a_pod_has_the_priority_of_its_class(api: Client, name: str) -> None:
    api("POST", CLASSES, {"metadata": {"name": name}, "value": 1000, "preemptionPolicy": "Never"})
    made = api("POST", PODS, pod(name, "true", priorityClassName=name)).json
    assert (made["spec"]["priority"], made["spec"]["preemptionPolicy"]) == (1000, "Never")
    assert api("GET", f"{CLASSES}/system-node-critical").json["value"] == 2_000_001_000
    api("DELETE", f"{PODS}/{name}")
    api("DELETE", f"{CLASSES}/{name}")


def test_a_pod_of_an_unknown_class_is_forbidden(api: Client, name: str) -> None:
    answer = api("POST", PODS, pod(name, "true", priorityClassName="absent"))
    assert answer.status == 403
    assert answer.json["message"] == f'pods "{name}" is forbidden: no PriorityClass with name absent was found'


def test_a_job_of_an_unknown_class_shows_why_it_has_no_pods(api: Client, name: str) -> None:
    template = pod("", "true", priorityClassName="absent")
    template["spec"]["containers"][0]["name"] = "pytorch"
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": template["spec"]}}
    jobs = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
    api("POST", jobs, {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {"Master": replica}},
    })  # fmt: skip
    events = "/api/v1/namespaces/default/events?fieldSelector=reason=FailedCreatePod"
    denied = f'pods "{name}-master-0" is forbidden: no PriorityClass with name absent was found'
    wait_for(api, events, lambda found: any(denied in event["message"] for event in found["items"]))
    api("DELETE", f"{jobs}/{name}")


def test_the_default_class_is_used_for_pods_without_one() -> None:
    classes = [{"metadata": {"name": "usual"}, "value": 5, "globalDefault": True}, *priorities.SYSTEM]
    made = {"metadata": {"name": "p"}, "spec": {}}
    priorities.admit(made, classes)
    assert made["spec"] == {"priorityClassName": "usual", "priority": 5, "preemptionPolicy": "PreemptLowerPriority"}
    with pytest.raises(ApiError, match=r"the integer value of priority \(7\) must not be provided in pod spec"):
        priorities.admit({"metadata": {"name": "p"}, "spec": {"priority": 7, "priorityClassName": "usual"}}, classes)
