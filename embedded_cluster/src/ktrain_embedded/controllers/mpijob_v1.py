"""MPIJob kubeflow.org/v1 of training-operator 1.9. The launcher pod connects to Workers by `kubectl exec`."""

from __future__ import annotations

from typing import ClassVar

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers import mpi_common as mpi
from ktrain_embedded.controllers.training_operator import TrainingOperator
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.pods import has_ended
from ktrain_embedded.objects.store import Obj, Objects

KUBECTL_DIR = "/opt/kube"
KUBECTL_MOUNT = {"name": "mpi-job-kubectl", "mountPath": KUBECTL_DIR}
DELIVERY_RESOURCES = {"cpu": "100m", "ephemeral-storage": "5Gi", "memory": "512Mi"}
DELIVERY = {
    "name": "kubectl-delivery", "imagePullPolicy": "IfNotPresent", "volumeMounts": [KUBECTL_MOUNT, mpi.CONFIG_MOUNT],
    "image": "mpioperator/kubectl-delivery:latest",  # the operator's default for --mpi-kubectl-delivery-image
    "resources": {"limits": DELIVERY_RESOURCES, "requests": DELIVERY_RESOURCES},
}  # fmt: skip
OPENMPI = {
    "OMPI_MCA_plm_rsh_agent": f"{mpi.CONFIG_DIR}/{mpi.KUBEXEC}",
    "OMPI_MCA_orte_default_hostfile": f"{mpi.CONFIG_DIR}/{mpi.HOSTFILE}",
}
INTEL_DEFAULTS = {"I_MPI_HYDRA_BOOTSTRAP": "rsh", "I_MPI_HYDRA_BOOTSTRAP_EXEC": f"{mpi.CONFIG_DIR}/{mpi.KUBEXEC}"}


