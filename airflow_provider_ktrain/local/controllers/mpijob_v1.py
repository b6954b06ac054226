"""MPIJob kubeflow.org/v1 as training-operator 1.9 runs it: a launcher pod that reaches workers by `kubectl exec`."""

from __future__ import annotations

import time

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers.mpi_common import (
    CONFIG_DIR,
    CONFIG_MOUNT,
    DISCOVER,
    HOSTFILE,
    KUBEXEC,
    NO_GPUS,
    JobObjects,
    config_volume,
    mount,
    worker_names,
)
from airflow_provider_ktrain.local.controllers.owners import child
from airflow_provider_ktrain.local.controllers.runtime import Clock
from airflow_provider_ktrain.local.controllers.training_operator import TrainingOperator
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.store import Obj, Objects, Store

KUBECTL_DELIVERY = "mpioperator/kubectl-delivery:latest"  # the operator's default for --mpi-kubectl-delivery-image
KUBECTL_DIR = "/opt/kube"
KUBECTL_MOUNT = {"name": "mpi-job-kubectl", "mountPath": KUBECTL_DIR}
DELIVERY_RESOURCES = {"cpu": "100m", "ephemeral-storage": "5Gi", "memory": "512Mi"}
INTEL_DEFAULTS = {"I_MPI_HYDRA_BOOTSTRAP": "rsh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": f"{CONFIG_DIR}/{KUBEXEC}"}


