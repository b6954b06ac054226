"""TrainJob trainer.kubeflow.org/v1alpha1 of the Kubeflow Trainer 2.3. It creates a JobSet from a runtime.

The Trainer doesn't check deletionTimestamp. While a TrainJob is deleted in the foreground, its JobSet is recreated
until the TrainJob is removed (recording 53b). The JobSet of a failed TrainJob is also recreated after a deletion (60b).
"""

from __future__ import annotations

import copy
import random
import time
from dataclasses import replace

import yaml

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers import trainjob_build
from ktrain_embedded.controllers.mpijob_v2beta1 import ssh_keys
from ktrain_embedded.controllers.runtime import (
    Clock,
    Key,
    ObjectController,
    ReconcileError,
    controlled_by,
)
from ktrain_embedded.objects import jobsets, trainjobs
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.crds_trainer import MANAGERS
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.store import Change, Obj, Store

LONGEST_ERROR = 950  # characters of an error in an event
DEADLINE_EXCEEDED = ("DeadlineExceeded", "TrainJob exceeded its active deadline")
FOREIGN_SNAPSHOT = (
    "getting runtime snapshot: invalid runtime snapshot: a snapshot configmap exists but is owned by another object"
)
#: The TrainJob's condition for each final condition of the JobSet.
ENDS = {"Completed": "Complete", "Failed": "Failed"}
DELETION_DELAY, DELAYED_DELETION_SHARE = (
    0.1,
    0.3,
)  # delay in seconds after a deletion, and the share of deletions with this delay


