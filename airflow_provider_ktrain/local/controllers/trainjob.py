"""TrainJob trainer.kubeflow.org/v1alpha1 as the Kubeflow Trainer 2.3 runs it: a JobSet made of a runtime.

It does not look at deletionTimestamp: a TrainJob that is deleted in the foreground gets its JobSet back until it is
gone (recording 53b), as does a failed one whose JobSet is deleted (60b).
"""

from __future__ import annotations

import copy
import random
import time
from dataclasses import replace

import yaml

from airflow_provider_ktrain.local.controllers import common as c
from airflow_provider_ktrain.local.controllers import trainjob_build
from airflow_provider_ktrain.local.controllers.mpijob_v2beta1 import ssh_keys
from airflow_provider_ktrain.local.controllers.runtime import (
    Clock,
    Key,
    ObjectController,
    ReconcileError,
    controlled_by,
)
from airflow_provider_ktrain.local.objects import jobsets, trainjobs
from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.crds_trainer import MANAGERS
from airflow_provider_ktrain.local.objects.errors import ApiError
from airflow_provider_ktrain.local.objects.store import Change, Obj, Store

LONGEST_ERROR = 950  # characters of an error in an event
DEADLINE_EXCEEDED = ("DeadlineExceeded", "TrainJob exceeded its active deadline")
FOREIGN_SNAPSHOT = (
    "getting runtime snapshot: invalid runtime snapshot: a snapshot configmap exists but is owned by another object"
)
#: how a JobSet's end is told in the TrainJob
ENDS = {"Completed": "Complete", "Failed": "Failed"}
LATE, LATE_SHARE = 0.1, 0.3  # seconds that it takes to see, in this share of cases, that something was deleted


class TrainJobController(ObjectController):
    """Keeps a TrainJob's objects and its status."""

    resource = r.TRAINJOB
    owns = ()
    component = "trainer-trainjob-controller"
    events_v1 = True

    def __init__(self, store: Store, clock: Clock = time.time, *, status_ca: str = "") -> None:
        """:param status_ca: the status server's CA as PEM, "" without the feature gate TrainJobStatus."""
        super().__init__(store, clock)
        self._lag = 0.0
        self._status_ca = status_ca
        for resource in (r.JOBSET, r.CONFIG_MAP, r.SECRET):
            for change in store.latest(resource):
                self._owned_changed(change)
            store.subscribe(resource, self._owned_changed)

    def _owned_changed(self, change: Change) -> None:
        """Look at the owner: at once, or where something was deleted sometimes only after the garbage collector."""
        if change.type == "DELETED" and change.resource == r.JOBSET:
            self._lag = LATE if random.random() < LATE_SHARE else 0.0
        keys = set(controlled_by(r.TRAINJOB)(change))
        if change.previous:  # an orphan's former owner
            keys.update(controlled_by(r.TRAINJOB)(replace(change, object=change.previous)))
        for key in keys:
            self.enqueue(key, self._lag if change.type == "DELETED" else 0.0)

    def reconcile(self, key: Key) -> float | None:
        """Bring one TrainJob nearer to its end; seconds until its deadline. What fails is told in an event only."""
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
        """Create or update the TrainJob's objects; what went wrong, or ""."""
        try:
            runtime = self._runtime(job)
            built = trainjob_build.build(job, runtime, reports_status=bool(self._status_ca))
            if built.hostfile is not None:
                self._ensure_mpi(job, built.hostfile)
            self._ensure_jobset(job, built.jobset)
            if self._status_ca:
                self._ensure_tls_config(job)
        except (ApiError, ReconcileError) as error:
            told = error.message if isinstance(error, ApiError) else str(error)
            cut = f"{told[:LONGEST_ERROR]} ..." if len(told) > LONGEST_ERROR else told
            message = f"TrainJob resources reconciliation failed: {cut}"
            self.recorder.event(job, "Warning", "TrainJobResourcesCreationFailed", message)
            return told
        return ""

    def _runtime(self, job: Obj) -> Obj:
        """The runtime as it was when the TrainJob began, of which a ConfigMap keeps a snapshot."""
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

    def _ensure_jobset(self, job: Obj, wanted: Obj) -> None:
        """Create the JobSet, or update it while it or the TrainJob is suspended."""
        known = self.store.find(r.JOBSET, wanted["metadata"]["namespace"], wanted["metadata"]["name"])
        suspended = bool(job["spec"].get("suspend"))
        if known is None:
            _admit(wanted, None)
            self.store.create(r.JOBSET, wanted)
        elif suspended or known["spec"].get("suspend"):
            meta = {
                **known["metadata"],
                **{k: v for k, v in wanted["metadata"].items() if k in ("labels", "annotations")},
            }
            new = {**known, "metadata": meta, "spec": wanted["spec"]}
            _admit(new, known)
            self.store.update(r.JOBSET, new)

    def _set_suspended(self, job: Obj) -> None:
        status, now = job["status"], self.clock()
        if job["spec"].get("suspend"):
            c.set_status_condition(status, "Suspended", "True", "Suspended", "TrainJob is suspended", now)
        elif c.has(status, "Suspended"):
            c.set_status_condition(status, "Suspended", "False", "Resumed", "TrainJob is resumed", now)

    def _copy_status(self, job: Obj) -> None:
        """Take counts and the end from the JobSet of the TrainJob's name, whoever owns it."""
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
        """Fail the TrainJob and delete its JobSet when its deadline is over; seconds until then."""
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
    """What JobSet's webhooks do to a JobSet that the Trainer writes. ApiError where they refuse it."""
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
