"""Properties derived from a pod's spec and status, for the API server, the scheduler, controllers and kubelets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Obj

TERMINAL = ("Succeeded", "Failed")  # final phases


def has_ended(pod: Obj) -> bool:
    """Whether the pod's phase is final."""
    return pod.get("status", {}).get("phase") in TERMINAL


def containers(spec: Obj) -> Iterator[Obj]:
    """Yield all containers of a pod's spec, init containers first."""
    for key in ("initContainers", "containers"):
        yield from spec.get(key) or ()


def container_of(pod: Obj, wanted: str) -> str:
    """Return the name of the wanted container; "" stands for the only one. Raise ApiError 400 if it doesn't exist."""
    name, known = pod["metadata"]["name"], [container["name"] for container in containers(pod["spec"])]
    if not wanted and len(pod["spec"]["containers"]) > 1:
        among = " ".join(known)
        raise ApiError(400, f"a container name must be specified for pod {name}, choose one of: [{among}]")
    if wanted and wanted not in known:
        raise ApiError(400, f"container {wanted} is not valid for pod {name}")
    return wanted or str(known[-1])


def container_status(pod: Obj, container: str) -> Obj:
    """Return the status of a container or init container, {} if the kubelet hasn't reported one."""
    status = pod.get("status", {})
    found = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return next((c for c in found if c.get("name") == container), {})


def qos_class(pod: Obj) -> str:
    """Return Guaranteed, Burstable or BestEffort, according to the cpu and memory of all containers."""
    seen: list[tuple[Any, Any]] = []
    for container in containers(pod["spec"]):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        seen += [(requests.get(r, limits.get(r)), limits.get(r)) for r in ("cpu", "memory")]
    if not any(request or limit for request, limit in seen):
        return "BestEffort"
    return "Guaranteed" if all(limit and request == limit for request, limit in seen) else "Burstable"