class MPIJobV1Controller(TrainingOperator):
    resource = r.MPIJOB_V1
    replica_types = ("Launcher", "Worker")
    specs_field = "mpiReplicaSpecs"
    container = "mpi"
    restart_policy = "Never"
    deleted_reason = "SuccessfulDeleteJob"
    owns = (r.POD, r.CONFIG_MAP, r.ROLE, r.ROLE_BINDING, r.SERVICE_ACCOUNT)

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self.objects = JobObjects(store, self.recorder)

    def invalid(self, job: Obj) -> str | None:
        specs = job["spec"].get(self.specs_field)
        if specs is None:
            return "MPIReplicaSpec is not valid"
        for type_, spec in specs.items():
            containers = ((spec or {}).get("template") or {}).get("spec", {}).get("containers")
            if not containers:
                return f"MPIReplicaSpec is not valid: containers definition expected in {type_}"
            if type_ not in self.replica_types:
                return f"MPIReplicaType is {type_} but must be one of [{' '.join(self.replica_types)}]"
            for field, told in (("image", "Image"), ("name", "ContainerName")):
                if not all(container.get(field) for container in containers):
                    return f"MPIReplicaSpec is not valid: {told} is undefined in the container of {type_}"
            if type_ == "Launcher" and spec.get("replicas") not in (None, 1):
                return "MPIReplicaSpec is not valid: There must be only 1 launcher replica"
        return None if "Launcher" in specs else "MPIReplicaSpec is not valid: Master ReplicaSpec must be present"

    def defaulted(self, job: Obj) -> Obj:
        spec = job["spec"]
        policy = (spec.get("runPolicy") or {}).get("cleanPodPolicy") or spec.get("cleanPodPolicy")
        workers = spec[self.specs_field].get("Worker")
        if workers is not None and workers.get("replicas") is None:
            workers["replicas"] = 0
        super().defaulted(job)
        spec["runPolicy"]["cleanPodPolicy"] = policy or "None"
        return job

    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        status.setdefault("startTime", c.timestamp(self.clock()))
        # the operator's first pass over a job counts only the types that the job has
        types = self.replica_types if "replicaStatuses" in status else tuple(self.specs(job))
        status["replicaStatuses"] = {type_: {} for type_ in self.replica_types if type_ in types}
        for again in range(len(self.specs(job))):  # all of it for each replica type, with all its events
            launcher, workers = self.sync_once(job, pods)
            if again:
                continue
            for type_, pod in [("Launcher", launcher), *(("Worker", worker) for worker in workers)]:
                what = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}.get(c.phase(pod))
                if what:
                    counts = status["replicaStatuses"].setdefault(type_, {})
                    counts[what] = counts.get(what, 0) + 1

    def sync_once(self, job: Obj, pods: Objects) -> tuple[Obj, Objects]:
        """Make what misses until the launcher has ended; the launcher, and the workers while it has not."""
        meta, specs = job["metadata"], self.specs(job)
        name, full_name = f"{meta['name']}-launcher", f"{meta['namespace']}/{meta['name']}"
        launcher = self.objects.mine(job, r.POD, name)
        workers: Objects = []
        if launcher is None or c.phase(launcher) not in ("Succeeded", "Failed"):
            account = specs["Launcher"]["template"]["spec"].get("serviceAccountName") or name
            self.ensure_access(job, name, account, pods)
            known = self.store.list(r.POD, meta["namespace"], self.labels(job, "Worker"))
            if "Worker" in specs:
                workers = self.objects.workers(job, known, lambda n, index: self.create_worker(job, n, index))
            if launcher is None:
                launcher = self.store.create(r.POD, self.launcher(job, name, account))
                self.event(job, "Normal", "Running", f"launcher pod created success: {name}")
        phase = c.phase(launcher)
        if phase == "Succeeded":
            self.recorder.event(job, "Normal", "mpijobsSucceeded", f"MPIJob {full_name} successfully completed.")
        elif phase == "Failed":
            reason = launcher["status"].get("reason") or "MPIJobFailed"
            self.recorder.event(job, "Warning", reason, f"MPIJob {full_name} has failed")
        elif phase == "Running" and all(c.phase(worker) == "Running" for worker in workers):
            self.event(job, "Normal", "Running", f"MPIJob {full_name} is running")
        return launcher, workers

    def ensure_access(self, job: Obj, name: str, account: str, pods: Objects) -> None:
        """What the launcher needs to reach the workers. Each event about it costs the job's budget of events."""
        namespace = job["metadata"]["namespace"]
        if self.store.find(r.SERVICE_ACCOUNT, namespace, account) is not None:  # whoever's it is
            self.recorder.event(job, "Normal", "ServiceAccount is exist", f"ServiceAccount: {account}")
        else:
            self.store.create(r.SERVICE_ACCOUNT, child(job, account, {"app": job["metadata"]["name"]}))
        self.objects.ensure(job, r.CONFIG_MAP, f"{job['metadata']['name']}-config", data=self.config(job, pods))
        if self.objects.ensure(job, r.ROLE, name, rules=self.rules(job)):
            self.recorder.event(job, "Normal", "LauncherRole is exist", f"LauncherRole: {name}")
        subjects = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
        role = {"apiGroup": r.ROLE.group, "kind": "Role", "name": name}
        if self.objects.ensure(job, r.ROLE_BINDING, name, subjects=subjects, roleRef=role):
            self.recorder.event(job, "Normal", "RoleBinding is exist", f"RoleBinding: {name}")

    def config(self, job: Obj, pods: Objects) -> dict[str, str]:
        """hostfile, kubexec.sh and discover_hosts.sh; the last names the workers that run now."""
        slots = job["spec"].get("slotsPerWorker") or 1
        launcher = [f"{job['metadata']['name']}-launcher"] if self.launcher_has_gpu(job) else []
        container = job["spec"].get("mainContainer")
        kubectl = f"{KUBECTL_DIR}/kubectl exec ${{POD_NAME}}" + (f" --container {container}" if container else "")
        running = sorted(
            pod["metadata"]["name"]
            for pod in pods
            if c.phase(pod) == "Running" and pod["metadata"]["labels"].get(c.REPLICA_TYPE) == "worker"
        )
        return {
            HOSTFILE: "".join(f"{name} slots={slots}\n" for name in [*launcher, *worker_names(job)]),
            KUBEXEC: f'#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n{kubectl} -- /bin/sh -c "$*"',
            DISCOVER: "#!/bin/sh"
            + "".join(f"\necho {name}:{slots}\n" for name in launcher)
            + "".join(f"\necho {name}:{slots}" for name in running),
        }

    def rules(self, job: Obj) -> Objects:
        return [
            {"verbs": ["get", "list", "watch"], "apiGroups": [""], "resources": ["pods"]},
            {
                "verbs": ["create"], "apiGroups": [""], "resources": ["pods/exec"],
                **({"resourceNames": names} if (names := worker_names(job)) else {}),
            },
        ]  # fmt: skip

    def launcher_has_gpu(self, job: Obj) -> bool:
        containers = self.specs(job)["Launcher"]["template"]["spec"]["containers"]
        return any("gpu" in key for x in containers for key in (x.get("resources") or {}).get("limits") or ())

    def create_worker(self, job: Obj, name: str, index: int) -> Obj:
        spec = self.specs(job)["Worker"]
        spec["template"]["spec"].pop("restartPolicy", None)  # overridden without a word, unlike the launcher's
        pod = self.pod(job, name, spec, self.labels(job, "Worker", index))
        main = pod["spec"]["containers"][0]
        if not main.get("command"):
            main.update(command=["sleep"], args=["365d"])
        mount(pod["spec"], config_volume(job, KUBEXEC), CONFIG_MOUNT)
        try:
            worker = self.store.create(r.POD, pod)
        except ApiError as error:
            self.event(job, "Warning", "Failed", f"worker pod created failed: {error}")
            raise
        self.recorder.event(job, "Normal", "SuccessfulCreatePod", f"Created worker pod: {name}")
        return worker

    def launcher(self, job: Obj, name: str, account: str) -> Obj:
        labels = {**self.labels(job, "Launcher"), c.JOB_ROLE: "master"}
        pod = self.pod(job, name, self.specs(job)["Launcher"], labels)
        spec = pod["spec"]
        spec["serviceAccountName"] = account
        delivery = {
            "name": "kubectl-delivery", "image": KUBECTL_DELIVERY, "imagePullPolicy": "IfNotPresent",
            "volumeMounts": [KUBECTL_MOUNT, CONFIG_MOUNT],
            "resources": {"limits": DELIVERY_RESOURCES, "requests": DELIVERY_RESOURCES},
        }  # fmt: skip
        c.add_env(delivery, [("TARGET_DIR", KUBECTL_DIR), ("NAMESPACE", job["metadata"]["namespace"])])
        spec["initContainers"] = [*(spec.get("initContainers") or ()), delivery]
        main = spec["containers"][0]
        given = {variable["name"] for variable in main.get("env") or ()}
        c.add_env(main, [
            ("OMPI_MCA_plm_rsh_agent", f"{CONFIG_DIR}/{KUBEXEC}"),
            ("OMPI_MCA_orte_default_hostfile", f"{CONFIG_DIR}/{HOSTFILE}"),
            *([] if self.launcher_has_gpu(job) else NO_GPUS),
            *((k, v) for k, v in INTEL_DEFAULTS.items() if k not in given),
        ])  # fmt: skip
        mount(spec, {"name": KUBECTL_MOUNT["name"], "emptyDir": {}}, KUBECTL_MOUNT)
        mount(spec, config_volume(job, KUBEXEC, HOSTFILE, DISCOVER), CONFIG_MOUNT)
        return pod

    def update_status(self, job: Obj, status: Obj) -> None:
        name = job["metadata"]["name"]
        for type_ in [t for t in self.replica_types if t in self.specs(job)]:
            counts = status["replicaStatuses"][type_]
            if type_ == "Launcher":
                if counts.get("active"):
                    self.condition(status, "Running", f"MPIJob {name} is running.")
                if counts.get("succeeded") == 1:
                    return self.succeed(job, status, f"MPIJob {name} is successfully completed.")
            failed = counts.get("failed", 0)
            if failed and self.specs(job)[type_]["restartPolicy"] == "ExitCode":
                message = f"MPIJob {name} is restarting because {failed} {type_} replica(s) failed."
                self.event(job, "Warning", "Restarting", message)
                self.condition(status, "Restarting", message)
            elif failed:
                message = f"MPIJob {name} is failed because {failed} {type_} replica(s) failed."
                self.event(job, "Normal", "Failed", message)
                status.setdefault("completionTime", c.timestamp(self.clock()))
                self.condition(status, "Failed", message, reason="MPIJobFailed")  # so: MPIJobMPIJobFailed
        return None
