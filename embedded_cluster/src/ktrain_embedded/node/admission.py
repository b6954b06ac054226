"""The kubelet's admission of pods: a pod that doesn't fit on its node fails without having started."""

from __future__ import annotations

from collections.abc import Iterable

from ktrain_embedded.objects.store import Obj
from ktrain_embedded.scheduler import Host, requests, selected

NODE_AFFINITY = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"


def refusal(pod: Obj, node: Obj, admitted: Iterable[Obj], devices: str = "") -> tuple[str, str] | None:
    """Reason and message of the rejection of a pod, or None if the node admits it.

    :param admitted: the other pods of the node.
    :param devices: why devices can't be allocated; "" if they can.
    """
    host, asked = Host(node), requests(pod)
    for other in admitted:
        host.add(other)
    for name, amount in asked.items():
        if amount and amount + host.used[name] > host.allocatable(name):
            unit = 1000 if name == "cpu" else 1
            wanted, used, capacity = (int(x * unit) for x in (amount, host.used[name], host.allocatable(name)))
            numbers = f"requested: {wanted}, used: {used}, capacity: {capacity}"
            return f"OutOf{name}", f"Node didn't have enough resource: {name}, {numbers}"
    if not selected(pod, host):
        return "NodeAffinity", NODE_AFFINITY
    if devices and any("/" in name and amount for name, amount in asked.items()):
        return "UnexpectedAdmissionError", f"Allocate failed due to {devices}, which is unexpected"
    return None
