"""The scheduler. It selects a node for each pod. If no node fits, the message is the same as kube-scheduler's.

`decide` is a pure function. Not implemented: topology spread, inter-pod affinity, volumes that
are bound to nodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from ktrain_embedded.events import EventRecorder
from ktrain_embedded.objects import disruptions
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.quantity import parse
from ktrain_embedded.objects.store import Change, Obj, Store, at, now

NAME = "default-scheduler"
PREEMPTION_IS_NOT_HELPFUL = "Preemption is not helpful for scheduling"
ON_ITS_WAY = "not eligible due to a terminating pod on the nominated node"
NEVER = "not eligible due to preemptionPolicy=Never"
PREEMPTING = f"{NAME}: preempting to accommodate a higher priority pod"
NO_VICTIMS = "No preemption victims found for incoming pod"
#: Operators of node affinity: whether a label's value matches. The value is None if the node doesn't have the label.
#: Gt, Lt and unknown operators don't match any node.
OPERATORS: dict[str, Callable[[str | None, Sequence[str]], bool]] = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, _: value is not None,
    "DoesNotExist": lambda value, _: value is None,
}
Amounts = defaultdict[str, Decimal]


@dataclass(frozen=True)
class Decision:
    """The node for a pod, or the message that explains why no node fits."""

    node: str | None
    message: str = ""


@dataclass
class Host:
    """A node, its pods, and the sum of their requests."""

    node: Obj
    used: Amounts = field(default_factory=lambda: Amounts(Decimal))
    pods: list[Obj] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self.node["metadata"]["name"])

    def allocatable(self, resource: str) -> Decimal:
        """The amount of a resource that pods may request on this node."""
        return parse(self.node["status"].get("allocatable", {}).get(resource, 0))

    def add(self, pod: Obj) -> None:
        """Count a pod's requests as used."""
        self.pods.append(pod)
        for resource, amount in requests(pod).items():
            self.used[resource] += amount


def requests(pod: Obj) -> Amounts:
    """The pod's requests: the sum of its containers, or the largest init container. A request defaults to the limit."""

    def of(container: Obj) -> Iterable[tuple[str, Decimal]]:
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return ((name, parse(amount)) for name, amount in asked.items())

    total = Amounts(Decimal, pods=Decimal(1))
    for container in pod["spec"]["containers"]:
        for name, amount in of(container):
            total[name] += amount
    for container in pod["spec"].get("initContainers") or ():
        for name, amount in of(container):
            total[name] = max(total[name], amount)
    return total


def decide(pod: Obj, hosts: Sequence[Host]) -> Decision:
    """Select the most preferred node among those that fit, then the one with the fewest pods."""
    if not hosts:
        return Decision(None, "no nodes available to schedule pods")
    asked = requests(pod)
    refusals = [_refusal(pod, asked, host) for host in hosts]
    fitting = [host for host, (why, _) in zip(hosts, refusals, strict=True) if not why]
    if fitting:
        return Decision(min(fitting, key=lambda host: (-preference(pod, host), host.used["pods"])).name)
    reasons = _counted(reason for why, _ in refusals for reason in why)
    preemption = _counted(NO_VICTIMS if freeable else PREEMPTION_IS_NOT_HELPFUL for _, freeable in refusals)
    there = f"0/{len(hosts)} nodes are available:"
    return Decision(None, f"{there} {reasons}. no new claims to deallocate, preemption: {there} {preemption}.")


def victims(pod: Obj, host: Host) -> list[Obj] | None:
    """The pods of lower priority that must end so that the pod fits: as few and as unimportant as possible.

    None if it doesn't fit even without all of them.
    """
    asked = requests(pod)
    lower = sorted((p for p in host.pods if priority(p) < priority(pod)), key=lambda p: -priority(p))
    kept = Host(host.node)
    for other in (p for p in host.pods if priority(p) >= priority(pod)):
        kept.add(other)
    if _refusal(pod, asked, kept)[0]:
        return None
    found = []
    for other in lower:  # the most important ones stay if they can
        before = Host(kept.node, Amounts(Decimal, kept.used), list(kept.pods))
        kept.add(other)
        if _refusal(pod, asked, kept)[0]:
            kept = before
            found.append(other)
    return found


def priority(pod: Obj) -> int:
    """The priority of a pod."""
    return int(pod["spec"].get("priority") or 0)


