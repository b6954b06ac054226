"""A job whose pod no node can match is given up, unless a node may come: only a read of the nodes shows it."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_limit
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS, find_missing_claim
from airflow_provider_ktrain.core.diagnosis.unmatched_pods import find_unmatched_pod, suspects
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.nodes import Node, expression_matches, is_of_autoscaler

JOB = {"kind": "PyTorchJob", "metadata": {"name": "train"}}
NO_MATCH = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def node(name: str = "node-1", labels: dict[str, str] | None = None, **more: Any) -> Node:
    capacity = {"cpu": "8", "nvidia.com/gpu": "8"}
    meta = {"name": name, "labels": labels or {}, "annotations": more.pop("annotations", {})}
    return Node.of({"metadata": meta, "spec": more, "status": {"capacity": capacity, "allocatable": {"cpu": "8"}}})


def waiting(message: str = NO_MATCH, *, asks: str = "nvidia.com/gpu", **spec: Any) -> Evidence:
    label = "training.kubeflow.org"
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod = {
        "metadata": {"name": "w", "labels": {f"{label}/replica-type": "worker", f"{label}/replica-index": "0"}},
        "spec": {"containers": [{"name": "pytorch", "resources": {"limits": {asks: "1"}}}], **spec},
        "status": {"phase": "Pending", "conditions": [condition]},
    }
    return make_evidence(JOB, [pod])


def affinity(*expressions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    term = {"matchExpressions": list(expressions), **fields}
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}}


def test_selector_that_no_node_matches() -> None:
    seen = waiting(nodeSelector={"pool": "a100"}, **affinity({"key": "zone", "operator": "In", "values": ["x", "y"]}))
    cause = find_unmatched_pod(seen, [node(labels={"pool": "h100"}), node("node-2", {"pool": "v100"})], 600)
    assert cause is not None
    selection = "nodeSelector pool=a100, node affinity zone In (x, y)"
    assert cause.summary == f"Worker 0 can't be scheduled: no node matches {selection}. Giving up after waiting 600 s."
    assert cause.category is Category.SCHEDULING
    assert cause.detail == f"The cluster has 2 nodes with pool: h100, v100; no label zone.\n{NO_MATCH}"
    assert cause.resolution == "Correct hosts, node_selector or affinity, or label the nodes."


@pytest.mark.parametrize(
    "matching",
    [
        node(labels={"pool": "a100"}),
        node("unready", {"pool": "a100", "other": "x"}),
    ],
)
def test_one_matching_node_is_enough_however_full_it_is(matching: Node) -> None:
    assert find_unmatched_pod(waiting(nodeSelector={"pool": "a100"}), [node(), matching], 3600) is None


def test_resource_that_no_node_has() -> None:
    seen = waiting("0/2 nodes are available: 2 Insufficient nvidia/gpu. preemption: not helpful.", asks="nvidia/gpu")
    cause = find_unmatched_pod(seen, [node()], 600)
    assert cause is not None
    assert cause.summary == (
        "Worker 0 can't be scheduled: no node has the resource nvidia/gpu. Giving up after waiting 600 s."
    )
    assert cause.detail.startswith("The cluster has 1 node with the resources nvidia.com/gpu.")
    assert cause.resolution.startswith("Did you mean nvidia.com/gpu? ")
    # of which there are some, but not enough
    assert find_unmatched_pod(waiting("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."), [node()], 600) is None


def test_resource_that_the_scheduler_does_not_miss_may_be_claimed_otherwise() -> None:
    """Dynamic resource allocation serves a resource that no node lists."""
    assert not suspects(waiting("0/2 nodes are available: 2 cannot allocate all claims.", asks="example.com/gpu"))


@pytest.mark.parametrize(
    "more",
    [
        {"providerID": "aws:///eu-west-1a/i-0123"},
        {"annotations": {"cluster-autoscaler.kubernetes.io/scale-down-disabled": "true"}},
        {"labels": {"karpenter.sh/nodepool": "default"}},
    ],
)
def test_cluster_whose_nodes_may_be_created_on_demand_is_left_alone(more: dict[str, Any]) -> None:
    assert find_unmatched_pod(waiting(nodeSelector={"pool": "a100"}), [node(), node("n", **more)], 3600) is None


def test_cluster_without_nodes_is_left_alone() -> None:
    assert find_unmatched_pod(waiting(nodeSelector={"pool": "a100"}), [], 3600) is None


def test_nodes_of_a_local_cluster_are_all_that_there_are() -> None:
    local = node(providerID="kind://docker/kind/kind-worker")
    assert find_unmatched_pod(waiting(nodeSelector={"pool": "a100"}), [local], 600) is not None


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"reason": "TriggeredScaleUp", "source": {"component": "cluster-autoscaler"}}, True),
        ({"reason": "NotTriggerScaleUp"}, True),
        ({"reason": "Nominated", "reportingComponent": "karpenter"}, True),
        ({"reason": "FailedScheduling", "source": {"component": "karpenter"}}, True),
        ({"reason": "FailedScheduling", "source": {"component": "default-scheduler"}}, False),
        ({"reason": "FailedScheduling"}, False),
    ],
)
def test_events_of_autoscalers(event: dict[str, Any], expected: bool) -> None:
    assert is_of_autoscaler(event) is expected


@pytest.mark.parametrize(
    "message",
    [
        "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity/selector.",
        "0/3 nodes are available: 3 node(s) had untolerated taint {nvidia.com/gpu: present}.",
        "0/3 nodes are available: 3 Insufficient cpu.",
        "",
    ],
)
def test_pods_that_wait_for_room_are_no_reason_to_read_nodes(message: str) -> None:
    assert not suspects(waiting(message, nodeSelector={"pool": "a100"}))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ({"operator": "In", "values": ["1"]}, False),
        ({"operator": "In", "values": ["7"]}, True),
        ({"operator": "NotIn", "values": ["7"]}, False),
        ({"key": "other", "operator": "NotIn", "values": ["7"]}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "DoesNotExist"}, False),
        ({"operator": "Gt", "values": ["6"]}, True),
        ({"operator": "Lt", "values": ["6"]}, False),
        ({"key": "other", "operator": "Gt", "values": ["6"]}, False),
        ({"operator": "Invented"}, True),
    ],
)
def test_expressions_of_an_affinity(expression: dict[str, Any], expected: bool) -> None:
    assert expression_matches({"key": "gpus", **expression}, {"gpus": "7"}) is expected


def test_nodes_that_an_earlier_try_avoids_are_named() -> None:
    avoided = {"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}
    seen = waiting(**affinity(matchFields=[avoided]))
    assert find_unmatched_pod(seen, [node(), node("node-2")], 600) is None
    cause = find_unmatched_pod(seen, [node()], 600)
    assert cause is not None
    assert "no node matches node affinity metadata.name NotIn (node-1)" in cause.summary
    assert "avoid_failed_nodes" in cause.resolution


def test_schedule_timeout_names_the_selection() -> None:
    seen = waiting(nodeSelector={"pool": "a100"}, **affinity({"key": "zone", "operator": "Exists"}))
    cause = diagnose_limit(Limit.SCHEDULE, 60, seen)
    assert "It selects nodes by nodeSelector pool=a100, node affinity zone Exists." in cause.detail


def test_missing_claim_has_the_time_of_a_missing_secret() -> None:
    message = '0/4 nodes are available: persistentvolumeclaim "data" not found. preemption: not helpful.'
    found = find_missing_claim(waiting(message), 30)
    assert GRACE_SECONDS["missing claim"] == GRACE_SECONDS["CreateContainerConfigError"] == 30
    assert found is not None
    claim, cause = found
    assert claim == "data"
    missing = 'persistentvolumeclaim "data" not found'
    assert cause.summary == f"Worker 0 can't be scheduled: {missing}. Giving up after waiting 30 s."
    assert (cause.category, cause.resolution) == (Category.ENVIRONMENT, "Create the claim, or correct its name.")
