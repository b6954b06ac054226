"""What is wrong with a node becomes the cause of a failure on it, if it began while the job ran.

The nodes are shaped as in the documentation that `core/diagnosis/node_conditions.py` cites.
"""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.checks import rbac
from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose
from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.diagnosis.node_conditions import node_problems
from airflow_provider_ktrain.core.diagnosis.node_rules import MAX_NODES, nodes_to_read

from .test_diagnosis import PEER_LOST, TRACEBACK, failed, logs, pod, time

Object = dict[str, Any]
BEFORE = "2026-11-20T09:00:00Z"
HEALTHY = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": BEFORE}
XID = {
    "type": "AcceleratedHardwareReady", "status": "False", "reason": "NvidiaXID79Error",
    "message": "GPU has fallen off the bus", "lastTransitionTime": time(50),
}  # fmt: skip
SILENT = {
    "type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
    "message": "Kubelet stopped posting node status.", "lastTransitionTime": time(50),
}  # fmt: skip
PRESSURE = {
    "type": "MemoryPressure", "status": "True", "reason": "KubeletHasInsufficientMemory",
    "message": "kubelet has insufficient memory available", "lastTransitionTime": time(50),
}  # fmt: skip
SPOT = {"key": "aws-node-termination-handler/spot-itn", "value": "x", "effect": "NoSchedule"}
CUDA = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: CUDA error: unknown error'
PREFIX = "Node gpu-7: AcceleratedHardwareReady is False since 10:00 UTC (NvidiaXID79Error)"


def node(name: str, *conditions: Object, taints: tuple[Object, ...] = (), **spec: Any) -> Object:
    shown = {one["type"]: one for one in (HEALTHY, *conditions)}
    return {
        "metadata": {"name": name}, "spec": {"taints": list(taints), **spec},
        "status": {"conditions": list(shown.values())},
    }  # fmt: skip


def on(name: str, made: Object, **spec: Any) -> Object:
    return {**made, "spec": {"nodeName": name, **spec}}


def cause_of(pods: list[Object], nodes: list[Object], **lines: str) -> Cause:
    return diagnose(make_evidence(failed(), pods, (), logs(**lines), nodes=nodes))


def texts(made: Object, *pods: Object) -> list[tuple[str, bool]]:
    return [(problem.text, problem.is_new) for problem in node_problems(made, pods or (on("gpu-7", pod("Worker", 0)),))]


# what a node shows


@pytest.mark.parametrize(
    ("condition", "bad", "good"),
    [
        ("Ready", "Unknown", "True"),  # Kubernetes
        ("DiskPressure", "True", "False"),
        ("NetworkUnavailable", "True", "False"),
        ("KernelDeadlock", "True", "False"),  # node-problem-detector, GKE
        ("ReadonlyFilesystem", "True", "False"),
        ("FrequentContainerdRestart", "True", "False"),
        ("AcceleratedHardwareReady", "False", "True"),  # EKS
        ("StorageReady", "False", "True"),
    ],
)
def test_condition_is_a_problem_by_its_status(condition: str, bad: str, good: str) -> None:
    one = {"type": condition, "reason": "Why", "lastTransitionTime": time(60)}
    assert texts(node("gpu-7", {**one, "status": bad})) == [(f"{condition} is {bad} since 10:01 UTC (Why)", True)]
    assert texts(node("gpu-7", {**one, "status": good})) == []


def test_each_check_of_nvsentinel_is_known_by_its_reason() -> None:
    check = {"type": "GpuPcieWatch", "reason": "GpuPcieWatchIsNotHealthy", "lastTransitionTime": time(60)}
    assert texts(node("gpu-7", {**check, "status": "True"})) == [
        ("GpuPcieWatch is True since 10:01 UTC (GpuPcieWatchIsNotHealthy)", True)
    ]
    assert texts(node("gpu-7", {**check, "status": "False", "reason": "GpuPcieWatchIsHealthy"})) == []


def test_unknown_condition_and_recommending_taint_mean_nothing() -> None:
    custom = {"type": "example.com/Inspected", "status": "True", "lastTransitionTime": time(60)}
    taints = [
        {"key": "DeletionCandidateOfClusterAutoscaler", "effect": "PreferNoSchedule"},
        {"key": "aws-node-termination-handler/rebalance-recommendation", "effect": "NoSchedule"},
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
    ]
    assert texts(node("gpu-7", custom, taints=tuple(taints))) == []


