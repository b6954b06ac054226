"""MPIJob kubeflow.org/v2beta1 as mpi-operator 0.8.2 runs it: a launcher Job that reaches its workers by SSH."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers import mpijob_v2beta1_objects as objects
from airflow_provider_ktrain.local.controllers.mpi_common import JobObjects, worker_names
from airflow_provider_ktrain.local.controllers.owners import child, controller_of, is_controlled_by
from airflow_provider_ktrain.local.controllers.runtime import Clock, Controller, Key, controlled_by, itself
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.store import Change, Obj, Objects, Store

MANAGER = "kubeflow.org/mpi-operator"
TEMPLATE_RESTART_POLICY = "Restart policy in pod template overridden by restart policy in replica spec"
MESSAGE_LIMIT = 1024  # of an event's message


class MPIJobV2Controller:
    """Reconciles MPIJobs v2beta1."""

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        self._store = store
        self._clock = clock
        self._recorder = EventRecorder(store, "mpi-job-controller")
        self._objects = JobObjects(store, self._recorder)

    def controller(self) -> Controller[Key]:
        controller = Controller(self._store, self.reconcile, self._clock)
        controller.watch(r.MPIJOB_V2BETA1, itself)
        for resource in (r.SERVICE, r.CONFIG_MAP, r.SECRET, r.BATCH_JOB):
            controller.watch(resource, controlled_by(r.MPIJOB_V2BETA1))
        controller.watch(r.POD, self._pod_owner)
        return controller

    def _pod_owner(self, change: Change) -> Iterable[Key]:
        """A worker's job, or that of the launcher Job that a pod belongs to."""
        reference = controller_of(change.object)
        if reference and reference["kind"] == "Job":
            launcher = self._store.find(r.BATCH_JOB, change.object["metadata"]["namespace"], reference["name"])
            if launcher is None:
                return []
            change = Change(change.version, change.type, r.BATCH_JOB, launcher)
        return controlled_by(r.MPIJOB_V2BETA1)(change)

    def reconcile(self, key: Key) -> None:
        """Bring one job nearer to its end."""
        stored = self._store.find(r.MPIJOB_V2BETA1, *key)
        if stored is None or c.is_terminating(stored):
            return
        stored = {"spec": {}, **stored}  # the schema does not ask for one
        if (stored["spec"].get("runPolicy") or {}).get("managedBy", MANAGER) != MANAGER:
            return
        job = objects.defaulted(copy.deepcopy(stored))
        problems = objects.validate(job)
        if problems:
            text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
            self._recorder.event(job, "Warning", "ValidationError", _short(f"Found validation errors: {text}"))
            return
        status = job.setdefault("status", {})
        name = f"{key[0]}/{key[1]}"
        if not status.get("conditions"):
            self._condition(status, "Created", "True", "MPIJobCreated", f"MPIJob {name} is created.")
            self._recorder.event(job, "Normal", "MPIJobCreated", f"MPIJob {name} is created.")
        if c.is_finished(status) and "completionTime" in status:
            if job["spec"]["runPolicy"]["cleanPodPolicy"] != "None":
                self._clean_workers(job)
                status["replicaStatuses"]["Worker"] = {}
                self._write(job)
            return
        self._sync(job)

    def _sync(self, job: Obj) -> None:
        spec, meta, status = job["spec"], job["metadata"], job["status"]
        suspended = bool(spec["runPolicy"].get("suspend"))
        if not suspended:
            status.setdefault("startTime", c.timestamp(self._clock()))
        launcher = self._objects.mine(job, r.BATCH_JOB, f"{meta['name']}-launcher")
        workers: Objects = []
        if launcher is None or not c.has(launcher.get("status", {}), "Complete", "Failed"):
            if self._objects.mine(job, r.SERVICE, meta["name"]) is None:
                self._objects.ensure(job, r.SERVICE, meta["name"], spec=objects.service_spec(job))
            pods = self._store.list(r.POD, meta["namespace"], objects.labels(job, "worker"))
            self._objects.ensure(job, r.CONFIG_MAP, f"{meta['name']}-config", data=objects.config(job, pods))
            if self._objects.mine(job, r.SECRET, f"{meta['name']}-ssh") is None:
                self._objects.ensure(
                    job, r.SECRET, f"{meta['name']}-ssh", type="kubernetes.io/ssh-auth", data=objects.ssh_keys()
                )
            if not suspended:
                workers = self._objects.workers(
                    job, pods, lambda name, index: self._store.create(r.POD, objects.worker(job, name, index))
                )
            at_once = spec["launcherCreationPolicy"] == "AtStartup"
            if launcher is None and (at_once or all(c.has(w.get("status", {}), "Ready") for w in workers)):
                launcher = self._create_launcher(job, suspended)
        if launcher is not None and bool(launcher["spec"].get("suspend")) != suspended:
            launcher = self._store.update(r.BATCH_JOB, {**launcher, "spec": {**launcher["spec"], "suspend": suspended}})
        if suspended:
            self._clean_workers(job)
        self._update_status(job, launcher, workers, suspended)
        self._write(job)

    def _update_status(self, job: Obj, launcher: Obj | None, workers: Objects, suspended: bool) -> None:
        status, meta = job["status"], job["metadata"]
        name = f"{meta['namespace']}/{meta['name']}"
        if suspended:
            if self._condition(status, "Suspended", "True", "MPIJobSuspended", "MPIJob suspended"):
                self._recorder.event(job, "Normal", "MPIJobSuspended", "MPIJob suspended")
        elif c.condition(status, "Suspended") and self._condition(
            status, "Suspended", "False", "MPIJobResumed", "MPIJob resumed"
        ):
            self._recorder.event(job, "Normal", "MPIJobResumed", "MPIJob resumed")
            status["startTime"] = c.timestamp(self._clock())
        counts = status.setdefault("replicaStatuses", {})
        launchers_running = 0
        if launcher is not None:
            pods = [p for p in self._store.owned(r.POD, launcher) if is_controlled_by(p, launcher)]
            launchers_running = sum(c.phase(pod) == "Running" for pod in pods)
            ended = launcher.get("status", {})
            counts["Launcher"] = {"failed": ended["failed"]} if ended.get("failed") else {}
            if c.has(ended, "Complete"):
                counts["Launcher"]["succeeded"] = 1
                message = f"MPIJob {name} successfully completed."
                self._recorder.event(job, "Normal", "MPIJobSucceeded", message)
                status.setdefault("completionTime", ended.get("completionTime"))
                self._condition(status, "Succeeded", "True", "MPIJobSucceeded", message)
            elif c.has(ended, "Failed"):
                self._launcher_failed(job, ended, pods)
            elif launchers_running:
                counts["Launcher"]["active"] = launchers_running
        phases = [c.phase(worker) for worker in workers]
        tally = {"active": "Running", "succeeded": "Succeeded", "failed": "Failed"}
        counts["Worker"] = {what: n for what, phase in tally.items() if (n := phases.count(phase))}
        evicted = sum(worker.get("status", {}).get("reason") == "Evicted" for worker in workers)
        if evicted:  # no completionTime: the launcher may succeed all the same
            message = f"{evicted}/{len(workers)} workers are evicted"
            self._condition(status, "Failed", "True", "MPIJobEvicted", message)
            self._recorder.event(job, "Warning", "MPIJobEvicted", message)
        if suspended:
            self._condition(status, "Running", "False", "MPIJobSuspended", f"MPIJob {name} is suspended.")
        elif launchers_running and phases.count("Running") == len(workers):
            self._condition(status, "Running", "True", "MPIJobRunning", f"MPIJob {name} is running.")
            self._recorder.event(job, "Normal", "MPIJobRunning", f"MPIJob {name} is running")
        elif c.is_finished(status) and c.condition(status, "Running") is None:
            message = f"MPIJob {name} is finished but Running condition was never set."
            self._condition(status, "Running", "False", "MPIJobRunning", message)

    def _launcher_failed(self, job: Obj, ended: Obj, pods: Objects) -> None:
        status, meta = job["status"], job["metadata"]
        why = c.condition(ended, "Failed") or {}
        reason = why.get("reason") or "MPIJobFailed"
        message = why.get("message") or f"MPIJob {meta['namespace']}/{meta['name']} has failed"
        failed = [pod for pod in pods if c.phase(pod) == "Failed"]
        if reason == "BackoffLimitExceeded" and failed:
            last = max(failed, key=lambda pod: pod["metadata"]["creationTimestamp"])["status"]
            reason += f"/{last.get('reason', '')}"
            message = _short(f"{message}: {last.get('message', '')}")
        self._recorder.event(job, "Warning", reason, message)
        status.setdefault("completionTime", c.timestamp(self._clock()))
        self._condition(status, "Failed", "True", reason, message)

    def _condition(self, status: Obj, type_: str, value: str, reason: str, message: str) -> bool:
        return c.set_condition(status, type_, value, reason, message, self._clock(), ends=("Running", "Failed"))

    def _write(self, job: Obj) -> None:
        stored = self._store.get(r.MPIJOB_V2BETA1, job["metadata"]["namespace"], job["metadata"]["name"])
        self._store.update_status(r.MPIJOB_V2BETA1, stored, job["status"])

    def _clean_workers(self, job: Obj) -> None:
        """Delete the workers; under cleanPodPolicy Running those that have ended stay."""
        policy = job["spec"]["runPolicy"]["cleanPodPolicy"]
        for name in worker_names(job):
            pod = self._objects.mine(job, r.POD, name)
            if pod is None or c.is_terminating(pod):
                continue
            if policy != "Running" or c.phase(pod) in ("Running", "Pending"):
                self._store.delete(r.POD, job["metadata"]["namespace"], name)

    def _create_launcher(self, job: Obj, suspended: bool) -> Obj:
        policy, spec = job["spec"]["runPolicy"], job["spec"]["mpiReplicaSpecs"]["Launcher"]
        if spec["template"]["spec"].get("restartPolicy"):
            self._recorder.event(job, "Warning", "SetPodTemplateRestartPolicy", TEMPLATE_RESTART_POLICY)
        copied = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")
        wanted = {
            **{field: policy[field] for field in copied if policy.get(field) is not None},
            "podReplacementPolicy": "Failed", "template": objects.launcher_template(job),
            **({"suspend": True} if suspended else {}),
        }  # fmt: skip
        name = f"{job['metadata']['name']}-launcher"
        try:
            return self._store.create(r.BATCH_JOB, child(job, name, {"app": job["metadata"]["name"]}, spec=wanted))
        except ApiError as error:
            self._recorder.event(job, "Warning", "MPIJobFailed", f"launcher pod created failed: {error}")
            raise


def _short(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
