"""Node objects. They represent this machine as several nodes, each with a simulated number of GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping

from ktrain_embedded.objects.store import Obj, now

VERSION = "v1.36.2"
GPU = "nvidia.com/gpu"
READY = {"status": "True", "reason": "KubeletReady", "message": "kubelet is posting ready status"}
UNKNOWN = {
    "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting node status.",
}  # fmt: skip
SHUTDOWN = {"status": "False", "reason": "KubeletNotReady", "message": "node is shutting down"}
NO_DISK = {"status": "True", "reason": "KubeletHasDiskPressure", "message": "kubelet has disk pressure"}
ENOUGH_DISK = {"status": "False", "reason": "KubeletHasNoDiskPressure", "message": "kubelet has no disk pressure"}


def node_objects(count: int = 1, gpus_per_node: int = 0, resources: Mapping[str, str] | None = None) -> list[Obj]:
    """The nodes `ktrain-node-0` and so on, with ready kubelets.

    :param gpus_per_node: `nvidia.com/gpu` of each node, real or simulated. With 0, nodes don't have the resource.
    :param resources: additional resources of each node, or amounts that replace this machine's (`{"cpu": "96"}`).
    """
    gpus = {GPU: str(gpus_per_node)} if gpus_per_node else {}
    return [node_object(index, {**gpus, **(resources or {})}) for index in range(count)]


def node_object(index: int, resources: Mapping[str, str]) -> Obj:
    """One node with this machine's cpu, memory and disk. `resources` overrides them."""
    name = f"ktrain-node-{index}"
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    capacity = {
        "cpu": str(os.cpu_count() or 1),
        "ephemeral-storage": f"{shutil.disk_usage('/').total // 1024}Ki",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 1024}Ki",
        "pods": "110",
        **resources,
    }
    return {
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/arch": arch, "kubernetes.io/os": sys.platform, "kubernetes.io/hostname": name,
            },
        },
        "spec": {"podCIDR": f"10.244.{index}.0/24", "podCIDRs": [f"10.244.{index}.0/24"]},
        "status": {
            "capacity": capacity,
            "allocatable": dict(capacity),
            "conditions": [condition("Ready", READY)],
            "addresses": [
                {"type": "InternalIP", "address": f"10.0.0.{10 + index}"}, {"type": "Hostname", "address": name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 0}},
            "nodeInfo": {
                "machineID": name, "systemUUID": name, "bootID": name, "kernelVersion": platform.release(),
                "osImage": platform.platform(terse=True), "containerRuntimeVersion": "ktrain://local",
                "kubeletVersion": VERSION, "kubeProxyVersion": "", "operatingSystem": sys.platform,
                "architecture": arch,
            },
        },
    }  # fmt: skip


def condition(type_: str, fields: Mapping[str, str]) -> Obj:
    """A condition, with the current time as its transition time."""
    return {"type": type_, **fields, "lastHeartbeatTime": now(), "lastTransitionTime": now()}


def with_condition(node: Obj, type_: str, fields: Mapping[str, str]) -> Obj:
    """The status of the node with another condition of a type. The node controller sets its taints."""
    others = [c for c in node["status"].get("conditions") or () if c["type"] != type_]
    return {**node["status"], "conditions": [*others, condition(type_, fields)]}
