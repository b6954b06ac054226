"""Volumes that a task can mount into its pods: `airflow_provider_ktrain.volumes` is where users import them from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Volume(Protocol):
    """A volume of a pod and its mount in the training container; any object with these two methods is one."""

    def volume(self) -> dict[str, Any]:
        """The entry of the pod's `volumes`."""
        ...

    def mount(self) -> dict[str, Any]:
        """The entry of the container's `volumeMounts`."""
        ...


@dataclass(frozen=True)
class SharedMemory:
    """Memory as /dev/shm, beyond the 64 MiB of a container runtime: NCCL and DataLoader workers share data through it.

    :param size: a Kubernetes quantity (`8Gi`); counts against the container's memory limit. Default: half of the
        node's memory.
    """

    size: str | None = None

    def volume(self) -> dict[str, Any]:
        """An emptyDir in memory: what is written there counts against the memory limit of the container."""
        return {"name": "shm", "emptyDir": {"medium": "Memory"} | ({"sizeLimit": self.size} if self.size else {})}

    def mount(self) -> dict[str, Any]:
        """At /dev/shm, through which PyTorch's data loader workers pass tensors."""
        return {"name": "shm", "mountPath": "/dev/shm"}


@dataclass(frozen=True)
class ClaimVolume:
    """A PersistentVolumeClaim of the job's namespace.

    :param claim: its name; several replicas need a claim that is ReadWriteMany or ReadOnlyMany.
    :param mount_path: the path in the container.
    :param read_only: whether it is mounted read-only. Default: False.
    :param sub_path: the directory of the volume that is mounted. Default: the whole volume.
    """

    claim: str
    mount_path: str
    read_only: bool = False
    sub_path: str | None = None

    def volume(self) -> dict[str, Any]:
        """The pod's volume, named after the claim."""
        return {"name": _dns_label(f"pvc-{self.claim}"), "persistentVolumeClaim": {"claimName": self.claim}}

    def mount(self) -> dict[str, Any]:
        """The claim, or its `sub_path`, at `mount_path`."""
        extra: dict[str, Any] = {"readOnly": True} if self.read_only else {}
        if self.sub_path:
            extra["subPath"] = self.sub_path
        return {"name": _dns_label(f"pvc-{self.claim}"), "mountPath": self.mount_path} | extra


@dataclass(frozen=True)
class HostPath:
    """A directory of the node.

    :param path: the path on the node.
    :param mount_path: the path in the container. Default: the same path.
    :param type: Kubernetes' hostPath type: what must exist on the node (`Directory`, `DirectoryOrCreate`, ...).
        Default: `Directory`.
    :param read_only: whether it is mounted read-only. Default: False.
    """

    path: str
    mount_path: str | None = None
    type: str = "Directory"
    read_only: bool = False

    def volume(self) -> dict[str, Any]:
        """The pod's volume, named after the directory."""
        return {"name": _dns_label(f"host-{self.path}"), "hostPath": {"path": self.path, "type": self.type}}

    def mount(self) -> dict[str, Any]:
        """The directory at `mount_path`, by default at its own path."""
        extra = {"readOnly": True} if self.read_only else {}
        return {"name": _dns_label(f"host-{self.path}"), "mountPath": self.mount_path or self.path} | extra


def _dns_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-") or "volume"
