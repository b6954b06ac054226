"""batch/v1 Job: parallelism, completions, completion indexes, backoff limit, suspension, deadline, time to live.

Not implemented: podFailurePolicy, successPolicy, backoffLimitPerIndex.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers import jobpods
from ktrain_embedded.controllers.jobpods import TRACKING
from ktrain_embedded.controllers.runtime import Clock, Key, ObjectController, controlled_by
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.store import Obj, Objects, Store

BATCH_PERIOD = 1.0  # seconds for which changes of pods are batched
BACKOFF, BACKOFF_CAP = 10.0, 600.0  # seconds between a failed pod and the next one. Doubles each time

BACKOFF_EXCEEDED = ("FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
DEADLINE_EXCEEDED = ("FailureTarget", "DeadlineExceeded", "Job was active longer than specified deadline")
COMPLETED = ("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods")
ENDS = {"FailureTarget": "Failed", "SuccessCriteriaMet": "Complete"}  # the final condition, set when no pod is left


class JobController(ObjectController):
    """Runs Jobs. A finalizer makes sure that each pod is counted once. A Job ends when its last pod has ended."""

    resource = r.BATCH_JOB
    owns = ()
    component = "job-controller"

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self.watch(r.POD, controlled_by(r.BATCH_JOB), after=BATCH_PERIOD)

    def reconcile(self, key: Key) -> float | None:
        """Reconcile one Job. Returns the seconds until its deadline, the next retry or the end of its TTL."""
        job = self.store.find(r.BATCH_JOB, *key)
        if job is None:
            for pod in self.store.list(r.POD, key[0]):
                owner = c.controller_of(pod) or {}
                if (owner.get("kind"), owner.get("name")) == ("Job", key[1]):
                    self._untrack([pod])
            return None
        if c.is_terminating(job):
            status = copy.deepcopy(job.get("status") or {})
            self._untrack(self.store.owned(r.POD, job))
            self._count(job, status)
            self.write_status(job, status)
            return None
        if c.has(job.get("status", {}), "Complete", "Failed"):
            return self.expire(job, "Complete")
        return self._sync(job)

    def _sync(self, job: Obj) -> float | None:
        spec, pods, status = job["spec"], self.store.owned(r.POD, job), copy.deepcopy(job.get("status") or {})
        tracked = [pod for pod in pods if TRACKING in (pod["metadata"].get("finalizers") or ())]
        active = [pod for pod in pods if c.is_active(pod)]
        ended = {
            "succeeded": [pod for pod in tracked if c.phase(pod) == "Succeeded"],
            "failed": [pod for pod in tracked if jobpods.has_failed(job, pod)],
        }
        counts = {what: status.get(what, 0) + len(found) for what, found in ended.items()}
        completed = jobpods.parse_indexes(status.get("completedIndexes", "")) | jobpods.indexes(ended["succeeded"])
        if jobpods.is_indexed(job):
            counts["succeeded"] = len(completed)
        outcome, suspend, delay = self._outcome(job, active, counts), bool(spec.get("suspend")), None
        if outcome:
            if not suspend:
                status.setdefault("startTime", c.timestamp(self.clock()))
            self._delete(job, active)
            ended["failed"] += [pod for pod in active if pod in tracked]
            if not c.has(status, outcome[0]):
                self._condition(status, "True", *outcome)
        else:
            if suspend != c.has(status, "Suspended"):
                done = "Suspended" if suspend else "Resumed"
                self._condition(status, str(suspend), "Suspended", f"Job{done}", f"Job {done.lower()}")
                self.recorder.event(job, "Normal", done, f"Job {done.lower()}")
            if suspend:
                self._delete(job, active)
                self._untrack(active)
                status.pop("startTime", None)
            else:
                status.setdefault("startTime", c.timestamp(self.clock()))
                delay = self._create_missing(job, pods, counts, completed)

        self._count(job, status)
        uids = {what: [pod["metadata"]["uid"] for pod in found] for what, found in ended.items() if found}
        self.write_status(job, {**status, "uncountedTerminatedPods": uids})
        for what, found in ended.items():
            self._untrack(found)
            if found:
                status[what] = status.get(what, 0) + len(found)
        if jobpods.is_indexed(job) and completed:
            status.update(succeeded=len(completed), completedIndexes=jobpods.format_indexes(completed))
        if outcome and not status["terminating"]:
            end = ENDS[outcome[0]]
            self._condition(status, "True", end, *outcome[1:])
            if end == "Complete":
                status["completionTime"] = c.timestamp(self.clock())
            event = ("Normal", "Completed", "Job completed") if end == "Complete" else ("Warning", *outcome[1:])
            self.recorder.event(job, *event)
            delay = spec.get("ttlSecondsAfterFinished")
        elif spec.get("activeDeadlineSeconds") is not None and "startTime" in status:
            left = float(c.seconds(status["startTime"]) + spec["activeDeadlineSeconds"] - self.clock())
            delay = left if delay is None else min(left, delay)
        self.write_status(job, status)
        return delay

    def _outcome(self, job: Obj, active: Objects, counts: dict[str, int]) -> tuple[str, str, str] | None:
        """Type, reason and message of the interim condition that decides the Job, or None if it is undecided."""
        spec, old = job["spec"], job.get("status") or {}
        for interim in (c.condition(old, type_) for type_ in ENDS):
            if interim:
                return interim["type"], interim["reason"], interim["message"]
        limit, deadline = spec.get("backoffLimit", 6), spec.get("activeDeadlineSeconds")
        in_place = spec["template"]["spec"].get("restartPolicy") == "OnFailure"
        completions = spec.get("completions")
        new_failure = counts["failed"] > max(old.get("failed", 0), limit)
        if new_failure or (in_place and c.restarts(active) >= max(limit, 1)):
            return BACKOFF_EXCEEDED
        if deadline is not None and "startTime" in old and self.clock() >= c.seconds(old["startTime"]) + deadline:
            return None if spec.get("suspend") else DEADLINE_EXCEEDED
        if completions is None:
            return COMPLETED if counts["succeeded"] and not active else None
        return COMPLETED if counts["succeeded"] >= completions else None

    def _create_missing(self, job: Obj, pods: Objects, counts: dict[str, int], completed: set[int]) -> float | None:
        """Create the missing pods. After a failure, return the seconds to wait instead."""
        missing = jobpods.missing(job, pods, counts["succeeded"], completed)
        if not missing:
            return None
        wait = min(BACKOFF * 2.0 ** (counts["failed"] - 1), BACKOFF_CAP) if counts["failed"] else 0.0
        ended = (jobpods.finished_at(pod) for pod in pods if not c.is_active(pod))
        left = max(ended, default=0.0) + wait - self.clock()
        if wait and left > 0:
            return left
        for index in missing:
            name = self.store.create(r.POD, jobpods.new_pod(job, index))["metadata"]["name"]
            self.recorder.event(job, "Normal", "SuccessfulCreate", f"Created pod: {name}")
        return None

    def _delete(self, job: Obj, pods: Objects) -> None:
        for pod in pods:
            name = pod["metadata"]["name"]
            self.store.delete(r.POD, pod["metadata"]["namespace"], name)
            self.recorder.event(job, "Normal", "SuccessfulDelete", f"Deleted pod: {name}")

    def _untrack(self, pods: Iterable[Obj]) -> None:
        """Remove the tracking finalizer from pods that are counted or no longer need to be."""
        for seen in pods:
            pod = self.store.find(r.POD, seen["metadata"]["namespace"], seen["metadata"]["name"])
            if pod is not None:
                left = [f for f in pod["metadata"].get("finalizers") or () if f != TRACKING]
                meta = {k: v for k, v in pod["metadata"].items() if k != "finalizers"}
                self.store.update(r.POD, {**pod, "metadata": {**meta, **({"finalizers": left} if left else {})}})

    def _count(self, job: Obj, status: Obj) -> None:
        """Update the counts of the Job's pods that haven't ended."""
        pods = self.store.owned(r.POD, job)
        active = [pod for pod in pods if c.is_active(pod)]
        status.pop("active", None)
        if active:
            status["active"] = len(active)
        status["ready"] = sum(c.has(pod["status"], "Ready") for pod in active)
        status["terminating"] = sum(c.is_terminating(pod) and not has_ended(pod) for pod in pods)
        status["uncountedTerminatedPods"] = {}

    def _condition(self, status: Obj, value: str, type_: str, reason: str, message: str) -> None:
        at = c.timestamp(self.clock())
        new = {
            "type": type_, "status": value, "lastProbeTime": at, "lastTransitionTime": at,
            "reason": reason, "message": message,
        }  # fmt: skip
        status["conditions"] = [*(x for x in status.get("conditions") or () if x["type"] != type_), new]
