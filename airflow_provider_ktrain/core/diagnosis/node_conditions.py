"""What a Node object shows of the node's health: the conditions and taints that clusters set, and how they are read.

The table has the names that these projects document, and no others: a custom condition may mean anything.

- Kubernetes: https://kubernetes.io/docs/reference/node/node-status/ and
  https://kubernetes.io/docs/reference/labels-annotations-taints/
- node-problem-detector: https://github.com/kubernetes/node-problem-detector/tree/master/config (kernel-monitor.json,
  docker-monitor.json, health-checker-*.json, systemd-monitor-counter.json), which GKE runs:
  https://cloud.google.com/kubernetes-engine/distributed-cloud/bare-metal/docs/how-to/node-problem-detector
- EKS: https://docs.aws.amazon.com/eks/latest/userguide/node-health.html
- NVSentinel: https://github.com/NVIDIA/NVSentinel/blob/main/docs/INTEGRATIONS.md. The reason of a failed check is the
  check's name and `IsNotHealthy`: platform-connectors of the same repository.
- Cluster Autoscaler: https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/FAQ.md
- Karpenter: https://karpenter.sh/docs/concepts/disruption/
- Spot nodes: https://github.com/aws/aws-node-termination-handler and
  https://github.com/GoogleCloudPlatform/k8s-node-termination-handler
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp


class Fault(enum.IntEnum):
    """What is wrong with a node, the worst first: its GPUs or devices, the node, a shortage; or it goes away."""

    DEVICE = 1
    NODE = 2
    SHORTAGE = 3
    LEAVING = 4


@dataclass(frozen=True)
class NodeProblem:
    """A condition or taint of a node.

    :param name: type of the condition, or key of the taint; `spec.unschedulable` or `deletion` for these.
    :param text: for example `AcceleratedHardwareReady is False since 12:04 UTC (NvidiaXID79Error)`.
    :param is_new: whether it began after the job's first pod was created: only such a problem can be a cause.
    """

    node: str
    name: str
    text: str
    message: str
    fault: Fault
    since: datetime | None
    is_new: bool

    def __str__(self) -> str:
        return f"Node {self.node}: {self.text}"


#: Type of a condition: the statuses that mean a problem, and its fault.
_CONDITIONS = {
    "Ready": (("False", "Unknown"), Fault.NODE),
    "NetworkUnavailable": (("True",), Fault.NODE),
    **dict.fromkeys(("MemoryPressure", "DiskPressure", "PIDPressure"), (("True",), Fault.SHORTAGE)),
    # node-problem-detector, GKE
    **dict.fromkeys(
        (
            "KernelDeadlock", "ReadonlyFilesystem", "XfsShutdown", "CorruptDockerOverlay2", "KubeletUnhealthy",
            "ContainerRuntimeUnhealthy", "FrequentKubeletRestart", "FrequentDockerRestart",
            "FrequentContainerdRestart", "FrequentUnregisterNetDevice",
        ),
        (("True",), Fault.NODE),
    ),
    # EKS
    "AcceleratedHardwareReady": (("False",), Fault.DEVICE),
    **dict.fromkeys(
        ("KernelReady", "NetworkingReady", "StorageReady", "ContainerRuntimeReady"), (("False",), Fault.NODE)
    ),
    # NVSentinel: its other checks are known by their reason
    "CSPMaintenance": (("True",), Fault.LEAVING),
}  # fmt: skip

#: Key of a taint: what it means, and its fault. A taint that only recommends or considers something isn't listed.
_TAINTS = {
    "node.kubernetes.io/out-of-service": ("it is out of service", Fault.NODE),
    "node.cloudprovider.kubernetes.io/shutdown": ("it is shut down", Fault.LEAVING),
    "ToBeDeletedByClusterAutoscaler": ("the autoscaler removes it", Fault.LEAVING),
    "karpenter.sh/disrupted": ("Karpenter removes it", Fault.LEAVING),
    "karpenter.sh/disruption": ("Karpenter removes it", Fault.LEAVING),
    "cloud.google.com/impending-node-termination": ("the cloud ends it", Fault.LEAVING),
    "aws-node-termination-handler/spot-itn": ("the cloud takes back this spot instance", Fault.LEAVING),
    "aws-node-termination-handler/scheduled-maintenance": ("the cloud maintains it", Fault.LEAVING),
    "aws-node-termination-handler/asg-lifecycle-termination": ("its autoscaling group ends it", Fault.LEAVING),
    **dict.fromkeys(
        ("nvidia.com/gpu-xid-error", "nvidia.com/gpu-nvlink-error", "nvidia.com/syslog-xid-error",
         "nvidia.com/gpu-error"),
        ("NVSentinel has found a fault of its GPUs", Fault.DEVICE),
    ),
}  # fmt: skip
_CORDONED = "node.kubernetes.io/unschedulable"


def node_problems(node: Json, pods: Sequence[Json]) -> list[NodeProblem]:
    """What is wrong with a node: what began since the job started comes first, then what is worse, then what is older.

    :param pods: of the job, each as last seen. The creation of the first one counts as the job's start.
    """
    started = parse_timestamp(min((at for pod in pods if (at := objects.created(pod))), default=""))
    here = [pod for pod in pods if objects.node_of(pod) == objects.name_of(node)]
    found = [*_of_conditions(node, started), *_of_taints(node, started, here), *_of_deletion(node, started)]
    return sorted(found, key=lambda p: (not p.is_new, p.fault, p.since is None, p.since.timestamp() if p.since else 0))


def _of_conditions(node: Json, started: datetime | None) -> Iterator[NodeProblem]:
    for condition in (node.get("status") or {}).get("conditions") or ():
        type_, status, reason = (str(condition.get(key) or "") for key in ("type", "status", "reason"))
        statuses, fault = _CONDITIONS.get(type_, ((), Fault.DEVICE))
        if status in statuses or (status == "True" and reason == f"{type_}IsNotHealthy"):
            why = f" ({reason})" if reason else ""
            text, at = f"{type_} is {status}", condition.get("lastTransitionTime")
            yield _problem(node, type_, text, fault, at, started, why=why, message=str(condition.get("message") or ""))


def _of_taints(node: Json, started: datetime | None, pods: Sequence[Json]) -> Iterator[NodeProblem]:
    """Most taints have no time. One that no pod of the job tolerates is newer than the pods: it keeps others away."""
    spec = node.get("spec") or {}
    cordon = {"key": _CORDONED, "effect": "NoSchedule"}
    for taint in (*(spec.get("taints") or ()), *((cordon,) if spec.get("unschedulable") else ())):
        key, at = str(taint.get("key")), taint.get("timeAdded")
        if key == _CORDONED and taint is not cordon:
            continue
        meaning, fault = ("it is cordoned", Fault.LEAVING) if taint is cordon else _TAINTS.get(key, ("", Fault.LEAVING))
        if meaning:
            tolerations = (one for pod in pods for one in (pod.get("spec") or {}).get("tolerations") or ())
            tolerated = any(_tolerates(toleration, taint) for toleration in tolerations)
            keeps_away = taint.get("effect") in ("NoSchedule", "NoExecute") and not tolerated
            newer = bool(pods) and keeps_away
            text = meaning if taint is cordon else f"{meaning} (taint {key})"
            yield _problem(node, key, text, fault, at, started, newer=newer)


def _of_deletion(node: Json, started: datetime | None) -> Iterator[NodeProblem]:
    if objects.is_being_deleted(node):
        at = objects.metadata_of(node).get("deletionTimestamp")
        yield _problem(node, "deletion", "it is being deleted", Fault.LEAVING, at, started)


def _problem(
    node: Json, name: str, text: str, fault: Fault, at: object, started: datetime | None,
    *, why: str = "", message: str = "", newer: bool = False,
) -> NodeProblem:  # fmt: skip
    since = parse_timestamp(at)
    is_new = newer if since is None else started is not None and since >= started
    when = f" since {since:{'%H:%M' if is_new else '%Y-%m-%d %H:%M'}} UTC" if since else ""
    return NodeProblem(objects.name_of(node), name, f"{text}{when}{why}", message, fault, since, is_new)


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")
