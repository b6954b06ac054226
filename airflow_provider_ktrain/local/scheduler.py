"""The scheduler: which node a pod goes to, and why it goes to none, worded as kube-scheduler words it.

`decide` is pure. Not here: preemption, topology spread, inter-pod affinity, volumes bound to nodes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.quantity import parse
from airflow_provider_ktrain.local.store import Change, Obj, Store, now

UNHELPFUL = "Preemption is not helpful for scheduling"
NO_VICTIMS = "No preemption victims found for incoming pod"
DEFAULTS = {
    "cpu": Decimal("0.1"),
    "memory": Decimal(200 * 1024**2),
}  # what scoring assumes of pods that ask for nothing
Amounts = dict[str, Decimal]


@dataclass(frozen=True)
class Decision:
    """Where a pod goes, or why nowhere."""

    node: str | None
    message: str = ""


@dataclass
class Host:
    """A node and what the pods on it have asked for."""

    node: Obj
    used: Amounts = field(default_factory=dict)

    @property
    def name(self) -> str:
        name: str = self.node["metadata"]["name"]
        return name

    @property
    def labels(self) -> dict[str, str]:
        return self.node["metadata"].get("labels") or {}

    def allocatable(self, resource: str) -> Decimal:
        return parse(self.node["status"].get("allocatable", {}).get(resource, 0))

    def add(self, pod: Obj) -> None:
        for resource, amount in requests(pod).items():
            self.used[resource] = self.used.get(resource, Decimal(0)) + amount


def requests(pod: Obj) -> Amounts:
    """What a pod asks for: the sum of its containers, or the largest init container; a limit alone is a request too."""

    def of(container: Obj) -> Amounts:
        resources = container.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return {name: parse(amount) for name, amount in asked.items()}

    total: Amounts = {"pods": Decimal(1)}
    for container in pod["spec"]["containers"]:
        for name, amount in of(container).items():
            total[name] = total.get(name, Decimal(0)) + amount
    for container in pod["spec"].get("initContainers") or ():
        for name, amount in of(container).items():
            total[name] = max(total.get(name, Decimal(0)), amount)
    return total


def priority(pod: Obj) -> int:
    return int(pod["spec"].get("priority") or 0)


def decide(pod: Obj, hosts: Sequence[Host]) -> Decision:
    """The best node that the pod fits on."""
    if not hosts:
        return Decision(None, "no nodes available to schedule pods")
    asked = requests(pod)
    refusals = {host.name: _refusal(pod, asked, host) for host in hosts}
    fitting = [host for host in hosts if not refusals[host.name][0]]
    if fitting:
        return Decision(max(fitting, key=lambda host: _score(pod, asked, host)).name)
    reasons = Counter(reason for why, _ in refusals.values() for reason in why)
    preemption = Counter(NO_VICTIMS if freeable else UNHELPFUL for _, freeable in refusals.values())
    if (pod["spec"].get("preemptionPolicy") or "") == "Never":
        after = "preemption: not eligible due to preemptionPolicy=Never."
    else:
        after = f"preemption: {_counted(len(hosts), preemption)}"
    return Decision(None, f"{_counted(len(hosts), reasons)} no new claims to deallocate, {after}")


def _counted(nodes: int, reasons: Counter[str]) -> str:
    return f"0/{nodes} nodes are available: {', '.join(sorted(f'{n} {reason}' for reason, n in reasons.items()))}."


def _refusal(pod: Obj, asked: Amounts, host: Host) -> tuple[list[str], bool]:
    """Why the first filter that refuses the host does so, and whether the end of other pods could change that."""
    spec = host.node["spec"]
    if spec.get("unschedulable") and not tolerates(
        pod, {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ):
        return ["node(s) were unschedulable"], False
    for taint in spec.get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not tolerates(pod, taint):
            value = f": {taint['value']}" if taint.get("value") else ""
            return [f"node(s) had untolerated taint {{{taint['key']}{value}}}"], False
    if not selected(pod, host):
        return ["node(s) didn't match Pod's node affinity/selector"], False
    short = [n for n, amount in asked.items() if amount and amount + host.used.get(n, Decimal(0)) > host.allocatable(n)]
    reasons = ["Too many pods" if name == "pods" else f"Insufficient {name}" for name in short]
    return reasons, all(asked[name] <= host.allocatable(name) for name in short)


def tolerates(pod: Obj, taint: Obj) -> bool:
    """Whether one of the pod's tolerations covers the taint."""
    for toleration in pod["spec"].get("tolerations") or ():
        if toleration.get("effect") and toleration["effect"] != taint["effect"]:
            continue
        if toleration.get("key") and toleration["key"] != taint["key"]:
            continue
        if toleration.get("operator", "Equal") == "Exists":
            return True
        if toleration.get("key") and toleration.get("value", "") == taint.get("value", ""):
            return True
    return False


def selected(pod: Obj, host: Host) -> bool:
    """Whether nodeSelector and the required node affinity want the host."""
    if not (pod["spec"].get("nodeSelector") or {}).items() <= host.labels.items():
        return False
    required = _affinity(pod).get("requiredDuringSchedulingIgnoredDuringExecution")
    return not required or any(_term(term, host) for term in required.get("nodeSelectorTerms") or ())


