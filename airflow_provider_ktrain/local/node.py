"""Node objects: this machine, shown as several hosts with a pretended number of GPUs each."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping

from airflow_provider_ktrain.local.store import Obj, now

NodeChange = Callable[[Obj], tuple[Obj, Obj]]  # node -> its new spec and status
VERSION = "v1.36.2"
GPU = "nvidia.com/gpu"
CONDITIONS = (
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
)
UNKNOWN = ("Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")
UNREACHABLE = [{"key": "node.kubernetes.io/unreachable", "effect": e} for e in ("NoSchedule", "NoExecute")]


def node_objects(
    count: int = 1,
    gpus_per_node: int = 0,
    resources: Mapping[str, str] | None = None,
    labels: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Obj]:
    """The nodes `ktrain-node-0` and so on, as they are when their kubelets are ready.

    :param gpus_per_node: `nvidia.com/gpu` of each node, pretended or not; 0 leaves the resource out.
    :param resources: more resources of each node, or other amounts than this machine's (`{"cpu": "96"}`).
    :param labels: more labels, by node name.
    """
    return [
        node_object(i, {**({GPU: str(gpus_per_node)} if gpus_per_node else {}), **(resources or {})},
                    (labels or {}).get(f"ktrain-node-{i}", {}))
        for i in range(count)
    ]  # fmt: skip


def node_object(index: int, resources: Mapping[str, str], labels: Mapping[str, str]) -> Obj:
    """One node with this machine's cpu, memory and disk, unless `resources` says otherwise."""
    name = f"ktrain-node-{index}"
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    capacity = {
        "cpu": str(os.cpu_count() or 1),
        "ephemeral-storage": f"{shutil.disk_usage('/').total // 1024}Ki",
        "hugepages-1Gi": "0",
        "hugepages-2Mi": "0",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') // 1024}Ki",
        "pods": "110",
        **resources,
    }
    return {
        "metadata": {
            "name": name,
            "labels": {
                "beta.kubernetes.io/arch": arch, "beta.kubernetes.io/os": sys.platform,
                "kubernetes.io/arch": arch, "kubernetes.io/hostname": name, "kubernetes.io/os": sys.platform, **labels,
            },
        },
        "spec": {"podCIDR": f"10.244.{index}.0/24", "podCIDRs": [f"10.244.{index}.0/24"]},
        "status": {
            "capacity": capacity,
            "allocatable": dict(capacity),
            "conditions": [condition(*c) for c in CONDITIONS],
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


def condition(type_: str, status: str, reason: str, message: str) -> Obj:
    """A node condition that changed just now."""
    return {
        "type": type_, "status": status, "lastHeartbeatTime": now(), "lastTransitionTime": now(), "reason": reason,
        "message": message,
    }  # fmt: skip


def lost(node: Obj) -> tuple[Obj, Obj]:
    """Spec and status of a node from which nothing is heard."""
    heard = [condition(c[0], *UNKNOWN) for c in CONDITIONS]
    return {**node["spec"], "taints": [*_own_taints(node), *UNREACHABLE]}, {**node["status"], "conditions": heard}


def ready(node: Obj) -> tuple[Obj, Obj]:
    """Spec and status of a node whose kubelet is well."""
    spec = {k: v for k, v in node["spec"].items() if k != "taints"}
    if taints := _own_taints(node):
        spec["taints"] = taints
    return spec, {**node["status"], "conditions": [condition(*c) for c in CONDITIONS]}


def _own_taints(node: Obj) -> list[Obj]:
    return [t for t in node["spec"].get("taints") or () if t["key"] != UNREACHABLE[0]["key"]]


class Gpus:
    """Which of this machine's real GPUs each pod may see; where it has none, GPUs are pretended and none is visible."""

    def __init__(self, devices: list[str] | None = None) -> None:
        found = [d.removeprefix("/dev/nvidia") for d in glob.glob("/dev/nvidia[0-9]*")]
        self._holders: dict[str, set[str]] = {
            d: set() for d in (devices if devices is not None else sorted(found, key=int))
        }

    def take(self, pod_uid: str, count: int) -> str:
        """CUDA_VISIBLE_DEVICES for a pod that asks for `count` GPUs: those that the fewest pods hold; `""` for none."""
        mine = [d for d, holders in self._holders.items() if pod_uid in holders]
        by_use = sorted(self._holders, key=lambda d: len(self._holders[d]))
        mine = (mine + [d for d in by_use if d not in mine])[:count]
        for device in mine:
            self._holders[device].add(pod_uid)
        return ",".join(sorted(mine, key=int))

    def free(self, pod_uid: str) -> None:
        for holders in self._holders.values():
            holders.discard(pod_uid)
