"""A pod's status from what the kubelet knows of it: pure, as the real kubelet's generateAPIPodStatus.

Held to recordings of Kubernetes 1.36: order and wording of the conditions, and the moment between the end of the last
container and the end of the pod, in which conditions tell of the end while the phase is still the old one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the store's defaults use this module
    from airflow_provider_ktrain.local.store import Obj


@dataclass
class ContainerFacts:
    """One container of a pod: `state` and `last_state` as Kubernetes writes them."""

    spec: Obj
    state: Obj
    last_state: Obj = field(default_factory=dict)
    restarts: int = 0
    container_id: str = ""
    ready: bool = False

    @property
    def exit_code(self) -> int | None:
        """The exit code, where it is terminated."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    @property
    def terminated(self) -> bool:
        return "terminated" in self.state


@dataclass
class PodFacts:
    """What the kubelet knows of a pod. `finished`: all is torn down and nothing will start again."""

    start_time: str
    host_ip: str
    init: list[ContainerFacts]
    containers: list[ContainerFacts]
    ip: str = ""
    sandbox: bool = False
    finished: bool = False
    #: why the kubelet ended the pod (Evicted, DeadlineExceeded), with its message
    reason: str = ""
    message: str = ""
    extra_conditions: list[Obj] = field(default_factory=list)


def new(pod: Obj, start_time: str, host_ip: str) -> PodFacts:
    """The facts of a pod of which nothing runs yet."""
    spec = pod["spec"]
    waiting = "PodInitializing" if spec.get("initContainers") else "ContainerCreating"

    def fresh(containers: list[Obj] | None) -> list[ContainerFacts]:
        return [ContainerFacts(c, {"waiting": {"reason": waiting}}) for c in containers or ()]

    return PodFacts(start_time, host_ip, fresh(spec.get("initContainers")), fresh(spec["containers"]))


def phase(pod: Obj, facts: PodFacts) -> str:
    """The phase that the containers' states mean, as the real getPhase decides it."""
    policy = pod["spec"].get("restartPolicy", "Always")
    ran = [c for c in facts.containers if c.terminated]
    if facts.reason:
        return "Failed"
    if any(c.exit_code for c in facts.init) and (policy == "Never" or facts.finished):
        return "Failed"
    if any(c.exit_code != 0 for c in facts.init):
        return "Pending"
    if len(ran) == len(facts.containers) or (facts.finished and ran):
        succeeded = all(c.exit_code == 0 for c in ran)
        if facts.finished or policy == "Never" or (policy == "OnFailure" and succeeded):
            return "Succeeded" if succeeded else "Failed"
        return "Running"
    if any("waiting" in c.state and not c.last_state for c in facts.containers):
        return "Pending"
    return "Running"


def build(pod: Obj, facts: PodFacts, now: str) -> Obj:
    """The whole status; `pod` gives the one before, whose times stay where conditions did not change."""
    old = pod.get("status", {})
    generation = pod["metadata"].get("generation", 1)
    reached = phase(pod, facts)
    ended = reached in ("Succeeded", "Failed")
    known = {c["type"]: c for c in old.get("conditions") or ()}
    conditions = []
    for condition in (*_conditions(facts, reached), *facts.extra_conditions):
        before = known.pop(condition["type"], {})
        same = before.get("status") == condition["status"]
        conditions.append({
            "type": condition["type"], "observedGeneration": generation, "status": condition["status"],
            "lastProbeTime": None, "lastTransitionTime": before["lastTransitionTime"] if same else now,
            **{k: condition[k] for k in ("reason", "message") if condition.get(k)},
        })  # fmt: skip
    conditions += [{**c, "observedGeneration": generation} for c in known.values()]
    status: Obj = {
        "observedGeneration": generation,
        "phase": old.get("phase", "Pending") if ended and not facts.finished else reached,
        "conditions": conditions,
        **({"message": facts.message, "reason": facts.reason} if facts.reason and facts.finished else {}),
        "hostIP": facts.host_ip, "hostIPs": [{"ip": facts.host_ip}],
        **({"podIP": facts.ip, "podIPs": [{"ip": facts.ip}]} if facts.ip else {}),
        "startTime": facts.start_time,
    }  # fmt: skip
    if facts.init:
        status["initContainerStatuses"] = [_container(c, init=True) for c in facts.init]
    status["containerStatuses"] = [_container(c) for c in facts.containers]
    status["qosClass"] = old.get("qosClass") or qos_class(pod)
    return status


def _conditions(facts: PodFacts, reached: str) -> list[dict[str, str]]:
    incomplete = [c.spec["name"] for c in facts.init if c.exit_code != 0]
    unready = [c.spec["name"] for c in facts.containers if not c.ready]
    initialized = {"type": "Initialized", "status": "True"}
    if reached == "Succeeded":
        initialized["reason"] = "PodCompleted"
    elif incomplete:
        initialized = _false("Initialized", "ContainersNotInitialized", "incomplete", incomplete)
    ready = {"status": "True"}
    if reached in ("Succeeded", "Failed"):
        ready = {"status": "False", "reason": {"Succeeded": "PodCompleted", "Failed": "PodFailed"}[reached]}
    elif unready:
        ready = _false("", "ContainersNotReady", "unready", unready)
    return [
        {"type": "PodReadyToStartContainers", "status": str(facts.sandbox)},
        initialized,
        {**ready, "type": "Ready"},
        {**ready, "type": "ContainersReady"},
        {"type": "PodScheduled", "status": "True"},
    ]


def _false(type_: str, reason: str, what: str, names: list[str]) -> dict[str, str]:
    message = f"containers with {what} status: [{' '.join(names)}]"
    return {"type": type_, "status": "False", "reason": reason, "message": message}


def _container(facts: ContainerFacts, init: bool = False) -> Obj:
    spec = facts.spec
    status: Obj = {
        "name": spec["name"], "state": facts.state, "lastState": facts.last_state,
        "ready": facts.exit_code == 0 if init else facts.ready, "restartCount": facts.restarts,
        "image": spec["image"], "imageID": image_id(spec["image"]) if facts.container_id else "",
        **({"containerID": facts.container_id} if facts.container_id else {}),
        "started": "running" in facts.state,
    }  # fmt: skip
    resources = spec.get("resources") or {}
    if facts.container_id:
        if resources.get("requests"):
            status["allocatedResources"] = resources["requests"]
        status["resources"] = resources
    mounts = [_mount(m) for m in spec.get("volumeMounts") or ()]
    return {**status, **({"volumeMounts": mounts} if mounts else {})}


def _mount(mount: Obj) -> Obj:
    shown: Obj = {k: mount[k] for k in ("name", "mountPath", "readOnly") if k in mount}
    return {**shown, **({"recursiveReadOnly": "Disabled"} if mount.get("readOnly") else {})}


def image_id(image: str) -> str:
    return "sha256:" + hashlib.sha256(image.encode()).hexdigest()


def container_id(pod_uid: str, container: str, restarts: int) -> str:
    """What containerd would have made up: 64 hexadecimal digits, another for each run."""
    return "containerd://" + hashlib.sha256(f"{pod_uid}/{container}/{restarts}".encode()).hexdigest()


def qos_class(pod: Obj) -> str:
    """Guaranteed, Burstable or BestEffort, from cpu and memory of all containers."""
    seen: list[tuple[Any, Any]] = []
    for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        seen += [(requests.get(r, limits.get(r)), limits.get(r)) for r in ("cpu", "memory")]
    if not any(request or limit for request, limit in seen):
        return "BestEffort"
    return "Guaranteed" if all(limit and request == limit for request, limit in seen) else "Burstable"