@pytest.mark.parametrize(
    ("tolerations", "is_new"),
    [
        ([], True),  # the scheduler would not have bound the pod to a node with it
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], True),
        ([{"operator": "Exists"}], False),
        ([{"key": SPOT["key"], "value": "x", "effect": "NoSchedule"}], False),
        ([{"key": SPOT["key"], "value": "y"}], True),
    ],
)
def test_taint_without_a_time_is_newer_than_pods_that_do_not_tolerate_it(
    tolerations: list[Object], is_new: bool
) -> None:
    text = "the cloud takes back this spot instance (taint aws-node-termination-handler/spot-itn)"
    made = on("gpu-7", pod("Worker", 0), tolerations=tolerations)
    assert texts(node("gpu-7", taints=(SPOT,)), made) == [(text, is_new)]
    dated = {**SPOT, "timeAdded": time(60)}
    assert texts(node("gpu-7", taints=(dated,)), made) == [
        ("the cloud takes back this spot instance (taint aws-node-termination-handler/spot-itn) since 10:01 UTC", True)
    ]


def test_cordon_and_deletion() -> None:
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    made = node("gpu-7", taints=(cordon,), unschedulable=True)
    assert texts(made) == [("it is cordoned", True)]
    made["metadata"]["deletionTimestamp"] = time(60)
    assert texts(made) == [("it is being deleted since 10:01 UTC", True), ("it is cordoned", True)]


# what it explains


@pytest.mark.parametrize("condition", [XID, SILENT])
def test_lost_peer_becomes_the_node_of_the_peer(condition: Object) -> None:
    pods = [on("gpu-1", pod("Worker", 0, code=1, at=60)), on("gpu-7", pod("Worker", 1))]
    cause = cause_of(pods, [node("gpu-1"), node("gpu-7", condition)], worker_0=PEER_LOST)
    text = f"{condition['type']} is {condition['status']} since 10:00 UTC ({condition['reason']})"
    assert cause.summary.startswith(f"Node gpu-7 of Worker 1: {text}. Worker 0 lost a peer")
    assert (cause.category, cause.replica) == (Category.INFRASTRUCTURE, "Worker 1")
    assert cause.failed_nodes == {"gpu-7": text}


@pytest.mark.parametrize(
    ("code", "lines", "rest"),
    [
        (137, "", "Worker 0 was killed from outside by SIGKILL (exit code 137)"),
        (139, "", "Worker 0 failed with exit code 139, SIGSEGV and wrote no output"),
        (1, CUDA, "Worker 0"),
    ],
)
def test_broken_gpu_explains_a_kill_a_crash_and_a_gpu_error(code: int, lines: str, rest: str) -> None:
    pods = [on("gpu-7", pod("Worker", 0, code=code, at=60))]
    cause = cause_of(pods, [node("gpu-7", XID)], worker_0=lines)
    assert cause.summary.startswith(f"{PREFIX}. {rest}")
    assert (cause.category, cause.replica) == (Category.INFRASTRUCTURE, "Worker 0")
    assert list(cause.failed_nodes) == ["gpu-7"]
    assert f"{PREFIX}: GPU has fallen off the bus" in cause.detail


@pytest.mark.parametrize(
    ("type_", "status"), [("StorageReady", "False"), ("KernelDeadlock", "True"), ("Ready", "False")]
)
def test_exit_code_on_a_broken_node_has_a_sentence_in_the_details(type_: str, status: str) -> None:
    condition = {"type": type_, "status": status, "reason": "Broken", "lastTransitionTime": time(50)}
    pods = [on("gpu-7", pod("Worker", 0, code=1, at=60))]
    cause = cause_of(pods, [node("gpu-7", condition)], worker_0="saving\nsaved")
    assert cause.summary == "Worker 0 failed with exit code 1. Last log line: saved"
    assert (cause.category, cause.failed_nodes) == (Category.USER_CODE, {})
    of_node = f"Node gpu-7: {type_} is {status} since 10:00 UTC (Broken)"
    sentence = f"{of_node}\nWorker 0 ran there, and its log doesn't say why it failed."
    assert sentence in cause.detail
    explained = cause_of(pods, [node("gpu-7", condition)], worker_0=TRACEBACK)
    assert of_node in explained.detail
    assert "ran there" not in explained.detail


