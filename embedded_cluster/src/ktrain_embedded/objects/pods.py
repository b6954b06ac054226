"""Properties derived from a pod's spec and status, for the API server, the scheduler, controllers and kubelets."""

from __future__ import annotations

from typing import Any

Obj = dict[str, Any]

TERMINAL = ("Succeeded", "Failed")  # final phases


def has_ended(pod: Obj) -> bool:
    """Whether the pod's phase is final."""
    return pod.get("status", {}).get("phase") in TERMINAL


def qos_class(pod: Obj) -> str:
    """Return Guaranteed, Burstable or BestEffort, according to the cpu and memory of all containers."""
    seen: list[tuple[Any, Any]] = []
    for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        seen += [(requests.get(r, limits.get(r)), limits.get(r)) for r in ("cpu", "memory")]
    if not any(request or limit for request, limit in seen):
        return "BestEffort"
    return "Guaranteed" if all(limit and request == limit for request, limit in seen) else "Burstable"