def without_claim(why: str, hosts: int) -> Decision:
    """The decision for a pod with a claim that doesn't exist or isn't bound."""
    there = f"0/{hosts} nodes are available:"
    return Decision(
        None, f"{there} {why}. no new claims to deallocate, preemption: {there} {hosts} {PREEMPTION_IS_NOT_HELPFUL}."
    )


def _counted(reasons: Iterable[str]) -> str:
    return ", ".join(sorted(f"{n} {reason}" for reason, n in Counter(reasons).items()))


def _refusal(pod: Obj, asked: Amounts, host: Host) -> tuple[list[str], bool]:
    """The reasons of the first filter that rejects the host, and whether removing other pods could help."""
    spec = host.node["spec"]
    if spec.get("unschedulable"):
        return ["node(s) were unschedulable"], False
    for taint in spec.get("taints") or ():
        if taint["effect"] != "PreferNoSchedule" and toleration_of(pod, taint) is None:
            value = f": {taint['value']}" if taint.get("value") else ""
            return [f"node(s) had untolerated taint {{{taint['key']}{value}}}"], False
    if not selected(pod, host):
        return ["node(s) didn't match Pod's node affinity/selector"], False
    short = [name for name, amount in asked.items() if amount and amount + host.used[name] > host.allocatable(name)]
    reasons = ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in short]
    return reasons, all(asked[name] <= host.allocatable(name) for name in short)


def toleration_of(pod: Obj, taint: Obj) -> Obj | None:
    """The pod's first toleration of the taint. An empty effect, or an empty key with Exists, matches every taint."""
    for toleration in pod["spec"].get("tolerations") or ():
        exists = toleration.get("operator") == "Exists"
        same = all(toleration[key] == taint[key] for key in ("key", "effect") if toleration.get(key))
        if same and (exists or (toleration.get("key") and toleration.get("value", "") == taint.get("value", ""))):
            found: Obj = toleration
            return found
    return None


def selected(pod: Obj, host: Host) -> bool:
    """Whether nodeSelector and the required node affinity match the host. An empty term doesn't match any."""
    labels = host.node["metadata"].get("labels") or {}
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not (pod["spec"].get("nodeSelector") or {}).items() <= labels.items():
        return False
    fields = {"metadata.name": host.name}
    return not required or any(_term(term, labels, fields) for term in required.get("nodeSelectorTerms") or ())


def preference(pod: Obj, host: Host) -> int:
    """The sum of the weights of the preferred node affinity that matches the host."""
    labels = host.node["metadata"].get("labels") or {}
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    return sum(x["weight"] for x in preferred if _term(x["preference"], labels, {"metadata.name": host.name}))