class TrainJobController(ObjectController):
    """Reconciles the objects and the status of TrainJobs."""

    resource = r.TRAINJOB
    owns = ()
    component = "trainer-trainjob-controller"
    events_v1 = True

    def __init__(self, store: Store, clock: Clock = time.time, *, status_ca: str = "") -> None:
        """Subscribe to what TrainJobs own.

        :param status_ca: the status server's CA as PEM; "" if the feature gate TrainJobStatus is off.
        """
        super().__init__(store, clock)
        self._lag = 0.0
        self._status_ca = status_ca
        for resource in (r.JOBSET, r.CONFIG_MAP, r.SECRET):
            for change in store.latest(resource):
                self._owned_changed(change)
            store.subscribe(resource, self._owned_changed)

    def _owned_changed(self, change: Change) -> None:
        """Enqueue the owner. After a deletion, it is sometimes delayed until after the garbage collector has run."""
        if change.type == "DELETED" and change.resource == r.JOBSET:
            self._lag = DELETION_DELAY if random.random() < DELAYED_DELETION_SHARE else 0.0
        keys = set(controlled_by(r.TRAINJOB)(change))
        if change.previous:  # the former owner of an orphan
            keys.update(controlled_by(r.TRAINJOB)(replace(change, object=change.previous)))
        for key in keys:
            self.enqueue(key, self._lag if change.type == "DELETED" else 0.0)

    def reconcile(self, key: Key) -> float | None:
        """Reconcile one TrainJob. Returns the seconds until its deadline. Errors are reported only as events."""
        stored = self.store.find(r.TRAINJOB, *key)
        if stored is None or stored["spec"].get("managedBy", MANAGERS[0]) != MANAGERS[0]:
            return None
        job = copy.deepcopy(stored)
        status = job.setdefault("status", {})
        failed = c.condition(status, "Failed")
        if failed and failed["reason"] != DEADLINE_EXCEEDED[0]:
            _remove_condition(status, "Failed")
        error = "" if _finished(status) else self._ensure_objects(job)
        self._set_suspended(job)
        self._copy_status(job)
        wait = self._look_at_deadline(job)
        if status != (stored.get("status") or {}):
            self.write_status(stored, status)
        if error:
            raise ReconcileError(error)
        return wait

    def _ensure_objects(self, job: Obj) -> str:
        """Create or update the TrainJob's objects. Returns the error message, or ""."""
        try:
            runtime = self._runtime(job)
            built = trainjob_build.build(job, runtime, reports_status=bool(self._status_ca))
            if built.hostfile is not None:
                self._ensure_mpi(job, built.hostfile)
            self._ensure_jobset(job, built.jobset)
            if self._status_ca:
                self._ensure_tls_config(job)
        except (ApiError, ReconcileError) as error:
            message = error.message if isinstance(error, ApiError) else str(error)
            cut = f"{message[:LONGEST_ERROR]} ..." if len(message) > LONGEST_ERROR else message
            message = f"TrainJob resources reconciliation failed: {cut}"
            self.recorder.event(job, "Warning", "TrainJobResourcesCreationFailed", message)
            return message
        return ""

    def _runtime(self, job: Obj) -> Obj:
        """The runtime at the first reconcile of the TrainJob. A ConfigMap contains this snapshot."""
        namespace, name = job["metadata"]["namespace"], f"{job['metadata']['name']}-runtime-snapshot"
        snapshot = self.store.find(r.CONFIG_MAP, namespace, name)
        if snapshot is not None and not c.is_controlled_by(snapshot, job):
            raise ReconcileError(FOREIGN_SNAPSHOT)
        if snapshot is not None:
            kept: Obj = yaml.safe_load(snapshot["data"]["runtime"])
            return kept
        ref, kind = job["spec"]["runtimeRef"], trainjobs.runtime_of(job)
        if kind is None:
            raise ReconcileError(f"unsupported runtime: {ref['kind']}.{ref['apiGroup']}")
        runtime = self.store.get(kind, namespace if kind.namespaced else None, ref["name"])
        text = yaml.safe_dump(runtime, default_flow_style=False)
        self.store.create(r.CONFIG_MAP, c.child(job, name, {"data": {"runtime": text}}))
        return runtime

    def _ensure_mpi(self, job: Obj, hostfile: str) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        secret, config = f"{name}-mpi-ssh-auth", f"{name}-mpi-hostfile"
        if self.store.find(r.SECRET, namespace, secret) is None:
            made = {"immutable": True, "type": "kubernetes.io/ssh-auth", "data": ssh_keys()}
            self.store.create(r.SECRET, c.child(job, secret, made))
        known = self.store.find(r.CONFIG_MAP, namespace, config)
        if known is None:
            self.store.create(r.CONFIG_MAP, c.child(job, config, {"data": {"hostfile": hostfile}}))
        else:
            self.store.update(r.CONFIG_MAP, {**known, "data": {"hostfile": hostfile}})

    def _ensure_tls_config(self, job: Obj) -> None:
        name = trainjob_build.tls_config(job)
        if self.store.find(r.CONFIG_MAP, job["metadata"]["namespace"], name) is None:
            self.store.create(r.CONFIG_MAP, c.child(job, name, {"data": {"ca.crt": self._status_ca}}))

    def _ensure_jobset(self, job: Obj, desired: Obj) -> None:
        """Create the JobSet, or update it if it or the TrainJob is suspended."""
        known = self.store.find(r.JOBSET, desired["metadata"]["namespace"], desired["metadata"]["name"])
        suspended = bool(job["spec"].get("suspend"))
        if known is None:
            _admit(desired, None)
            self.store.create(r.JOBSET, desired)
        elif suspended or known["spec"].get("suspend"):
            meta = {
                **known["metadata"],
                **{k: v for k, v in desired["metadata"].items() if k in ("labels", "annotations")},
            }
            new = {**known, "metadata": meta, "spec": desired["spec"]}
            _admit(new, known)
            self.store.update(r.JOBSET, new)

    def _set_suspended(self, job: Obj) -> None:
        status, now = job["status"], self.clock()
        if job["spec"].get("suspend"):
            c.set_status_condition(status, "Suspended", "True", "Suspended", "TrainJob is suspended", now)
        elif c.has(status, "Suspended"):
            c.set_status_condition(status, "Suspended", "False", "Resumed", "TrainJob is resumed", now)

    def _copy_status(self, job: Obj) -> None:
        """Copy counts and the final condition from the JobSet with the TrainJob's name, whoever owns it."""
        jobset = self.store.find(r.JOBSET, job["metadata"]["namespace"], job["metadata"]["name"])
        if jobset is None:
            return
        of_jobset, status = jobset.get("status") or {}, job["status"]
        for theirs, ours in ENDS.items():
            end = c.condition(of_jobset, theirs)
            if end and end["status"] == "True":
                known = c.condition(status, ours) or {}
                new = {**end, "type": ours}
                if known != new:
                    _remove_condition(status, ours)
                    status["conditions"] = [*(status.get("conditions") or ()), new]
        status.pop("jobsStatus", None)
        if counts := of_jobset.get("replicatedJobsStatus"):
            status["jobsStatus"] = copy.deepcopy(counts)

    def _look_at_deadline(self, job: Obj) -> float | None:
        """Fail the TrainJob and delete its JobSet after its deadline. Returns the seconds until then."""
        limit, status, meta = job["spec"].get("activeDeadlineSeconds"), job["status"], job["metadata"]
        if not limit or _finished(status) or job["spec"].get("suspend"):
            return None
        resumed = c.condition(status, "Suspended")
        since = resumed["lastTransitionTime"] if resumed else meta["creationTimestamp"]
        left = float(c.seconds(since) + limit - self.clock())
        if left > 0:
            return left
        reason, message = DEADLINE_EXCEEDED
        if self.store.find(r.JOBSET, meta["namespace"], meta["name"]) is not None:
            self.store.delete(r.JOBSET, meta["namespace"], meta["name"])
        c.set_status_condition(status, "Failed", "True", reason, message, self.clock())
        return None


def _admit(jobset: Obj, old: Obj | None) -> None:
    """Apply the defaults and the validation of JobSet's webhooks. ApiError if they reject the JobSet."""
    for replicated in jobset["spec"].get("replicatedJobs") or ():
        replicated["template"].setdefault("spec", {}).setdefault("template", {}).setdefault("spec", {})
    jobsets.complete(jobset)
    jobsets.validate(jobset, old)


def _finished(status: Obj) -> bool:
    return c.has(status, "Complete", "Failed")


def _remove_condition(status: Obj, type_: str) -> None:
    left = [x for x in status.get("conditions") or () if x["type"] != type_]
    status.pop("conditions", None)
    if left:
        status["conditions"] = left
