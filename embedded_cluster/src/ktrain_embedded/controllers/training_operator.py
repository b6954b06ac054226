"""The reconcile that the job kinds of training-operator share, including its bugs (1.9: pkg/controller.v1/common).

Go iterates over maps in random order. This code always starts with Master or Launcher, which is one of the orders that
occur on a real cluster.
"""

from __future__ import annotations

import abc
import copy
from typing import ClassVar

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers.runtime import Key, ObjectController, ReconcileError
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Objects

TEMPLATE_RESTART_POLICY = "Restart policy in pod template will be overwritten by restart policy in replica spec"


class TrainingOperator(ObjectController, abc.ABC):
    """A job kind of training-operator. Subclasses create the pods and derive the job's status from them."""

    specs_field: ClassVar[str]
    defaults: ClassVar[dict[str, tuple[int, str]]]  # replicas and restartPolicy by type. The first is the primary
    restarting: ClassVar[tuple[str, ...]]  # restart policies with which a failed replica doesn't fail the job
    failed_reason: ClassVar[str] = "Failed"
    deleted_reason: ClassVar[str]  # reason of the event when the TTL deletes the job

    # methods of the job kind

    def invalid(self, job: Obj) -> str | None:
        """The validation error of a job, or None. For kinds without a validating webhook."""
        return None

    @abc.abstractmethod
    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        """Create missing pods, delete pods beyond the replicas, and count all pods in `status`."""

    # the shared part

    def reconcile(self, key: Key) -> float | None:
        """Reconcile one job. Returns the seconds until the end of its TTL, if it has one."""
        stored = self.store.find(self.resource, *key)
        if stored is None or c.is_terminating(stored):
            return None
        job = copy.deepcopy({"spec": {}, **stored})  # spec isn't required by the schema
        problem = self.invalid(job)
        if problem:
            message = f"{job['kind']} failed validation because {problem}"
            self.event(job, "Warning", "FailedValidation", message)
            raise ReconcileError(message)
        if not job["spec"].get(self.specs_field):
            return None  # a job without replica specs never gets a status
        job = self.defaulted(job)
        status = copy.deepcopy(job.get("status") or {})
        if not status.get("conditions"):
            self.condition(status, "Created", f"{job['kind']} {job['metadata']['name']} is created.")
        self.reconcile_job(job, status)
        self.write_status(job, status)
        return self.time_to_live(job, status)

    def defaulted(self, job: Obj) -> Obj:
        """The job with the operator's defaults. They aren't written to the API object."""
        c.default_replicas(job["spec"], self.specs_field, self.defaults)
        return job

    def reconcile_job(self, job: Obj, status: Obj) -> None:
        """Update the pods and the status of a job, and delete a finished job after its TTL."""
        name, pods = job["metadata"]["name"], self.store.owned(r.POD, job)
        if c.is_finished(status):
            self.delete_pods_and_services(job, status, pods)
            left, meta = self.time_to_live(job, status), job["metadata"]
            if left is not None and left <= 0:
                self.store.delete(self.resource, meta["namespace"], meta["name"], uid=meta["uid"])
                self.recorder.event(job, "Normal", self.deleted_reason, f"Deleted job: {meta['name']}")
            if c.has(status, "Succeeded"):
                # running pods count as succeeded, although they may be deleted or hold GPUs for hours
                for counts in status.get("replicaStatuses", {}).values():
                    if counts.get("active"):
                        counts["succeeded"] = counts.get("succeeded", 0) + counts.pop("active")
            return
        if job["spec"]["runPolicy"].get("suspend"):
            self.delete_pods_and_services(job, status, pods)
            for counts in status.get("replicaStatuses", {}).values():
                counts.pop("active", None)
            message = f"{job['kind']} {name} is suspended."
            if c.has(status, "Running"):
                self.condition(status, "Running", message, "False", "Suspended")
            if not c.has(status, "Suspended"):
                self.condition(status, "Suspended", message)
            self.event(job, "Normal", "Suspended", message)
            return
        if c.has(status, "Suspended"):
            message = f"{job['kind']} {name} is resumed."
            self.condition(status, "Suspended", message, "False", "Resumed")
            status["startTime"] = c.timestamp(self.clock())
            self.event(job, "Normal", "Resumed", message)
        self.record_abnormal(job, pods)
        failure = self.exceeded(job, status, pods)
        if failure:
            self.delete_pods_and_services(job, status, pods)  # all, because the job isn't finished yet
            self.complete(job, status, "Failed", failure)
        else:
            self.sync_replicas(job, status, pods)
            self.update_status(job, status)

    def exceeded(self, job: Obj, status: Obj, pods: Objects) -> str | None:
        """The message of an exceeded limit, or None. The deadline has no timer: only changes trigger the check."""
        policy, failed = job["spec"]["runPolicy"], f"Job {job['metadata']['name']} has failed because it"
        limit, deadline = policy.get("backoffLimit"), policy.get("activeDeadlineSeconds")
        if limit is not None:
            specs = self.specs(job)
            known = sum(counts.get("failed", 0) for counts in status.get("replicaStatuses", {}).values())
            all_active = sum(map(c.is_active, pods)) == sum(spec["replicas"] for spec in specs.values())
            new_failure = c.tally(pods).get("failed", 0) > known and not all_active
            restartable = {type_.lower() for type_, spec in specs.items() if spec["restartPolicy"] != "Never"}
            running = [pod for pod in pods if c.phase(pod) == "Running"]
            restarted = c.restarts(p for p in running if p["metadata"]["labels"].get(c.REPLICA_TYPE) in restartable)
            if (new_failure and limit < 1) or restarted >= max(limit, 1):
                return f"{failed} has reached the specified backoff limit"
        late = deadline is not None and "startTime" in status
        if late and self.clock() - c.seconds(status["startTime"]) >= deadline:
            return f"{failed} was active longer than specified deadline"
        return None

    def record_abnormal(self, job: Obj, pods: Objects) -> None:
        """Record problems of active pods as Warning events of the job."""
        for pod in filter(c.is_active, pods):
            prefix, status = f"Error pod {pod['metadata']['name']}", pod.get("status", {})
            containers = status.get("containerStatuses") or status.get("initContainerStatuses") or ()
            for container in containers:
                state, of_container = container.get("state", {}), f"{prefix} container {container['name']}"
                ended, waiting = state.get("terminated"), state.get("waiting") or {}
                if ended and ended["exitCode"]:
                    message = f"exitCode: {ended['exitCode']} terminated message: {ended.get('message', '')}"
                    self.recorder.event(job, "Warning", ended.get("reason", ""), f"{of_container} {message}")
                if waiting.get("message"):
                    message = f"{of_container} waiting message: {waiting['message']}"
                    self.recorder.event(job, "Warning", waiting.get("reason", ""), message)
            conditions = status.get("conditions")
            if not containers and conditions:
                last = max(conditions, key=lambda condition: condition.get("lastTransitionTime") or "")
                if last["status"] != "True":
                    message = f"{prefix} condition message: {last.get('message', '')}"
                    self.recorder.event(job, "Warning", last.get("reason", ""), message)

    def update_status(self, job: Obj, status: Obj) -> None:
        """Set the job's conditions from the counts of its pods."""
        specs, kind, (primary, *_) = self.specs(job), job["kind"], self.defaults
        name, full_name = job["metadata"]["name"], f"{job['metadata']['namespace']}/{job['metadata']['name']}"
        status.setdefault("startTime", c.timestamp(self.clock()))
        for type_, spec in specs.items():
            counts, replicas = status["replicaStatuses"][type_], spec["replicas"]
            if "scale" in self.resource.subresources:
                counts["selector"] = ",".join(f"{k}={v}" for k, v in sorted(self.labels(job, type_).items()))
            active, succeeded, failed = (counts.get(k, 0) for k in ("active", "succeeded", "failed"))
            if type_ == primary:
                if active:
                    self.condition(status, "Running", f"{kind} {name} is running.")
                if succeeded == replicas:
                    return self.complete(job, status, "Succeeded", f"{kind} {name} is successfully completed.")
            elif primary not in specs:
                if succeeded == replicas or (succeeded and job["spec"].get("elasticPolicy") is not None):
                    self.complete(job, status, "Succeeded", f"{kind} {full_name} successfully completed.")
                elif active:
                    self.condition(status, "Running", f"{kind} {full_name} is running.")
            if failed and replicas > succeeded + active:
                why = f"because {failed} {type_} replica(s) failed."
                if spec["restartPolicy"] in self.restarting:
                    self.event(job, "Warning", "Restarting", f"{kind} {name} is restarting {why}")
                    self.condition(status, "Restarting", f"{kind} {name} is restarting {why}")
                else:
                    self.complete(job, status, "Failed", f"{kind} {name} is failed {why}", self.failed_reason)
        return None

    def time_to_live(self, job: Obj, status: Obj) -> float | None:
        """Seconds until the end of a finished job's TTL, or None without a TTL."""
        ttl = job["spec"]["runPolicy"].get("ttlSecondsAfterFinished")
        if ttl is None or not c.is_finished(status):
            return None
        if "completionTime" not in status:
            raise ReconcileError("job completion time is nil, cannot cleanup")
        return float(c.seconds(status["completionTime"]) + ttl - self.clock())

    def delete_pods_and_services(self, job: Obj, status: Obj, pods: Objects) -> None:
        """Delete the pods and services that cleanPodPolicy selects. If the job isn't finished, delete all."""
        policy = job["spec"]["runPolicy"]["cleanPodPolicy"] if c.is_finished(status) else "All"
        for pod in pods:
            if policy == "All" or (policy == "Running" and c.phase(pod) in ("Running", "Pending")):
                self.delete(job, r.POD, pod["metadata"]["name"])
                self.delete(job, r.SERVICE, pod["metadata"]["name"])

    # single objects of the job

    def specs(self, job: Obj) -> dict[str, Obj]:
        """The job's replica specs by type, in the order in which they are reconciled."""
        specs = job["spec"][self.specs_field]
        return {type_: specs[type_] for type_ in self.defaults if type_ in specs}

    def labels(self, job: Obj, type_: str | None = None, index: int | None = None) -> dict[str, str]:
        """The labels of a job's objects, of a replica type, or of one replica."""
        return {
            c.OPERATOR_NAME: self.component, c.JOB_NAME: job["metadata"]["name"],
            **({c.REPLICA_TYPE: type_.lower()} if type_ is not None else {}),
            **({c.REPLICA_INDEX: str(index)} if index is not None else {}),
        }  # fmt: skip

    def pod(self, job: Obj, name: str, spec: Obj, labels: dict[str, str]) -> Obj:
        """Build a pod from the template of a replica spec, with the replica's restartPolicy."""
        pod = c.child(job, name, c.pod_template(spec["template"], labels))
        if pod["spec"].get("restartPolicy"):
            self.recorder.event(job, "Warning", "SetPodTemplateRestartPolicy", TEMPLATE_RESTART_POLICY)
        policy = spec["restartPolicy"]
        pod["spec"]["restartPolicy"] = "Never" if policy == "ExitCode" else policy
        return pod

    def create(self, job: Obj, resource: Resource, obj: Obj) -> None:
        """Create a pod or service of the job, and record an event about the success or failure."""
        name = obj["metadata"]["name"]
        try:
            if resource == r.SERVICE and len(name) > 63:  # a job with such a name never gets a status
                why = f'Invalid value: "{name}": must be no more than 63 characters'
                raise ApiError(422, f'Service "{name}" is invalid: metadata.name: {why}')
            self.store.create(resource, obj)
        except ApiError as error:
            self.recorder.event(job, "Warning", f"FailedCreate{resource.kind}", f"Error creating: {error}")
            raise
        self.recorder.event(job, "Normal", f"SuccessfulCreate{resource.kind}", f"Created {resource.singular}: {name}")

    def delete(self, job: Obj, resource: Resource, name: str) -> None:
        """Delete a pod or service of the job, unless it doesn't exist or is being deleted."""
        found = self.store.find(resource, job["metadata"]["namespace"], name)
        if found is not None and not c.is_terminating(found):
            self.store.delete(resource, job["metadata"]["namespace"], name)
            what = f"Deleted {resource.singular}: {name}"
            self.recorder.event(job, "Normal", f"SuccessfulDelete{resource.kind}", what)

    def condition(self, status: Obj, type_: str, message: str, value: str = "True", reason: str | None = None) -> None:
        """Set a condition. Does nothing if the job has failed."""
        if not c.has(status, "Failed"):
            reason = f"{self.resource.kind}{reason or type_}"
            c.set_condition(status, type_, value, reason, message, self.clock())

    def event(self, job: Obj, type_: str, reason: str, message: str) -> None:
        """Record an event whose reason starts with the kind, such as PyTorchJobSucceeded."""
        self.recorder.event(job, type_, f"{job['kind']}{reason}", message)

    def complete(self, job: Obj, status: Obj, how: str, message: str, reason: str | None = None) -> None:
        """Complete the job: set the condition Succeeded or Failed."""
        self.event(job, "Normal", how, message)
        status.setdefault("completionTime", c.timestamp(self.clock()))
        self.condition(status, how, message, reason=reason)
