"""Node objects and the GPUs of this machine."""

from __future__ import annotations

from ktrain_embedded.node import nodes as node
from ktrain_embedded.node.nodes import node_objects


def test_nodes_have_names_and_capacity() -> None:
    nodes = node_objects(2, 8, {"rdma/hca": "4", "cpu": "96"})
    assert [n["metadata"]["name"] for n in nodes] == ["ktrain-node-0", "ktrain-node-1"]
    assert [n["metadata"]["labels"]["kubernetes.io/hostname"] for n in nodes] == ["ktrain-node-0", "ktrain-node-1"]
    for n in nodes:
        assert n["status"]["capacity"] == n["status"]["allocatable"]
        expected = {"nvidia.com/gpu": "8", "rdma/hca": "4", "cpu": "96"}
        assert expected.items() <= n["status"]["capacity"].items()
    assert len({n["status"]["addresses"][0]["address"] for n in nodes}) == 2


def test_node_without_gpus_lists_no_gpu_resource() -> None:
    assert node.GPU not in node_objects()[0]["status"]["capacity"]


def test_a_lost_node_keeps_its_own_taints() -> None:
    own = {"key": "team", "effect": "NoSchedule"}
    made = node_objects()[0]
    made["spec"]["taints"] = [own]
    lost = node.changed(made, reachable=False)
    assert own in lost["spec"]["taints"]
    assert {c["status"] for c in lost["status"]["conditions"]} == {"Unknown"}
    found = node.changed(lost, reachable=True)
    assert found["spec"]["taints"] == [own]
    assert found["status"]["conditions"][-1]["status"] == "True"
