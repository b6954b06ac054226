"""The scheduler's decisions, worded as recordings of kube-scheduler 1.36 word them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.small_cluster import SLEEP, small
from ktrain_embedded import scheduler
from ktrain_embedded.node.nodes import node_objects
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store
from ktrain_embedded.scheduler import Host, decide

GPU = "nvidia.com/gpu"


def pod(limits: dict[str, Any] | None = None, **spec: Any) -> Obj:
    return {
        "metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": limits or {}}}], **spec},
    }


def hosts(count: int, gpus: int = 0, **resources: str) -> list[Host]:
    return [Host(n) for n in node_objects(count, gpus, {"cpu": "8", "memory": "16Gi", **resources})]


def affinity(*expressions: Obj) -> Obj:
    terms = {"nodeSelectorTerms": [{"matchExpressions": list(expressions)}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


PREEMPTION_IS_NOT_HELPFUL = (
    "no new claims to deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
)


@pytest.mark.parametrize(
    ("limits", "spec", "message"),
    [
        ({GPU: 1}, {}, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        ({}, {"nodeSelector": {"no": "such"}},
         "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."),
        ({"cpu": "1000", "memory": "1000Ti"}, {},
         "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory."),
    ],
)  # fmt: skip
def test_messages_match_the_recordings(limits: dict[str, Any], spec: dict[str, Any], message: str) -> None:
    assert decide(pod(limits, **spec), hosts(1)).message == f"{message} {PREEMPTION_IS_NOT_HELPFUL}"


def test_reasons_of_several_nodes_are_counted_and_sorted() -> None:
    nodes = hosts(4, gpus=8)
    nodes[1].add(pod({GPU: 8}))
    pending = pod({GPU: 4}, nodeSelector={"kubernetes.io/hostname": "ktrain-node-1"})
    assert decide(pending, nodes).message == (
        "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node affinity/selector. "
        "no new claims to deallocate, preemption: 0/4 nodes are available: 1 No preemption victims found for incoming "
        "pod, 3 Preemption is not helpful for scheduling."
    )


def test_cluster_without_nodes_schedules_nothing() -> None:
    assert decide(pod(), []).message == "no nodes available to schedule pods"


def test_full_node_takes_no_more_pods() -> None:
    nodes = hosts(1, pods="1")
    nodes[0].add(pod())
    assert decide(pod(), nodes).message.startswith("0/1 nodes are available: 1 Too many pods. ")


@pytest.mark.parametrize(
    ("expression", "fits"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "rack", "operator": "DoesNotExist"}, True),
        ({"key": "rack", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "zone", "operator": "in", "values": ["a"]}, False),
    ],
)
def test_required_node_affinity_is_enforced(expression: Obj, fits: bool) -> None:
    nodes = hosts(1)
    nodes[0].node["metadata"]["labels"]["zone"] = "a"
    decision = decide(pod(affinity=affinity(expression)), nodes)
    assert (decision.node is not None) == fits


def test_match_fields_exclude_nodes_by_name_beside_expressions() -> None:
    def term(*excluded: str, **more: Any) -> Obj:
        return {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [n]} for n in excluded], **more}

    def decided(*terms: Obj) -> str | None:
        wanted = affinity()
        wanted["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] = list(terms)
        return decide(pod(affinity=wanted), hosts(2)).node

    first = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["ktrain-node-0"]}]}
    assert decided(term("ktrain-node-0")) == "ktrain-node-1"
    assert decided(term("ktrain-node-1", **first)) == "ktrain-node-0"
    assert decided(term("ktrain-node-0", **first)) is None
    assert decided(term("ktrain-node-0", "ktrain-node-1")) is None


def test_terms_are_alternatives_and_an_empty_one_matches_nothing() -> None:
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["ktrain-node-2"]}
    terms = [{}, {"matchExpressions": [there]}]
    pending = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    assert decide(pod(affinity=pending), hosts(3)).node == "ktrain-node-2"


TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({}, False),
        ({"key": "team", "value": "vision"}, True),
        ({"key": "team", "value": "audio"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"operator": "Exists"}, True),
    ],
)
def test_taints_need_tolerations(toleration: Obj, fits: bool) -> None:
    nodes = hosts(1)
    nodes[0].node["spec"]["taints"] = [TAINT]
    decision = decide(pod(tolerations=[toleration] if toleration else []), nodes)
    assert (decision.node is not None) == fits
    if not fits:
        assert decision.message.startswith("0/1 nodes are available: 1 node(s) had untolerated taint {team: vision}. ")


def test_cordoned_nodes_and_soft_taints() -> None:
    nodes = hosts(3)
    nodes[0].node["spec"]["unschedulable"] = True
    nodes[1].node["spec"]["taints"] = [{**TAINT, "effect": "PreferNoSchedule"}]
    nodes[2].node["spec"]["taints"] = [TAINT]
    assert decide(pod(), nodes).node == "ktrain-node-1"
    assert decide(pod(), nodes[:1]).message.startswith("0/1 nodes are available: 1 node(s) were unschedulable. ")


def test_extended_resources_and_init_containers_count() -> None:
    pending = pod({"rdma/hca": 1})
    pending["spec"]["initContainers"] = [{"name": "i", "resources": {"requests": {"cpu": "6"}}}]
    assert scheduler.requests(pending) == {"pods": 1, "rdma/hca": 1, "cpu": 6}
    assert decide(pending, hosts(1)).node is None
    assert decide(pending, hosts(1, 0, **{"rdma/hca": "2"})).node == "ktrain-node-0"


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 4), st.integers(0, 8))
def test_no_node_is_ever_overbooked(asks: list[int], nodes: int, gpus: int) -> None:
    """And a pod is refused only where no node has room for it."""
    there = hosts(nodes, gpus)
    for ask in asks:
        pending = pod({GPU: ask} if ask else {})
        free = [gpus - int(h.used.get(GPU, 0)) for h in there]
        decision = decide(pending, there)
        assert (decision.node is None) == (ask > max(free))
        for host in there:
            if host.name == decision.node:
                host.add(pending)
        assert all(h.used.get(GPU, 0) <= gpus for h in there)


def test_small_pods_are_spread_over_nodes() -> None:
    nodes = hosts(4)
    for _ in range(8):
        chosen = decide(pod(), nodes).node
        next(h for h in nodes if h.name == chosen).add(pod())
    assert [int(h.used["pods"]) for h in nodes] == [2, 2, 2, 2]


# on the store


def gpus(count: int) -> dict[str, Any]:
    return {"container": {"resources": {"limits": {GPU: count}}}}


async def test_a_pod_waits_until_gpus_are_free(tmp_path: Path) -> None:
    async with small(tmp_path, gpus=2) as cluster:
        cluster.create("first", SLEEP, **gpus(2))
        await cluster.runs("first")
        cluster.create("second", "echo mine", **gpus(1))
        message = (
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 "
            "nodes are available: 1 No preemption victims found for incoming pod."
        )
        await cluster.until(lambda: ("FailedScheduling", message) in cluster.events("second"))
        condition = (cluster.pod("second") or {})["status"]["conditions"][0]
        assert (condition["type"], condition["status"], condition["reason"]) == (
            "PodScheduled",
            "False",
            "Unschedulable",
        )
        assert condition["message"] == message
        cluster.store.delete(r.POD, "default", "first")
        assert await cluster.ended("second") == "Succeeded"


async def test_gpus_that_appear_are_used(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("one", "exit 0", **gpus(1))
        await cluster.until(lambda: cluster.events("one"))
        node = cluster.store.get(r.NODE, None, "ktrain-node-0")
        capacity = {**node["status"]["capacity"], GPU: "2"}
        cluster.store.update_status(r.NODE, node, {**node["status"], "capacity": capacity})
        assert await cluster.ended("one") == "Succeeded"
        assert cluster.store.get(r.NODE, None, "ktrain-node-0")["status"]["allocatable"][GPU] == "2"


def test_higher_priority_is_scheduled_first_and_a_preset_node_is_kept() -> None:
    store = Store()
    for node in node_objects(1, 1):
        store.create(r.NODE, node)
    for name, spec in (("a", {}), ("z", {"priority": 1000}), ("preset", {"nodeName": "elsewhere"})):
        pending = pod({GPU: 1}, **spec)
        store.create(r.POD, {**pending, "metadata": {"name": name, "namespace": "default"}})
    scheduler.Scheduler(store).schedule()
    placed = {p["metadata"]["name"]: p["spec"].get("nodeName") for p in store.list(r.POD)}
    assert placed == {"a": None, "z": "ktrain-node-0", "preset": "elsewhere"}


def test_unchanged_decisions_are_not_written_again() -> None:
    store = Store()
    for node in node_objects(1):
        store.create(r.NODE, node)
    store.create(r.POD, {**pod({GPU: 1}), "metadata": {"name": "p", "namespace": "default"}})
    rounds = scheduler.Scheduler(store)
    rounds.schedule()
    version = store.version
    rounds.schedule()
    assert store.version == version


async def test_pod_of_another_scheduler_is_ignored(tmp_path: Path) -> None:
    async with small(tmp_path) as cluster:
        cluster.create("other", "exit 0", schedulerName="volcano")
        cluster.create("ours", "exit 0", schedulerName="default-scheduler")
        assert await cluster.ended("ours") == "Succeeded"
        other = cluster.pod("other") or {}
        assert "nodeName" not in other["spec"]
        assert other["status"] == {"phase": "Pending", "qosClass": "BestEffort"}
        assert cluster.events("other") == []