class MPIJobV1Controller(mpi.MPIJobController, TrainingOperator):
    """Reconciles MPIJobs like training-operator: the launcher is a pod and connects to Workers by `kubectl exec`."""

    resource = r.MPIJOB_V1
    owns = (r.POD, r.CONFIG_MAP, r.ROLE, r.ROLE_BINDING, r.SERVICE_ACCOUNT)
    component = "mpijob-controller"
    specs_field = "mpiReplicaSpecs"
    defaults: ClassVar = {"Launcher": (1, "Never"), "Worker": (0, "Never")}
    restarting = ("ExitCode",)
    failed_reason = "MPIJobFailed"  # the condition's reason is MPIJobMPIJobFailed, as on a real cluster
    deleted_reason = "SuccessfulDeleteJob"

    def invalid(self, job: Obj) -> str | None:
        """Why the operator rejects the job: no containers, no Launcher or several Launchers. None if it is valid."""
        specs = job["spec"].get(self.specs_field) or {}
        for type_, spec in specs.items():
            if not ((spec or {}).get("template") or {}).get("spec", {}).get("containers"):
                return f"MPIReplicaSpec is not valid: containers definition expected in {type_}"
        if "Launcher" not in specs:
            return "MPIReplicaSpec is not valid: Master ReplicaSpec must be present"
        if specs["Launcher"].get("replicas") not in (None, 1):
            return "MPIReplicaSpec is not valid: There must be only 1 launcher replica"
        return None

    def sync_replicas(self, job: Obj, status: Obj, pods: Objects) -> None:
        """Reconcile launcher and Workers once for each replica type, as the operator does."""
        # the operator's first reconcile counts only the replica types that the job has
        types = list(self.defaults if "replicaStatuses" in status else self.specs(job))
        for _ in self.specs(job):  # the operator repeats everything, including events, for each replica type
            launcher, workers = self.sync_once(job, pods)
        counts = {"Launcher": c.tally([launcher]), "Worker": c.tally(workers)}
        status["replicaStatuses"] = {type_: counts[type_] for type_ in types}

    def sync_once(self, job: Obj, pods: Objects) -> tuple[Obj, Objects]:
        """Create missing objects until the launcher ends. Returns the launcher, and the Workers if it hasn't ended."""
        meta, specs = job["metadata"], self.specs(job)
        name, full_name = f"{meta['name']}-launcher", f"{meta['namespace']}/{meta['name']}"
        launcher = self.mine(job, r.POD, name)
        workers: Objects = []
        if launcher is None or not has_ended(launcher):
            account = specs["Launcher"]["template"]["spec"].get("serviceAccountName") or name
            self.ensure_access(job, name, account, pods)
            known = self.store.list(r.POD, meta["namespace"], self.labels(job, "Worker"))
            workers = self.workers(job, known, lambda name, index: self.create_worker(job, name, index))
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
        """Create the objects that the launcher needs for Workers. The events use up the job's event budget."""
        namespace = job["metadata"]["namespace"]
        if self.store.find(r.SERVICE_ACCOUNT, namespace, account) is not None:  # whoever owns it
            self.recorder.event(job, "Normal", "ServiceAccount is exist", f"ServiceAccount: {account}")
        else:
            self.ensure(job, r.SERVICE_ACCOUNT, account)
        self.ensure(job, r.CONFIG_MAP, f"{job['metadata']['name']}-config", data=self.config(job, pods))
        names = {"resourceNames": names} if (names := mpi.worker_names(job)) else {}
        rules = [
            {"verbs": ["get", "list", "watch"], "apiGroups": [""], "resources": ["pods"]},
            {"verbs": ["create"], "apiGroups": [""], "resources": ["pods/exec"], **names},
        ]
        if self.ensure(job, r.ROLE, name, rules=rules):
            self.recorder.event(job, "Normal", "LauncherRole is exist", f"LauncherRole: {name}")
        subjects = [{"kind": "ServiceAccount", "name": account, "namespace": namespace}]
        role = {"apiGroup": r.ROLE.group, "kind": "Role", "name": name}
        if self.ensure(job, r.ROLE_BINDING, name, subjects=subjects, roleRef=role):
            self.recorder.event(job, "Normal", "RoleBinding is exist", f"RoleBinding: {name}")

    def config(self, job: Obj, pods: Objects) -> dict[str, str]:
        """hostfile, kubexec.sh and discover_hosts.sh. discover_hosts.sh lists the running Workers."""
        slots, container = job["spec"].get("slotsPerWorker") or 1, job["spec"].get("mainContainer")
        launcher = [f"{job['metadata']['name']}-launcher"] if self.launcher_has_gpu(job) else []
        kubectl = f"{KUBECTL_DIR}/kubectl exec ${{POD_NAME}}" + (f" --container {container}" if container else "")
        workers = [pod for pod in pods if pod["metadata"]["labels"].get(c.REPLICA_TYPE) == "worker"]
        running = sorted(pod["metadata"]["name"] for pod in workers if c.phase(pod) == "Running")
        return {
            mpi.HOSTFILE: "".join(f"{name} slots={slots}\n" for name in [*launcher, *mpi.worker_names(job)]),
            mpi.KUBEXEC: f'#!/bin/sh\nset -x\nPOD_NAME=$1\nshift\n{kubectl} -- /bin/sh -c "$*"',
            mpi.DISCOVER: "#!/bin/sh"
            + "".join(f"\necho {name}:{slots}\n" for name in launcher)
            + "".join(f"\necho {name}:{slots}" for name in running),
        }

    def launcher_has_gpu(self, job: Obj) -> bool:
        """Whether a container of the launcher has a GPU limit. If so, the launcher is also a host."""
        containers = self.specs(job)["Launcher"]["template"]["spec"]["containers"]
        return any("gpu" in key for x in containers for key in (x.get("resources") or {}).get("limits") or ())

    def create_worker(self, job: Obj, name: str, index: int) -> Obj:
        """Create a Worker pod. Without a command, it sleeps: mpirun starts its processes by `kubectl exec`."""
        spec = self.specs(job)["Worker"]
        spec["template"]["spec"].pop("restartPolicy", None)  # overridden without an event, unlike the launcher's
        pod = self.pod(job, name, spec, self.labels(job, "Worker", index))
        main = pod["spec"]["containers"][0]
        if not main.get("command"):
            main.update(command=["sleep"], args=["365d"])
        mpi.mount_config(job, pod["spec"], mpi.KUBEXEC)
        worker = self.store.create(r.POD, pod)
        self.recorder.event(job, "Normal", "SuccessfulCreatePod", f"Created worker pod: {name}")
        return worker

    def launcher(self, job: Obj, name: str, account: str) -> Obj:
        """The launcher pod, with an init container that delivers kubectl."""
        labels = {**self.labels(job, "Launcher"), c.JOB_ROLE: "master"}
        pod = self.pod(job, name, self.specs(job)["Launcher"], labels)
        spec, main = pod["spec"], pod["spec"]["containers"][0]
        spec["serviceAccountName"] = account
        delivery = {**DELIVERY}
        c.add_env(delivery, {"TARGET_DIR": KUBECTL_DIR, "NAMESPACE": job["metadata"]["namespace"]})
        c.append(spec, "initContainers", delivery)
        given = {variable["name"] for variable in main.get("env") or ()}
        intel = {k: v for k, v in INTEL_DEFAULTS.items() if k not in given}
        c.add_env(main, {**OPENMPI, **({} if self.launcher_has_gpu(job) else mpi.NO_GPUS), **intel})
        mpi.mount(spec, {"name": KUBECTL_MOUNT["name"], "emptyDir": {}}, KUBECTL_MOUNT)
        mpi.mount_config(job, spec, mpi.KUBEXEC, mpi.HOSTFILE, mpi.DISCOVER)
        return pod
