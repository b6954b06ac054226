"""Disruptions of pods: the condition DisruptionTarget, and evictions that respect PodDisruptionBudgets."""

from __future__ import annotations

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects import selectors
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.store import Obj, Objects, Store, at, now

REFUSED = "Cannot evict pod as it would violate the pod's disruption budget."
TWO_BUDGETS = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
RETRY_AFTER = 10  # seconds to wait for the status of a new budget


def mark(store: Store, pod: Obj, reason: str, message: str, **status: str) -> Obj:
    """Set the condition DisruptionTarget of a pod, and other fields of its status. Returns the updated pod."""
    conditions = at(pod, "status.conditions", [])
    old = next((c for c in conditions if c["type"] == "DisruptionTarget"), None)
    new = {
        "type": "DisruptionTarget", "observedGeneration": pod["metadata"].get("generation", 1), "status": "True",
        "lastProbeTime": None, "lastTransitionTime": old["lastTransitionTime"] if old else now(), "reason": reason,
        "message": message,
    }  # fmt: skip
    conditions = [*(c for c in conditions if c is not old), new]
    return store.update_status(r.POD, pod, {**at(pod, "status", {}), **status, "conditions": conditions})


def delete(store: Store, pod: Obj, reason: str, message: str) -> None:
    """Mark a pod as the target of a disruption and delete it with its own grace period."""
    marked = mark(store, pod, reason, message)
    store.delete(r.POD, pod["metadata"]["namespace"], pod["metadata"]["name"], uid=marked["metadata"]["uid"])


def evict(store: Store, pod: Obj, options: Obj, *, dry_run: bool = False) -> None:
    """Delete a pod as the eviction API does.

    :param options: the DeleteOptions of the eviction.
    :param dry_run: check the budgets only.
    :raises ApiError: 429 if a budget doesn't allow it, 500 if the pod has more than one budget, 409 if a precondition
        fails.
    """
    meta = pod["metadata"]
    budgets = [] if _is_free(pod) else budgets_of(store, pod)
    if len(budgets) > 1:
        raise ApiError(500, TWO_BUDGETS, "", details={})
    if budgets and not _is_unhealthy(budgets[0], pod):
        _take(store, budgets[0], meta["name"], dry_run=dry_run)
    if dry_run:
        return
    version = at(options, "preconditions.resourceVersion")
    if version in (None, meta["resourceVersion"]) and "deletionTimestamp" not in meta:
        marked = mark(store, pod, "EvictionByEvictionAPI", "Eviction API: evicting")
        version = version and marked["metadata"]["resourceVersion"]
    store.delete(
        r.POD, meta["namespace"], meta["name"], grace=options.get("gracePeriodSeconds"),
        uid=at(options, "preconditions.uid"), version=version,
    )  # fmt: skip


def selects(budget: Obj, pod: Obj) -> bool:
    """Whether a budget selects the pod. An empty selector selects all pods of the namespace, no selector none."""
    selector, meta = at(budget, "spec.selector"), pod["metadata"]
    if selector is None or budget["metadata"]["namespace"] != meta["namespace"]:
        return False
    return selectors.of_labels(selector, meta.get("labels") or {})


def budgets_of(store: Store, pod: Obj) -> Objects:
    """The PodDisruptionBudgets that select a pod."""
    return [b for b in store.list(r.DISRUPTION_BUDGET, pod["metadata"]["namespace"]) if selects(b, pod)]


def is_ready(pod: Obj) -> bool:
    """Whether the pod's condition Ready is True."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in at(pod, "status.conditions", ()))


def _is_free(pod: Obj) -> bool:
    """Whether no budget protects the pod: it has ended or hasn't started, or it is being deleted."""
    pending = at(pod, "status.phase", "Pending") == "Pending"
    return has_ended(pod) or pending or "deletionTimestamp" in pod["metadata"]


def _is_unhealthy(budget: Obj, pod: Obj) -> bool:
    """Whether the budget's unhealthyPodEvictionPolicy allows the eviction because the pod isn't ready."""
    always = at(budget, "spec.unhealthyPodEvictionPolicy") == "AlwaysAllow"
    desired = at(budget, "status.desiredHealthy", 0)
    return not is_ready(pod) and (always or 0 < desired <= at(budget, "status.currentHealthy", 0))


def _take(store: Store, budget: Obj, pod: str, *, dry_run: bool) -> None:
    """Take one disruption from the budget's status. Raise ApiError 429 if none is left."""
    name, status = budget["metadata"]["name"], at(budget, "status", {})
    if status.get("observedGeneration", 0) < budget["metadata"].get("generation", 1):
        why = f"The disruption budget {name} is still being processed by the server."
        cause = {"reason": "DisruptionBudget", "message": why}
        raise ApiError(429, REFUSED, details={"causes": [cause], "retryAfterSeconds": RETRY_AFTER})
    left = status.get("disruptionsAllowed", 0) - 1
    if left < 0:
        healthy = f"{status['desiredHealthy']} healthy pods and has {status['currentHealthy']} currently"
        cause = {"reason": "DisruptionBudget", "message": f"The disruption budget {name} needs {healthy}"}
        raise ApiError(429, REFUSED, details={"causes": [cause]})
    if not dry_run:
        disrupted = {**status.get("disruptedPods", {}), pod: now()}
        new = {**status, "disruptedPods": disrupted, "disruptionsAllowed": left}
        store.update_status(r.DISRUPTION_BUDGET, budget, new | {"conditions": [allowed(budget, left)]})


def allowed(budget: Obj, disruptions: int) -> Obj:
    """The condition DisruptionAllowed of a budget."""
    status, reason = ("True", "SufficientPods") if disruptions > 0 else ("False", "InsufficientPods")
    old: Obj = next((c for c in at(budget, "status.conditions", ()) if c["type"] == "DisruptionAllowed"), {})
    return {
        "type": "DisruptionAllowed", "status": status, "observedGeneration": budget["metadata"].get("generation", 1),
        "lastTransitionTime": old["lastTransitionTime"] if old.get("status") == status else now(), "reason": reason,
        "message": "",
    }  # fmt: skip