def _term(term: Obj, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Whether the node's labels and fields match a term."""
    expressions = [(e, labels) for e in term.get("matchExpressions") or ()]
    expressions += [(e, fields) for e in term.get("matchFields") or ()]
    return bool(expressions) and all(
        e["operator"] in OPERATORS and OPERATORS[e["operator"]](values.get(e["key"]), e.get("values") or ())
        for e, values in expressions
    )


class Scheduler:
    """Binds pending pods, those of higher priority first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recorder = EventRecorder(store, NAME)

    def schedule(self) -> None:
        """Try once to schedule all pods that don't have a node."""
        hosts = {n["metadata"]["name"]: Host(n) for n in self._store.list(r.NODE)}
        pods = self._store.list(r.POD)
        for pod in pods:
            if _holds(pod) and pod["spec"]["nodeName"] in hosts:
                hosts[pod["spec"]["nodeName"]].add(pod)
        for pod in sorted(filter(_waits, pods), key=_turn):
            unbound = self._unbound_claim(pod)
            decision = without_claim(unbound, len(hosts)) if unbound else decide(pod, list(hosts.values()))
            if decision.node is None:
                self._refuse(pod, decision.message if unbound else self._preempt(pod, hosts, decision.message))
            elif self._bind(pod, decision.node):
                hosts[decision.node].add(pod)

    def _preempt(self, pod: Obj, hosts: dict[str, Host], message: str) -> str:
        """Delete pods of lower priority so that the pod fits on a node. Returns the message of the pod's condition."""
        reasons = message.partition(" no new claims")[0]
        nominated = hosts.get(pod.get("status", {}).get("nominatedNodeName") or "")
        if nominated and any(priority(p) < priority(pod) and _ends(p) for p in nominated.pods):
            return f"{reasons} no new claims to deallocate, preemption: {ON_ITS_WAY}."
        if pod["spec"].get("preemptionPolicy") == "Never":
            return f"{reasons} no new claims to deallocate, preemption: {NEVER}."
        found = {name: needed for name, host in hosts.items() if (needed := victims(pod, host))}
        if not found:
            return message
        node = min(found, key=lambda name: (max(map(priority, found[name])), len(found[name])))
        status = {**(pod.get("status") or {"phase": "Pending"}), "nominatedNodeName": node}
        self._store.update_status(r.POD, pod, status)
        for victim in found[node]:
            why = f"Preempted by pod {pod['metadata']['uid']} on node {node}"
            self._recorder.event(victim, "Normal", "Preempted", why)
            if not _ends(victim):
                disruptions.delete(self._store, victim, "PreemptionByScheduler", PREEMPTING)
        return reasons

    def _unbound_claim(self, pod: Obj) -> str:
        """Why the pod's claims don't allow to schedule it; "" if they do."""
        for volume in pod["spec"].get("volumes") or ():
            if name := volume.get("persistentVolumeClaim", {}).get("claimName"):
                claim = self._store.find(r.CLAIM, pod["metadata"]["namespace"], name)
                if claim is None:
                    return f'persistentvolumeclaim "{name}" not found'
                if at(claim, "status.phase") != "Bound":
                    return "pod has unbound immediate PersistentVolumeClaims"
        return ""

    def _bind(self, pod: Obj, node: str) -> bool:
        meta = pod["metadata"]
        try:
            bound = self._store.update(r.POD, {**pod, "spec": {**pod["spec"], "nodeName": node}})
            status = _scheduled(bound, {"status": "True"})
            status.pop("nominatedNodeName", None)
            self._store.update_status(r.POD, bound, status)
        except ApiError:
            return False  # the pod was changed or deleted, which triggers another round
        message = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
        self._recorder.event(bound, "Normal", "Scheduled", message)
        return True

    def _refuse(self, pod: Obj, message: str) -> None:
        refusal = {"status": "False", "reason": "Unschedulable", "message": message}
        if _condition(pod).get("message") != message:
            self._recorder.event(pod, "Warning", "FailedScheduling", message)
            pod = self._store.get(r.POD, pod["metadata"]["namespace"], pod["metadata"]["name"])
            self._store.update_status(r.POD, pod, _scheduled(pod, refusal))


def _turn(pod: Obj) -> tuple[int, str, int]:
    meta = pod["metadata"]
    return -priority(pod), meta["creationTimestamp"], int(meta["resourceVersion"])


def _ends(pod: Obj) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _holds(pod: Obj) -> bool:
    """Whether the pod occupies its requests on a node."""
    return bool(pod["spec"].get("nodeName")) and not has_ended(pod)


def _waits(pod: Obj) -> bool:
    """Whether the pod waits for this scheduler."""
    spec = pod["spec"]
    free = not spec.get("nodeName") and not spec.get("schedulingGates") and spec.get("schedulerName", NAME) == NAME
    return free and not has_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def _condition(pod: Obj) -> Obj:
    conditions = pod.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == "PodScheduled"), {})


def _scheduled(pod: Obj, condition: dict[str, str]) -> Obj:
    """The pod's status with its condition PodScheduled."""
    status, old = pod.get("status") or {"phase": "Pending"}, _condition(pod)
    since = old["lastTransitionTime"] if old.get("status") == condition["status"] else now()
    new = {"type": "PodScheduled", **condition, "lastProbeTime": None, "lastTransitionTime": since}
    return {**status, "conditions": [*(c for c in status.get("conditions") or () if c["type"] != "PodScheduled"), new]}


async def run(store: Store) -> None:
    """Run the scheduler until cancelled. Pods are scheduled when a pod or a node changes."""
    scheduler, changed = Scheduler(store), asyncio.Event()

    def look(change: Change) -> None:
        """Start a round, unless the change is an update of a pod that is bound and hasn't ended."""
        if change.type != "MODIFIED" or change.resource != r.POD or not _holds(change.object):
            changed.set()

    stops = [store.subscribe(resource, look) for resource in (r.POD, r.NODE, r.CLAIM)]
    try:
        while True:
            scheduler.schedule()
            await changed.wait()
            changed.clear()
    finally:
        for stop in stops:
            stop()
