"""The controller of JobSet 0.12. A JobSet is a group of Jobs that are started, restarted and suspended together.

Not implemented: in-place restart strategies, exclusive placement, coordinators, volume claims.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers import jobset_jobs as jj
from ktrain_embedded.controllers.runtime import Key, ObjectController, ReconcileError
from ktrain_embedded.objects import podspecs
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError, invalid
from ktrain_embedded.objects.store import Obj, Objects

MANAGER = "jobset.sigs.k8s.io/jobset-controller"
COMPLETED = ("Completed", "AllJobsCompleted", "jobset completed successfully")
FAILED = ("FailedJobs", "jobset failed due to one or more job failures")
EXHAUSTED = ("ReachedMaxRestarts", "jobset failed due to reaching max number of restarts")
FAIL_ACTION = ("FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action")
RESTARTS = {  # reason and message of the event of each action that restarts the JobSet
    "RestartJobSet": ("RestartJobSetFailurePolicyAction", "applying RestartJobSet failure policy action"),
    "RestartJobSetAndIgnoreMaxRestarts": (
        "RestartJobSetAndIgnoreMaxRestartsFailurePolicyAction",
        "applying RestartJobSetAndIgnoreMaxRestarts failure policy action",
    ),
}


CONFLICT = 409


class JobSetController(ObjectController):
    """Creates the Jobs of a JobSet in order, and applies its success and failure policies."""

    resource = r.JOBSET
    owns = (r.BATCH_JOB, r.SERVICE)
    component = "jobset"
    events_v1 = True

    def reconcile(self, key: Key) -> float | None:
        """Reconcile one JobSet. Returns the seconds until the end of its TTL."""
        jobset = self.store.find(r.JOBSET, *key)
        if jobset is None or c.is_terminating(jobset):
            return None
        if jobset["spec"].get("managedBy", MANAGER) != MANAGER:
            return None
        status = copy.deepcopy(jobset.get("status") or {})
        status.setdefault("restarts", 0)
        children = self.store.owned(r.BATCH_JOB, jobset)
        jobs = [job for job in children if jj.attempt(job) >= status["restarts"]]
        status["replicatedJobsStatus"] = jj.tally(jobset, jobs)
        if status.get("terminalState"):
            self._delete(job for job in children if not c.has(job.get("status") or {}, "Complete", "Failed"))
            self.write_status(jobset, status)
            return self.expire(jobset, "Completed")
        self._delete(job for job in children if jj.attempt(job) < status["restarts"])
        failed = [job for job in jobs if c.has(job.get("status") or {}, "Failed")]
        if failed:
            self._apply_failure_policy(jobset, status, failed)
        elif self._has_succeeded(jobset, status):
            self._end(jobset, status, *COMPLETED)
        else:
            self._run(jobset, status, children)
        self.write_status(jobset, status)
        return None

    def _run(self, jobset: Obj, status: Obj, children: Objects) -> None:
        """Create the missing Jobs and the Service, and suspend or resume existing Jobs."""
        suspended = bool(jobset["spec"].get("suspend"))
        self._ensure_service(jobset)
        self._create_jobs(jobset, status, {job["metadata"]["name"] for job in children})
        for job in children:
            if not c.is_terminating(job) and not c.has(job.get("status") or {}, "Complete"):
                if suspended and not job["spec"].get("suspend"):
                    self.store.update(r.BATCH_JOB, {**job, "spec": {**job["spec"], "suspend": True}})
                elif not suspended and job["spec"].get("suspend"):
                    self.store.update(r.BATCH_JOB, jj.resumed(job, jobset))
        if suspended and self._condition(status, "Suspended", "True", "SuspendedJobs", "jobset is suspended"):
            self.recorder.event(jobset, "Normal", "SuspendedJobs", "jobset is suspended")
        elif not suspended and c.has(status, "Suspended"):
            self._condition(status, "Suspended", "False", "ResumeJobs", "jobset is resumed")
            self.recorder.event(jobset, "Normal", "ResumeJobs", "jobset is resumed")

    def _ensure_service(self, jobset: Obj) -> None:
        network, name = jobset["spec"].get("network") or {}, jj.subdomain(jobset)
        if not network.get("enableDNSHostnames", True):
            return
        if self.store.find(r.SERVICE, jobset["metadata"]["namespace"], name) is None:
            spec = {
                "clusterIP": "None", "selector": {jj.NAME: jobset["metadata"]["name"]},
                "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
            }  # fmt: skip
            self.store.create(r.SERVICE, c.child(jobset, name, {"spec": spec}))

    def _create_jobs(self, jobset: Obj, status: Obj, existing: set[str]) -> None:
        """Create the Jobs that may start now. ReconcileError if the API server rejects one."""
        counts = {of["name"]: of for of in status["replicatedJobsStatus"]}
        known = {x["name"]: x for x in jobset["spec"].get("replicatedJobs") or ()}
        policy = (jobset["spec"].get("startupPolicy") or {}).get("startupPolicyOrder")
        suspended = bool(jobset["spec"].get("suspend"))
        for place in jj.places(jobset):
            name = jj.job_name(jobset, place)
            if name not in existing and jj.may_start(place.replicated, counts, known):
                self._create_job(jobset, jj.construct(jobset, place, status["restarts"]))
            last = place.index == place.replicated.get("replicas", 1) - 1
            waits = not jj.has_started(counts[place.replicated["name"]], place.replicated)
            if policy == "InOrder" and last and not suspended and waits:
                message = "in order startup policy is in progress"
                self._condition(status, "StartupPolicyInProgress", "True", "InOrderStartupPolicyInProgress", message)
                return
        if policy == "InOrder" and not suspended and c.has(status, "StartupPolicyInProgress"):
            others = [x for x in status["conditions"] if x["type"] != "StartupPolicyInProgress"]
            status["conditions"] = others
            message = "in order startup policy has completed"
            self._condition(status, "StartupPolicyCompleted", "True", "InOrderStartupPolicyCompleted", message)

    def _create_job(self, jobset: Obj, job: Obj) -> None:
        name = job["metadata"]["name"]
        try:
            if problems := list(podspecs.job_problems(job)):
                raise invalid("Job", problems, name, r.BATCH_JOB.group)
            self.store.create(r.BATCH_JOB, job)
        except ApiError as error:
            message = f'job "{name}" creation failed with error: {error.message}'
            if (
                error.code != CONFLICT
            ):  # of the same name: a deleted JobSet's Job, which will be gone at the next attempt
                self.recorder.event(jobset, "Warning", "JobCreationFailed", message)
            raise ReconcileError(message) from None

    def _has_succeeded(self, jobset: Obj, status: Obj) -> bool:
        """Whether the success policy is met: any or all Jobs of its targets are complete."""
        policy = jobset["spec"].get("successPolicy") or {"operator": "All"}
        targets = policy.get("targetReplicatedJobs")
        replicated = {x["name"]: x for x in jobset["spec"].get("replicatedJobs") or ()}
        counted = [of for of in status["replicatedJobsStatus"] if not targets or of["name"] in targets]
        if policy["operator"] == "Any":
            return any(of["succeeded"] for of in counted)
        return bool(counted) and all(of["succeeded"] >= replicated[of["name"]].get("replicas", 1) for of in counted)

    def _apply_failure_policy(self, jobset: Obj, status: Obj, failed: Objects) -> None:
        """Fail or restart the JobSet. A restart deletes its Jobs and creates them with the next restart-attempt."""
        first = min(failed, key=lambda job: str((c.condition(job["status"], "Failed") or {})["lastTransitionTime"]))
        named = f"(first failed job: {first['metadata']['name']})"
        policy = jobset["spec"].get("failurePolicy")
        if policy is None:
            return self._end(jobset, status, "Failed", FAILED[0], f"{FAILED[1]} {named}")
        action, job = _action(policy, failed, first)
        named = f"(first failed job: {job['metadata']['name']})"
        if action == "FailJobSet":
            return self._end(jobset, status, "Failed", FAIL_ACTION[0], f"{FAIL_ACTION[1]} {named}")
        counted = status.get("restartsCountTowardsMax", 0)
        if action == "RestartJobSet" and counted >= policy.get("maxRestarts", 0):
            return self._end(jobset, status, "Failed", EXHAUSTED[0], f"{EXHAUSTED[1]} {named}")
        reason, message = RESTARTS.get(action, RESTARTS["RestartJobSet"])
        status["restarts"] += 1
        if action == "RestartJobSet":
            status["restartsCountTowardsMax"] = counted + 1
        self.recorder.event(jobset, "Warning", reason, f"{message} {named}")
        return None

    def _end(self, jobset: Obj, status: Obj, type_: str, reason: str, message: str) -> None:
        self._condition(status, type_, "True", reason, message)
        status["terminalState"] = type_
        self.recorder.event(jobset, "Normal" if type_ == "Completed" else "Warning", reason, message)

    def _condition(self, status: Obj, type_: str, value: str, reason: str, message: str) -> bool:
        return c.set_status_condition(status, type_, value, reason, message, self.clock())

    def _delete(self, jobs: Iterable[Obj]) -> None:
        for job in jobs:
            if not c.is_terminating(job):
                meta = job["metadata"]
                self.store.delete(r.BATCH_JOB, meta["namespace"], meta["name"], propagation="Foreground")


def _action(policy: Obj, failed: Objects, first: Obj) -> tuple[str, Obj]:
    """The action of the first matching rule of a failure policy, and the failed Job that matches the rule."""
    for rule in policy.get("rules") or ():
        targets, reasons = rule.get("targetReplicatedJobs"), rule.get("onJobFailureReasons")
        for job in failed:
            why = c.condition(job["status"], "Failed") or {}
            named = not targets or job["metadata"]["labels"].get(jj.REPLICATED_JOB) in targets
            if named and (not reasons or why.get("reason") in reasons):
                return str(rule["action"]), job
    return "RestartJobSet", first
