"""The disruption controller: the status of PodDisruptionBudgets, which the eviction API reads."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers.runtime import Clock, Controller, Key, itself
from ktrain_embedded.events import EventRecorder
from ktrain_embedded.objects import disruptions
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Change, Obj, Objects, Store, at

STALE = 120.0  # seconds after which an evicted pod that isn't being deleted counts as healthy again
SCALE = "spec.pytorchReplicaSpecs.Worker.replicas"  # what the scale subresource of a PyTorchJob counts


class NotScalable(Exception):
    """A pod's controller has no scale subresource, so the number of expected pods is unknown."""


class DisruptionController(Controller[Key]):
    """Counts the healthy pods of each budget, and those that it needs.

    A percentage and maxUnavailable refer to the replicas of the pods' controllers, from their scale subresource. That
    of a PyTorchJob counts Workers only. MPIJobs and Jobs have none: their pods can't be evicted under such a budget.
    """

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self._recorder = EventRecorder(store, "controllermanager")
        self.watch(r.DISRUPTION_BUDGET, itself)
        self.watch(r.POD, self._of_pod)

    def _of_pod(self, change: Change) -> Iterable[Key]:
        pod = change.object["metadata"]
        return [(pod["namespace"], b["metadata"]["name"]) for b in disruptions.budgets_of(self.store, change.object)]

    def reconcile(self, key: Key) -> float | None:
        """Update the status of one budget. Returns the seconds until an evicted pod counts as healthy again."""
        budget = self.store.find(r.DISRUPTION_BUDGET, *key)
        if budget is None:
            return None
        pods = [pod for pod in self.store.list(r.POD, key[0]) if disruptions.selects(budget, pod)]
        if not pods:
            self._recorder.event(budget, "Normal", "NoPods", "No matching pods found")
        try:
            expected, desired = self._needed(budget, pods)
        except NotScalable as error:
            message = f"Failed to calculate the number of expected pods: {error}"
            self._recorder.event(budget, "Warning", "CalculateExpectedPodCountFailed", message)
            failed = {**disruptions.allowed(budget, 0), "reason": "SyncFailed", "message": str(error)}
            status = {**at(budget, "status", {}), "disruptionsAllowed": 0, "conditions": [failed]}
            self.store.update_status(r.DISRUPTION_BUDGET, budget, status)
            return None
        alive = {pod["metadata"]["name"] for pod in pods if not c.is_terminating(pod)}
        since = at(budget, "status.disruptedPods", {})
        left = {name: c.seconds(then) + STALE - self.clock() for name, then in since.items() if name in alive}
        disrupted = {name: since[name] for name, seconds in left.items() if seconds > 0}
        healthy = sum(
            disruptions.is_ready(pod) and not c.is_terminating(pod) and pod["metadata"]["name"] not in disrupted
            for pod in pods
        )
        disruptions_allowed = max(healthy - desired, 0) if expected else 0
        status = {
            "observedGeneration": budget["metadata"].get("generation", 1),
            **({"disruptedPods": disrupted} if disrupted else {}),
            "disruptionsAllowed": disruptions_allowed, "currentHealthy": healthy, "desiredHealthy": desired,
            "expectedPods": expected, "conditions": [disruptions.allowed(budget, disruptions_allowed)],
        }  # fmt: skip
        self.store.update_status(r.DISRUPTION_BUDGET, budget, status)
        return min((left[name] for name in disrupted), default=None)

    def _needed(self, budget: Obj, pods: Objects) -> tuple[int, int]:
        """The number of expected pods, and of those that must be healthy."""
        spec = budget["spec"]
        if spec.get("maxUnavailable") is not None:
            expected = self._replicas(pods)
            return expected, max(expected - _scaled(spec["maxUnavailable"], expected), 0)
        least = spec.get("minAvailable", 1)
        if isinstance(least, int):
            return len(pods), least
        expected = self._replicas(pods)
        return expected, _scaled(least, expected)

    def _replicas(self, pods: Objects) -> int:
        """The sum of the replicas of the pods' controllers. NotScalable if one has no scale subresource."""
        replicas = 0
        owners = {owner["uid"]: owner for pod in pods if (owner := c.controller_of(pod))}
        for uid, owner in owners.items():
            if owner["kind"] != r.PYTORCHJOB.kind:
                resource = r.BATCH_JOB if owner["kind"] == r.BATCH_JOB.kind else r.MPIJOB_V1
                raise NotScalable(f"{resource.group_resource} does not implement the scale subresource")
            jobs = (self.store.find(r.PYTORCHJOB, pod["metadata"]["namespace"], owner["name"]) for pod in pods)
            job = next((job for job in jobs if job and job["metadata"]["uid"] == uid), None)
            replicas += int(at(job, SCALE, 0))
        return replicas


def _scaled(value: int | str, total: int) -> int:
    """A number, or a percentage of `total`, rounded up."""
    return value if isinstance(value, int) else math.ceil(total * float(value.rstrip("%")) / 100)