@pytest.mark.parametrize("condition", [XID, SILENT, PRESSURE])
def test_error_of_the_program_stays_the_cause(condition: Object) -> None:
    pods = [on("gpu-7", pod("Worker", 0, code=1, at=60))]
    cause = cause_of(pods, [node("gpu-7", condition)], worker_0=TRACEBACK)
    assert cause.summary == "Worker 0 failed: ValueError: negative loss (exit code 1)"
    assert (cause.category, cause.failed_nodes) == (Category.USER_CODE, {})
    assert f"Node gpu-7: {condition['type']}" in cause.detail


def test_condition_from_before_the_job_is_context() -> None:
    pods = [on("gpu-7", pod("Worker", 0, code=137, at=60))]
    cause = cause_of(pods, [node("gpu-7", {**XID, "lastTransitionTime": BEFORE})])
    assert cause.summary == "Worker 0 was killed from outside by SIGKILL (exit code 137)"
    assert cause.failed_nodes == {}
    text = "Node gpu-7: AcceleratedHardwareReady is False since 2026-11-20 09:00 UTC (NvidiaXID79Error)"
    assert f"{text}, before the job started: GPU has fallen off the bus" in cause.detail


def test_node_that_goes_away_explains_a_kill_and_is_not_avoided() -> None:
    pods = [on("gpu-7", pod("Worker", 0, code=143, at=60))]
    cause = cause_of(pods, [node("gpu-7", taints=(SPOT,))])
    assert cause.summary == (
        "Node gpu-7: the cloud takes back this spot instance (taint aws-node-termination-handler/spot-itn). "
        "Worker 0 was killed from outside by SIGTERM (exit code 143)"
    )
    assert (cause.category, cause.failed_nodes) == (Category.INFRASTRUCTURE, {})


def test_node_explains_a_pod_that_was_deleted() -> None:
    gone = {"deletionTimestamp": time(90), "deletionGracePeriodSeconds": 30}
    made = on("gpu-7", pod("Worker", 0, metadata=gone))
    message = "PyTorchJob train is failed because 1 Worker replica(s) failed."
    nodes = [node("gpu-7", unschedulable=True)]
    cause = diagnose(make_evidence(failed(message=message), [made], nodes=nodes))
    assert cause.summary.startswith("Node gpu-7: it is cordoned. Worker 0 was deleted or killed from outside")


def test_pressure_of_another_node_does_not_explain_a_lost_peer() -> None:
    pods = [on("gpu-1", pod("Worker", 0, code=1, at=60)), on("gpu-7", pod("Worker", 1))]
    cause = cause_of(pods, [node("gpu-1"), node("gpu-7", PRESSURE)], worker_0=PEER_LOST)
    assert cause.summary.startswith("Worker 0 lost a peer")


def test_preemption_is_explained_already() -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    preempted = on("gpu-7", pod("Worker", 0, code=143, at=60, conditions=[condition]))
    cause = cause_of([preempted], [node("gpu-7", unschedulable=True)])
    assert cause.summary.startswith("Worker 0 was preempted by a pod of higher priority")


# which nodes are read


def test_silent_nodes_are_read_first_and_then_those_of_the_first_failures() -> None:
    silent = pod("Worker", 9, conditions=[
        {"type": "Ready", "status": "False", "lastTransitionTime": time(50)},
        {"type": "ContainersReady", "status": "True"},
    ])  # fmt: skip
    pods = [on(f"n{index}", pod("Worker", index, code=1, at=60 - index)) for index in range(1, 9)]
    assert nodes_to_read([on("n0", pod("Worker", 0)), *pods, on("n9", silent)]) == ["n9", "n8", "n7", "n6"]
    assert MAX_NODES == 4
    assert nodes_to_read([on("n0", pod("Worker", 0)), on("n1", pod("Worker", 1, code=1)), pods[1]]) == [
        "n1",
        "n2",
        "n0",
    ]
    assert nodes_to_read([{"metadata": {"name": "p"}, "spec": {}, "status": {}}]) == []


def test_right_to_read_nodes_is_a_cluster_role_of_its_own() -> None:
    plain, more = (rbac.objects("training", service_account="sa", nodes=nodes) for nodes in (False, True))
    role, binding = (one for one in more if one not in plain)
    assert (role["kind"], role["metadata"]) == ("ClusterRole", {"name": "ktrain-nodes-training"})
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    assert (binding["kind"], binding["roleRef"]["name"]) == ("ClusterRoleBinding", "ktrain-nodes-training")
