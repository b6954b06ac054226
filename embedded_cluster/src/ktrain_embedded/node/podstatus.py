"""Computes a pod's status from the kubelet's facts. Pure functions, like the real kubelet's generateAPIPodStatus.

The order and the text of the conditions match recordings of Kubernetes 1.36. So does the time between the end of the
last container and the end of the pod, when the conditions already show the end but the phase hasn't changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from ktrain_embedded.objects.pods import TERMINAL
from ktrain_embedded.objects.store import Obj


@dataclass
class ContainerFacts:
    """One container of a pod. `state` and `last_state` have the format of the Kubernetes API."""

    spec: Obj
    state: Obj
    last_state: Obj = field(default_factory=dict)
    restarts: int = 0
    container_id: str = ""

    @property
    def name(self) -> str:
        """The container's name."""
        return str(self.spec["name"])

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None if the container isn't terminated."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    @property
    def running(self) -> bool:
        """Whether the container runs now."""
        return "running" in self.state


@dataclass
class PodFacts:
    """The kubelet's facts about a pod. `finished`: all containers have ended and none will be restarted."""

    start_time: str
    host_ip: str
    init: list[ContainerFacts]
    containers: list[ContainerFacts]
    ip: str = ""
    sandbox: bool = False
    finished: bool = False
    #: Why the kubelet ended the pod (Evicted, DeadlineExceeded, Terminated), with its message.
    reason: str = ""
    message: str = ""
    disrupted: bool = False  #: Whether the cause is the node, and not the pod's own limits.


def new(pod: Obj, start_time: str, host_ip: str) -> PodFacts:
    """The facts of a pod before its first container starts."""
    spec = pod["spec"]
    waiting = "PodInitializing" if spec.get("initContainers") else "ContainerCreating"

    def fresh(containers: list[Obj] | None) -> list[ContainerFacts]:
        return [ContainerFacts(c, {"waiting": {"reason": waiting}}) for c in containers or ()]

    return PodFacts(start_time, host_ip, fresh(spec.get("initContainers")), fresh(spec["containers"]))


def phase(pod: Obj, facts: PodFacts) -> str:
    """Determine the phase from the states of the containers, like the real kubelet's getPhase."""
    policy = pod["spec"].get("restartPolicy", "Always")
    ran = [c for c in facts.containers if c.exit_code is not None]
    final = facts.finished or policy == "Never"  # no container will be restarted
    if facts.reason or (final and any(c.exit_code for c in facts.init)):
        return "Failed"
    if any(c.exit_code != 0 for c in facts.init):
        return "Pending"
    if len(ran) == len(facts.containers) or (facts.finished and ran):
        succeeded = all(c.exit_code == 0 for c in ran)
        if final or (policy == "OnFailure" and succeeded):
            return "Succeeded" if succeeded else "Failed"
        return "Running"
    if any("waiting" in c.state and not c.last_state for c in facts.containers):
        return "Pending"
    return "Running"


def build(pod: Obj, facts: PodFacts, now: str) -> Obj:
    """Build the complete status. Conditions that didn't change keep their times from the status in `pod`."""
    old = pod.get("status", {})
    generation = pod["metadata"].get("generation", 1)
    reached = phase(pod, facts)
    known = {c["type"]: c for c in old.get("conditions") or ()}
    conditions = []
    for condition in _conditions(facts, reached):
        before = known.pop(condition["type"], {})
        same = before.get("status") == condition["status"]
        conditions.append({
            "type": condition["type"], "observedGeneration": generation, "status": condition["status"],
            "lastProbeTime": None, "lastTransitionTime": before["lastTransitionTime"] if same else now,
            **{k: condition[k] for k in ("reason", "message") if condition.get(k)},
        })  # fmt: skip
    conditions += [{**c, "observedGeneration": generation} for c in known.values()]
    return {
        **old,
        "observedGeneration": generation,
        "phase": old.get("phase", "Pending") if reached in TERMINAL and not facts.finished else reached,
        "conditions": conditions,
        **({"message": facts.message, "reason": facts.reason} if facts.reason and facts.finished else {}),
        "hostIP": facts.host_ip, "hostIPs": [{"ip": facts.host_ip}],
        **({"podIP": facts.ip, "podIPs": [{"ip": facts.ip}]} if facts.ip else {}),
        "startTime": facts.start_time,
        **({"initContainerStatuses": [_container(c, init=True) for c in facts.init]} if facts.init else {}),
        "containerStatuses": [_container(c) for c in facts.containers],
    }  # fmt: skip


def _conditions(facts: PodFacts, reached: str) -> list[dict[str, str]]:
    initialized = _all(facts.init, lambda c: c.exit_code == 0, "ContainersNotInitialized", "incomplete")
    ready = _all(facts.containers, lambda c: c.running, "ContainersNotReady", "unready")
    if reached == "Succeeded":
        initialized = {"status": "True", "reason": "PodCompleted"}
    if reached in TERMINAL:
        ready = {"status": "False", "reason": {"Succeeded": "PodCompleted", "Failed": "PodFailed"}[reached]}
    conditions = [
        {"type": "PodReadyToStartContainers", "status": str(facts.sandbox)},
        {"type": "Initialized", **initialized},
        {"type": "Ready", **ready},
        {"type": "ContainersReady", **ready},
        {"type": "PodScheduled", "status": "True"},
    ]
    if facts.disrupted:
        why = {"reason": "TerminationByKubelet", "message": facts.message}
        conditions.append({"type": "DisruptionTarget", "status": "True", **why})
    return conditions


def _all(
    containers: list[ContainerFacts], holds: Callable[[ContainerFacts], bool], reason: str, otherwise: str
) -> dict[str, str]:
    """A condition that is True if `holds` is true for all containers. Otherwise its message lists the others."""
    names = [c.name for c in containers if not holds(c)]
    if not names:
        return {"status": "True"}
    message = f"containers with {otherwise} status: [{' '.join(names)}]"
    return {"status": "False", "reason": reason, "message": message}


def _container(facts: ContainerFacts, init: bool = False) -> Obj:
    image = facts.spec["image"]
    return {
        "name": facts.name, "state": facts.state, "lastState": facts.last_state,
        "ready": facts.exit_code == 0 if init else facts.running, "restartCount": facts.restarts,
        "image": image, "imageID": f"sha256:{_digest(image)}" if facts.container_id else "",
        **({"containerID": facts.container_id} if facts.container_id else {}),
        "started": facts.running,
    }  # fmt: skip


def container_id(pod_uid: str, container: str, restarts: int) -> str:
    """A container id in containerd's format, different for each run."""
    return f"containerd://{_digest(f'{pod_uid}/{container}/{restarts}')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
