"""The reconcile that training-operator shares between its job kinds (1.9: pkg/controller.v1/common), quirks included.

Where Go walks a map in random order, this goes Master or Launcher first: one of the orders that a real cluster shows.
"""

from __future__ import annotations

import abc
import copy
import time
from typing import ClassVar

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers.owners import child, is_controlled_by
from airflow_provider_ktrain.local.controllers.runtime import (
    Clock,
    Controller,
    Key,
    ReconcileError,
    controlled_by,
    itself,
)
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Obj, Objects, Store

MANAGER = "kubeflow.org/training-operator"
TEMPLATE_RESTART_POLICY = "Restart policy in pod template will be overwritten by restart policy in replica spec"
COUNTED = {"Succeeded": "succeeded", "Failed": "failed"}  # by phase; Running depends on deletionTimestamp


class TrainingOperator(abc.ABC):
    """One job kind of training-operator: subclasses say what its pods are and what they mean for the job."""

    resource: ClassVar[Resource]
    replica_types: ClassVar[tuple[str, ...]]  # in the order in which they are reconciled
    specs_field: ClassVar[str]
    container: ClassVar[str]
    port: ClassVar[tuple[str, int] | None] = None
    restart_policy: ClassVar[str]
    deleted_reason: ClassVar[str]  # of the event that the time to live leaves
    owns: ClassVar[tuple[Resource, ...]]

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        self.store = store
        self.clock = clock
        self.kind = self.resource.kind
        self.component = f"{self.kind.lower()}-controller"
        self.recorder = EventRecorder(store, self.component)

    def controller(self) -> Controller[Key]:
        controller = Controller(self.store, self.reconcile, self.clock)
        controller.watch(self.resource, itself)
        for resource in self.owns:
            controller.watch(resource, controlled_by(self.resource))
        return controller

    # what a kind decides

    def invalid(self, job: Obj) -> str | None:
        """What is wrong with a job that no webhook has checked."""
        return None

    @abc.abstractmethod
    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        """Make the pods that miss, remove those too many, and count all in `status`."""

    @abc.abstractmethod
    def update_status(self, job: Obj, status: Obj) -> None:
        """Conclude the job's conditions from the counts."""

    # the shared part

    def reconcile(self, key: Key) -> float | None:
        """Bring one job nearer to its end; seconds until its time to live has passed, where it has one."""
        stored = self.store.find(self.resource, *key)
        if stored is None:
            return None
        stored = {"spec": {}, **stored}  # the schema does not ask for one
        if (stored["spec"].get("runPolicy") or {}).get("managedBy", MANAGER) != MANAGER:
            return None
        problem = self.invalid(stored)
        if problem:
            message = f"{self.kind} failed validation because {problem}"
            self.recorder.event(stored, "Warning", f"{self.kind}FailedValidation", message)
            raise ReconcileError(message)
        if c.is_terminating(stored) or not stored["spec"].get(self.specs_field):
            return None  # a job without replica specs never gets a status
        job = self.defaulted(copy.deepcopy(stored))
        status = copy.deepcopy(job.get("status") or {})
        if not status.get("conditions"):
            self.condition(status, "Created", f"{self.kind} {job['metadata']['name']} is created.")
        self.reconcile_job(job, status)
        return self.time_to_live(job, status)

    def defaulted(self, job: Obj) -> Obj:
        """The job with the operator's defaults, which never reach the API object."""
        policy = job["spec"]["runPolicy"] = job["spec"].get("runPolicy") or {}
        policy["cleanPodPolicy"] = policy.get("cleanPodPolicy") or "None"
        for type_ in [t for t in self.replica_types if t in self.specs(job)]:
            spec = self.specs(job)[type_]
            spec["replicas"] = 1 if spec.get("replicas") is None else spec["replicas"]
            spec["restartPolicy"] = spec.get("restartPolicy") or self.restart_policy
            containers = spec["template"]["spec"]["containers"]
            if self.port and containers:
                name, number = self.port
                main = next((x for x in containers if x.get("name") == self.container), containers[0])
                if all(p.get("name") != name for p in main.get("ports") or ()):
                    main["ports"] = [*(main.get("ports") or ()), {"name": name, "containerPort": number}]
        return job

    def reconcile_job(self, job: Obj, status: Obj) -> None:
        name, policy = job["metadata"]["name"], job["spec"]["runPolicy"]
        pods = self.pods(job)
        if c.is_finished(status):
            self.delete_pods_and_services(job, status, pods)
            self.expire(job, status)
            if c.has(status, "Succeeded"):
                # what still runs counts as succeeded: its pod may be gone, or hold its GPUs for hours
                for counts in status.get("replicaStatuses", {}).values():
                    if counts.get("active"):
                        counts["succeeded"] = counts.get("succeeded", 0) + counts.pop("active")
            return self.write(job, status)
        if policy.get("suspend"):
            self.delete_pods_and_services(job, status, pods)
            for counts in status.get("replicaStatuses", {}).values():
                counts.pop("active", None)
            message = f"{self.kind} {name} is suspended."
            if c.has(status, "Running"):
                self.condition(status, "Running", message, "False", "Suspended")
            if not c.has(status, "Suspended"):
                self.condition(status, "Suspended", message)
            self.event(job, "Normal", "Suspended", message)
            return self.write(job, status)
        if c.has(status, "Suspended"):
            message = f"{self.kind} {name} is resumed."
            self.condition(status, "Suspended", message, "False", "Resumed")
            status["startTime"] = c.timestamp(self.clock())
            self.event(job, "Normal", "Resumed", message)
        self.record_abnormal(job, pods)
        failure = self.exceeded(job, status, pods)
        if failure:
            status.setdefault("completionTime", c.timestamp(self.clock()))
            self.delete_pods_and_services(job, status, pods)  # the job is not finished yet: all, whatever the policy
            self.event(job, "Normal", "Failed", failure)
            self.condition(status, "Failed", failure)
            return self.write(job, status)
        self.sync_replicas(job, status, pods)
        self.update_status(job, status)
        return self.write(job, status)

    def exceeded(self, job: Obj, status: Obj, pods: Objects) -> str | None:
        """The message of a limit that is passed. The deadline has no timer: it is looked at when something changes."""
        name, policy = job["metadata"]["name"], job["spec"]["runPolicy"]
        limit = policy.get("backoffLimit")
        if limit is not None:
            specs = self.specs(job)
            active = sum(c.phase(p) not in ("Succeeded", "Failed") and not c.is_terminating(p) for p in pods)
            failed = sum(c.phase(p) == "Failed" for p in pods)
            known = sum(counts.get("failed", 0) for counts in status.get("replicaStatuses", {}).values())
            new_failure = failed > known and active != sum(s["replicas"] for s in specs.values())
            restarts = sum(
                container.get("restartCount", 0)
                for pod in pods
                if c.phase(pod) == "Running" and self.restarts(specs, pod)
                for kind in ("initContainerStatuses", "containerStatuses")
                for container in pod["status"].get(kind) or ()
            )
            if (new_failure and limit < 1) or restarts >= max(limit, 1):
                return f"Job {name} has failed because it has reached the specified backoff limit"
        deadline, start = policy.get("activeDeadlineSeconds"), status.get("startTime")
        if deadline is not None and start and self.clock() - c.seconds(start) >= deadline:
            return f"Job {name} has failed because it was active longer than specified deadline"
        return None

    @staticmethod
    def restarts(specs: Obj, pod: Obj) -> bool:
        """Whether the pod's replica type has a restart policy that counts against backoffLimit."""
        type_ = (pod["metadata"].get("labels") or {}).get(c.REPLICA_TYPE)
        return any(t.lower() == type_ and s["restartPolicy"] != "Never" for t, s in specs.items())

    def record_abnormal(self, job: Obj, pods: Objects) -> None:
        """Mirror what is wrong with pods that have not ended as Warnings of the job."""
        for pod in pods:
            if c.phase(pod) in ("Succeeded", "Failed") or c.is_terminating(pod):
                continue
            name, status = pod["metadata"]["name"], pod.get("status", {})
            containers = status.get("containerStatuses") or status.get("initContainerStatuses") or ()
            for container in containers:
                state, prefix = container.get("state", {}), f"Error pod {name} container {container['name']}"
                ended, waiting = state.get("terminated"), state.get("waiting") or {}
                if ended and ended["exitCode"]:
                    message = f"exitCode: {ended['exitCode']} terminated message: {ended.get('message', '')}"
                    self.recorder.event(job, "Warning", ended.get("reason", ""), f"{prefix} {message}")
                if waiting.get("message"):
                    message = f"{prefix} waiting message: {waiting['message']}"
                    self.recorder.event(job, "Warning", waiting.get("reason", ""), message)
            conditions = status.get("conditions")
            if not containers and conditions:
                last = max(conditions, key=lambda condition: condition.get("lastTransitionTime") or "")
                if last["status"] != "True":
                    message = f"Error pod {name} condition message: {last.get('message', '')}"
                    self.recorder.event(job, "Warning", last.get("reason", ""), message)

    def expire(self, job: Obj, status: Obj) -> None:
        """Delete a job whose time to live has passed."""
        left = self.time_to_live(job, status)
        if left is not None and left <= 0:
            meta = job["metadata"]
            self.store.delete(self.resource, meta["namespace"], meta["name"], uid=meta["uid"])
            self.recorder.event(job, "Normal", self.deleted_reason, f"Deleted job: {meta['name']}")

    def time_to_live(self, job: Obj, status: Obj) -> float | None:
        ttl = job["spec"]["runPolicy"].get("ttlSecondsAfterFinished")
        if ttl is None or not c.is_finished(status):
            return None
        if "completionTime" not in status:
            raise ReconcileError("job completion time is nil, cannot cleanup")
        return float(c.seconds(status["completionTime"]) + ttl - self.clock())

    def delete_pods_and_services(self, job: Obj, status: Obj, pods: Objects) -> None:
        policy = job["spec"]["runPolicy"]["cleanPodPolicy"] if c.is_finished(status) else "All"
        if policy == "None":
            return
        for pod in pods:
            if policy != "Running" or c.phase(pod) in ("Running", "Pending"):
                self.delete(job, r.POD, pod["metadata"]["name"])
                self.delete(job, r.SERVICE, pod["metadata"]["name"])

    # one object of the job's

    def specs(self, job: Obj) -> dict[str, Obj]:
        """The job's replica specs by type."""
        specs: dict[str, Obj] = job["spec"][self.specs_field]
        return specs

    def labels(self, job: Obj, type_: str | None = None, index: int | None = None) -> dict[str, str]:
        return {
            c.OPERATOR_NAME: self.component, c.JOB_NAME: job["metadata"]["name"],
            **({c.REPLICA_TYPE: type_.lower()} if type_ is not None else {}),
            **({c.REPLICA_INDEX: str(index)} if index is not None else {}),
        }  # fmt: skip

    def pods(self, job: Obj) -> Objects:
        """The pods that the job controls."""
        found = self.store.list(r.POD, job["metadata"]["namespace"], self.labels(job))
        return [pod for pod in found if is_controlled_by(pod, job)]

    def pod(self, job: Obj, name: str, spec: Obj, labels: dict[str, str]) -> Obj:
        """A pod after the template of a replica spec, its restartPolicy the replica's."""
        template = copy.deepcopy(spec["template"])
        meta = template.get("metadata") or {}
        if template["spec"].get("restartPolicy"):
            self.recorder.event(job, "Warning", "SetPodTemplateRestartPolicy", TEMPLATE_RESTART_POLICY)
        policy = spec["restartPolicy"]
        template["spec"]["restartPolicy"] = "Never" if policy == "ExitCode" else policy
        pod = child(job, name, {**(meta.get("labels") or {}), **labels}, spec=template["spec"])
        if meta.get("annotations"):
            pod["metadata"]["annotations"] = meta["annotations"]
        return pod

    def create(self, job: Obj, resource: Resource, obj: Obj) -> Obj:
        """Create a pod or service of the job's, and record how that went."""
        try:
            created = self.store.create(resource, obj)
        except ApiError as error:
            self.recorder.event(job, "Warning", f"FailedCreate{resource.kind}", f"Error creating: {error}")
            raise
        what = f"Created {resource.singular}: {created['metadata']['name']}"
        self.recorder.event(job, "Normal", f"SuccessfulCreate{resource.kind}", what)
        return created

    def delete(self, job: Obj, resource: Resource, name: str) -> None:
        """Delete a pod or service of the job's, unless it is gone or going."""
        found = self.store.find(resource, job["metadata"]["namespace"], name)
        if found is None or c.is_terminating(found):
            return
        self.store.delete(resource, job["metadata"]["namespace"], name)
        what = f"Deleted {resource.singular}: {name}"
        self.recorder.event(job, "Normal", f"SuccessfulDelete{resource.kind}", what)

    def count(self, status: Obj, type_: str, pod: Obj) -> None:
        """Add a pod to the counts of its replica type; one that is being deleted counts as failed at once."""
        counts = status["replicaStatuses"][type_]
        what = COUNTED.get(c.phase(pod))
        if c.phase(pod) == "Running":
            what = "failed" if c.is_terminating(pod) else "active"
        if what:
            counts[what] = counts.get(what, 0) + 1

    def condition(self, status: Obj, type_: str, message: str, value: str = "True", reason: str | None = None) -> None:
        """Set a condition; a no-op once the job has failed."""
        if not c.has(status, "Failed"):
            c.set_condition(status, type_, value, f"{self.kind}{reason or type_}", message, self.clock())

    def event(self, job: Obj, type_: str, reason: str, message: str) -> None:
        self.recorder.event(job, type_, f"{self.kind}{reason}", message)

    def succeed(self, job: Obj, status: Obj, message: str) -> None:
        self.event(job, "Normal", "Succeeded", message)
        status.setdefault("completionTime", c.timestamp(self.clock()))
        self.condition(status, "Succeeded", message)

    def write(self, job: Obj, status: Obj) -> None:
        """Write the status where it changed and the job still exists."""
        stored = self.store.find(self.resource, job["metadata"]["namespace"], job["metadata"]["name"])
        if stored is not None and stored["metadata"]["uid"] == job["metadata"]["uid"]:
            self.store.update_status(self.resource, stored, status)