def _affinity(pod: Obj) -> Obj:
    return (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}


def _term(term: Obj, host: Host) -> bool:
    """A node selector term; one that says nothing selects nothing."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    matches = [_matches(e, host.labels) for e in expressions]
    matches += [_matches(f, {"metadata.name": host.name}) for f in fields]
    return bool(matches) and all(matches)


def _matches(expression: Obj, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), list(expression.get("values") or ())
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    number = int(value) if value and value.lstrip("-").isdigit() else None
    if number is None:
        return False
    return number > int(values[0]) if expression["operator"] == "Gt" else number < int(values[0])


def _score(pod: Obj, asked: Amounts, host: Host) -> tuple[int, int, Decimal]:
    """Preferred affinity first, then fewest taints that it should avoid, then the most room in cpu and memory."""
    preferred = _affinity(pod).get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    liked = sum(term["weight"] for term in preferred if _term(term["preference"], host))
    avoided = [
        t for t in host.node["spec"].get("taints") or () if t["effect"] == "PreferNoSchedule" and not tolerates(pod, t)
    ]
    room = Decimal(0)
    for name, least in DEFAULTS.items():
        assumed = least * host.used.get("pods", Decimal(0))
        total = host.allocatable(name)
        if total:
            room += (total - max(host.used.get(name, Decimal(0)), assumed) - asked.get(name, least)) / total
    return liked, -len(avoided), room


class Scheduler:
    """Binds pending pods, those of higher priority first, again whenever a pod or node changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recorder = EventRecorder(store, "default-scheduler")
        self._changed = asyncio.Event()
        self._told: dict[str, str] = {}  # pod uid -> message of its last event

    async def run(self) -> None:
        """Until cancelled."""
        stops = [self._store.subscribe(resource, self._look) for resource in (r.POD, r.NODE)]
        self._changed.set()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self.schedule()
        finally:
            for stop in stops:
                stop()

    def _look(self, change: Change) -> None:
        old, new = change.previous or {}, change.object
        relevant = (
            change.type != "MODIFIED" or _terminal(old) != _terminal(new) or old.get("spec") != new.get("spec")
            or old["metadata"].get("labels") != new["metadata"].get("labels")
            or (change.resource == r.NODE and old.get("status") != new.get("status"))
        )  # fmt: skip
        if relevant:
            self._changed.set()

    def schedule(self) -> None:
        """One round over all pods that have no node."""
        hosts = {n["metadata"]["name"]: Host(n) for n in self._store.list(r.NODE)}
        pods = self._store.list(r.POD)
        for pod in pods:
            if pod["spec"].get("nodeName") in hosts and not _terminal(pod):
                hosts[pod["spec"]["nodeName"]].add(pod)
        for pod in sorted(_pending(pods), key=_turn):
            decision = decide(pod, list(hosts.values()))
            if decision.node is None:
                self._refuse(pod, decision.message)
            elif self._bind(pod, decision.node):
                hosts[decision.node].add(pod)
        gone = self._told.keys() - {p["metadata"]["uid"] for p in pods}
        for uid in gone:
            del self._told[uid]

    def _bind(self, pod: Obj, node: str) -> bool:
        meta = pod["metadata"]
        try:
            bound = self._store.update(r.POD, {**pod, "spec": {**pod["spec"], "nodeName": node}})
            self._store.update_status(r.POD, bound, _scheduled(bound, {"status": "True"}))
        except ApiError:
            return False  # it changed or went: the change brings another round
        message = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
        self._recorder.event(bound, "Normal", "Scheduled", message)
        return True

    def _refuse(self, pod: Obj, message: str) -> None:
        uid = pod["metadata"]["uid"]
        if self._told.get(uid) != message:
            self._told[uid] = message
            self._recorder.event(pod, "Warning", "FailedScheduling", message)
            refusal = {"status": "False", "reason": "Unschedulable", "message": message}
            self._store.update_status(r.POD, pod, _scheduled(pod, refusal))


def _turn(pod: Obj) -> tuple[int, str, int]:
    return -priority(pod), pod["metadata"]["creationTimestamp"], int(pod["metadata"]["resourceVersion"])


def _pending(pods: Iterable[Obj]) -> list[Obj]:
    return [
        p for p in pods
        if not p["spec"].get("nodeName") and not _terminal(p) and "deletionTimestamp" not in p["metadata"]
        and not p["spec"].get("schedulingGates")
    ]  # fmt: skip


def _terminal(pod: Obj) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _scheduled(pod: Obj, condition: dict[str, str]) -> Obj:
    status = pod.get("status") or {"phase": "Pending"}
    others = [c for c in status.get("conditions") or () if c["type"] != "PodScheduled"]
    old: Obj = next((c for c in status.get("conditions") or () if c["type"] == "PodScheduled"), {})
    since = old["lastTransitionTime"] if old.get("status") == condition["status"] else now()
    new = {
        "type": "PodScheduled", "status": condition["status"], "lastProbeTime": None, "lastTransitionTime": since,
        **{k: v for k, v in condition.items() if k != "status"},
    }  # fmt: skip
    return {**status, "conditions": [*others, new]}


async def run(store: Store) -> None:
    """The scheduler of a cluster, until cancelled."""
    await Scheduler(store).run()
