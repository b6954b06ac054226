"""batch/v1 Job, as far as launchers of MPIJobs and plain jobs need it: NonIndexed, without pod failure policies."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers.owners import is_controlled_by, owner_reference
from airflow_provider_ktrain.local.controllers.runtime import Clock, Controller, Key, controlled_by, itself
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.store import Obj, Objects, Store

TRACKING = "batch.kubernetes.io/job-tracking"  # the finalizer that keeps a pod until it is counted
BATCH_PERIOD = 1.0  # seconds in which changes of pods are gathered
BACKOFF, BACKOFF_CAP = 10.0, 600.0  # seconds between a failed pod and the next one, doubled each time

BACKOFF_EXCEEDED = ("FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
DEADLINE_EXCEEDED = ("FailureTarget", "DeadlineExceeded", "Job was active longer than specified deadline")
COMPLETED = ("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods")
ENDS = {"FailureTarget": "Failed", "SuccessCriteriaMet": "Complete"}  # what follows once no pod is left


class JobController:
    """Runs Jobs: a pod is counted once, by its tracking finalizer, and a Job ends when its last pod has."""

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        self._store = store
        self._clock = clock
        self._recorder = EventRecorder(store, "job-controller")

    def controller(self) -> Controller[Key]:
        controller = Controller(self._store, self.reconcile, self._clock)
        controller.watch(r.BATCH_JOB, itself)
        controller.watch(r.POD, controlled_by(r.BATCH_JOB), after=BATCH_PERIOD)
        return controller

    def reconcile(self, key: Key) -> float | None:
        """Bring one Job nearer to its end; seconds until a deadline, a retry or its time to live."""
        job = self._store.find(r.BATCH_JOB, *key)
        if job is None:
            for pod in self._store.list(r.POD, key[0]):
                owner = pod["metadata"].get("ownerReferences", [{}])[0]
                if (owner.get("kind"), owner.get("name")) == ("Job", key[1]):
                    self._untrack([pod])
            return None
        pods = [pod for pod in self._store.owned(r.POD, job) if is_controlled_by(pod, job)]
        if c.is_terminating(job):
            self._untrack(pods)
            self._write(job, self._counted(job, pods, ()))
            return None
        if c.has(job.get("status", {}), "Complete", "Failed"):
            return self._expire(job)
        return self._sync(job, pods)

    def _sync(self, job: Obj, pods: Objects) -> float | None:
        spec, now = job["spec"], self._clock()
        old = job.get("status") or {}
        tracked = [pod for pod in pods if TRACKING in (pod["metadata"].get("finalizers") or ())]
        ended = {
            "succeeded": [pod for pod in tracked if c.phase(pod) == "Succeeded"],
            "failed": [pod for pod in tracked if _failed(pod, spec)],
        }
        active = [pod for pod in pods if _is_active(pod)]
        failed, succeeded = (old.get(k, 0) + len(ended[k]) for k in ("failed", "succeeded"))

        outcome = next((tuple(x[k] for k in ("type", "reason", "message")) for x in _interim(old)), None)
        if outcome is None:
            outcome = self._outcome(spec, old, active, failed, succeeded)
        changed: list[Obj] = []
        delay: float | None = None
        start = old.get("startTime")
        if outcome:
            self._delete(job, active)
            ended["failed"] += [pod for pod in active if pod in tracked]
            if outcome[0] not in {x["type"] for x in _interim(old)}:
                changed.append(self._condition("True", *outcome))
        elif spec.get("suspend"):
            self._delete(job, active)
            self._untrack(active)
            start = None
            if not c.has(old, "Suspended"):
                changed.append(self._condition("True", "Suspended", "JobSuspended", "Job suspended"))
                self._recorder.event(job, "Normal", "Suspended", "Job suspended")
        else:
            if c.has(old, "Suspended"):
                changed.append(self._condition("False", "Suspended", "JobResumed", "Job resumed"))
                self._recorder.event(job, "Normal", "Resumed", "Job resumed")
            start = start or c.timestamp(now)
            delay = self._create_missing(job, pods, failed, succeeded)

        pods = [pod for pod in self._store.owned(r.POD, job) if is_controlled_by(pod, job)]
        status = self._counted(job, pods, changed)
        status.pop("startTime", None)
        if start:
            status["startTime"] = start
        uids = {k: [pod["metadata"]["uid"] for pod in found] for k, found in ended.items() if found}
        self._write(job, {**status, "uncountedTerminatedPods": uids})
        for what, found in ended.items():
            self._untrack(found)
            if found:
                status[what] = status.get(what, 0) + len(found)
        if outcome and not status["terminating"]:
            end = ENDS[outcome[0]]
            status["conditions"].append(self._condition("True", end, *outcome[1:]))
            if end == "Complete":
                status["completionTime"] = c.timestamp(now)
            event = ("Normal", "Completed", "Job completed") if end == "Complete" else ("Warning", *outcome[1:])
            self._recorder.event(job, *event)
            delay = spec.get("ttlSecondsAfterFinished")
        elif spec.get("activeDeadlineSeconds") is not None and start:
            left = float(c.seconds(start) + spec["activeDeadlineSeconds"] - now)
            delay = left if delay is None else min(left, delay)
        self._write(job, status)
        return delay

    def _outcome(self, spec: Obj, old: Obj, active: Objects, failed: int, succeeded: int) -> tuple[str, ...] | None:
        """What decides the Job now: type, reason and message of its interim condition."""
        limit, deadline = spec.get("backoffLimit", 6), spec.get("activeDeadlineSeconds")
        restarts = 0
        if spec["template"]["spec"].get("restartPolicy") == "OnFailure":
            restarts = sum(
                x.get("restartCount", 0)
                for pod in active
                for kind in ("initContainerStatuses", "containerStatuses")
                for x in pod.get("status", {}).get(kind) or ()
            )
        if (failed > old.get("failed", 0) and failed > limit) or restarts >= max(limit, 1):
            return BACKOFF_EXCEEDED
        if deadline is not None and "startTime" in old and self._clock() >= c.seconds(old["startTime"]) + deadline:
            return None if spec.get("suspend") else DEADLINE_EXCEEDED
        if succeeded >= spec.get("completions", 1):
            return COMPLETED
        return None

    def _create_missing(self, job: Obj, pods: Objects, failed: int, succeeded: int) -> float | None:
        """Create the pods that miss, or say in how many seconds, after a failure, that may be."""
        spec = job["spec"]
        alive = sum(c.phase(pod) not in ("Succeeded", "Failed") for pod in pods)  # also those that are going
        missing = min(spec.get("parallelism", 1), spec.get("completions", 1) - succeeded) - alive
        if missing <= 0:
            return None
        if failed:
            wait = min(BACKOFF * 2.0 ** (failed - 1), BACKOFF_CAP)
            left = max((_finished(pod) for pod in pods if c.phase(pod) == "Failed"), default=0.0) + wait - self._clock()
            if left > 0:
                return left
        for _ in range(missing):
            template = copy.deepcopy(spec["template"])
            meta = template.get("metadata") or {}
            pod = self._store.create(r.POD, {
                "metadata": {
                    "generateName": f"{job['metadata']['name'][:57]}-", "namespace": job["metadata"]["namespace"],
                    "labels": meta.get("labels") or {}, "finalizers": [TRACKING],
                    "ownerReferences": [owner_reference(job)],
                    **({"annotations": meta["annotations"]} if meta.get("annotations") else {}),
                },
                "spec": template["spec"],
            })  # fmt: skip
            self._recorder.event(job, "Normal", "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        return None

    def _delete(self, job: Obj, pods: Objects) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            self._store.delete(r.POD, pod["metadata"]["namespace"], name)
            self._recorder.event(job, "Normal", "SuccessfulDelete", f"Deleted pod: {name}")

    def _untrack(self, pods: Iterable[Obj]) -> None:
        """Let pods go that are counted, or that nobody counts any more."""
        for seen in pods:
            pod = self._store.find(r.POD, seen["metadata"]["namespace"], seen["metadata"]["name"])
            finalizers = (pod or {}).get("metadata", {}).get("finalizers") or []
            if pod is not None and TRACKING in finalizers:
                left = [f for f in finalizers if f != TRACKING]
                meta = {k: v for k, v in pod["metadata"].items() if k != "finalizers"}
                self._store.update(r.POD, {**pod, "metadata": {**meta, **({"finalizers": left} if left else {})}})

    def _counted(self, job: Obj, pods: Objects, changed: Iterable[Obj]) -> Obj:
        """The Job's status with its live pods counted anew and conditions changed."""
        status = copy.deepcopy(job.get("status") or {})
        active = [pod for pod in pods if _is_active(pod)]
        status.pop("active", None)
        if active:
            status["active"] = len(active)
        status["ready"] = sum(_is_ready(pod) for pod in active)
        status["terminating"] = sum(
            c.is_terminating(pod) and c.phase(pod) not in ("Succeeded", "Failed") for pod in pods
        )
        status["uncountedTerminatedPods"] = {}
        types = {x["type"] for x in changed}
        conditions = [x for x in status.get("conditions") or () if x["type"] not in types]
        if conditions or types:
            status["conditions"] = [*conditions, *changed]
        return status

    def _condition(self, value: str, type_: str, reason: str, message: str) -> Obj:
        at = c.timestamp(self._clock())
        return {
            "type": type_, "status": value, "lastProbeTime": at, "lastTransitionTime": at,
            "reason": reason, "message": message,
        }  # fmt: skip

    def _write(self, job: Obj, status: Obj) -> None:
        stored = self._store.find(r.BATCH_JOB, job["metadata"]["namespace"], job["metadata"]["name"])
        if stored is not None and stored["metadata"]["uid"] == job["metadata"]["uid"]:
            self._store.update_status(r.BATCH_JOB, stored, status)

    def _expire(self, job: Obj) -> float | None:
        """Delete a finished Job, as the TTL-after-finished controller does, in the foreground."""
        ttl = job["spec"].get("ttlSecondsAfterFinished")
        if ttl is None:
            return None
        ended = next(x for x in job["status"]["conditions"] if x["type"] in ENDS.values() and x["status"] == "True")
        left = float(c.seconds(ended["lastTransitionTime"]) + ttl - self._clock())
        if left > 0:
            return left
        meta = job["metadata"]
        self._store.delete(r.BATCH_JOB, meta["namespace"], meta["name"], propagation="Foreground", uid=meta["uid"])
        return None


def _interim(status: Obj) -> Objects:
    return [x for x in status.get("conditions") or () if x["type"] in ENDS and x["status"] == "True"]


def _is_active(pod: Obj) -> bool:
    return c.phase(pod) not in ("Succeeded", "Failed") and not c.is_terminating(pod)


def _is_ready(pod: Obj) -> bool:
    return c.has(pod.get("status", {}), "Ready")


def _failed(pod: Obj, spec: Obj) -> bool:
    """Whether a pod counts as failed; one that is being deleted does at once, unless podReplacementPolicy is Failed."""
    if c.phase(pod) in ("Succeeded", "Failed"):
        return c.phase(pod) == "Failed"
    unbound = not pod["spec"].get("nodeName")  # no kubelet will ever end it
    return c.is_terminating(pod) and (unbound or spec.get("podReplacementPolicy") != "Failed")


def _finished(pod: Obj) -> float:
    """When the last container of a pod ended, else when the pod was made."""
    ends = [
        x["state"]["terminated"].get("finishedAt")
        for x in pod.get("status", {}).get("containerStatuses") or ()
        if x.get("state", {}).get("terminated")
    ]
    return max((c.seconds(t) for t in ends if t), default=c.seconds(pod["metadata"]["creationTimestamp"]))
