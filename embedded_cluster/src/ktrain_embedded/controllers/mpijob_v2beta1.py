"""MPIJob kubeflow.org/v2beta1 of mpi-operator 0.8.2. The launcher is a batch Job and connects to Workers by SSH."""

from __future__ import annotations

import base64
import copy
import time
from collections.abc import Iterable

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers import mpi_common as mpi
from ktrain_embedded.controllers.runtime import Clock, Key, controlled_by
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.errors import described, joined, unsupported
from ktrain_embedded.objects.store import Obj, Objects, Store

TEMPLATE_RESTART_POLICY = "Restart policy in pod template overridden by restart policy in replica spec"
CLEAN_POLICIES, RESTART_POLICIES = ("All", "None", "Running"), ("Never", "OnFailure")
COPIED = ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit")  # from runPolicy to the launcher Job
ROOT_SSH = "/root/.ssh"
SSH_ITEMS = [
    {"key": "ssh-privatekey", "path": "id_rsa"},
    {"key": "ssh-publickey", "path": "id_rsa.pub"},
    {"key": "ssh-publickey", "path": "authorized_keys"},
]
SSH_ARGUMENTS = "-o ConnectionAttempts=10"
HOSTFILE_PATH = f"{mpi.CONFIG_DIR}/{mpi.HOSTFILE}"
IMPLEMENTATIONS = {  # launcher environment by mpiImplementation
    "OpenMPI": {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true", "OMPI_MCA_orte_default_hostfile": HOSTFILE_PATH,
        "OMPI_MCA_plm_rsh_args": SSH_ARGUMENTS, "OMPI_MCA_orte_set_default_slots": "{slots}",
    },
    "Intel": {
        "I_MPI_HYDRA_HOST_FILE": HOSTFILE_PATH, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": SSH_ARGUMENTS,
        "I_MPI_PERHOST": "{slots}",
    },
    "MPICH": {"HYDRA_HOST_FILE": HOSTFILE_PATH, "HYDRA_LAUNCH_EXTRA_ARGS": SSH_ARGUMENTS},
}  # fmt: skip
DEFAULTS = {
    "slotsPerWorker": 1, "sshAuthMountPath": ROOT_SSH, "mpiImplementation": "OpenMPI",
    "launcherCreationPolicy": "AtStartup",
}  # fmt: skip


class MPIJobV2Controller(mpi.MPIJobController):
    """Reconciles MPIJobs like mpi-operator: the launcher is a batch Job and connects to Workers by SSH."""

    resource = r.MPIJOB_V2BETA1
    owns = (r.POD, r.SERVICE, r.CONFIG_MAP, r.SECRET, r.BATCH_JOB)
    component = "mpi-job-controller"

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        # the controller of a launcher pod is the launcher Job, which is named after the MPIJob
        launcher = controlled_by(r.BATCH_JOB)
        self.watch(r.POD, lambda change: [(ns, job.removesuffix("-launcher")) for ns, job in launcher(change)])

    def reconcile(self, key: Key) -> None:
        """Reconcile one job."""
        stored = self.store.find(r.MPIJOB_V2BETA1, *key)
        if stored is None or c.is_terminating(stored):
            return
        job = copy.deepcopy({"spec": {}, **stored})  # spec isn't required by the schema
        job["spec"].update({field: job["spec"].get(field) or value for field, value in DEFAULTS.items()})
        c.default_replicas(job["spec"], "mpiReplicaSpecs", {"Launcher": (1, "OnFailure"), "Worker": (0, "Never")})
        problems = list(validate(job))
        if problems:
            self.recorder.event(job, "Warning", "ValidationError", f"Found validation errors: {joined(problems)}")
            return
        status = job.setdefault("status", {})
        if not status.get("conditions"):
            message = f"MPIJob {key[0]}/{key[1]} is created."
            self._condition(status, "Created", "True", "MPIJobCreated", message)
            self.recorder.event(job, "Normal", "MPIJobCreated", message)
        if not (c.is_finished(status) and "completionTime" in status):
            self._sync(job)
        elif job["spec"]["runPolicy"]["cleanPodPolicy"] != "None":
            self._clean_workers(job)
            status["replicaStatuses"]["Worker"] = {}
        self.write_status(job, status)

    def _sync(self, job: Obj) -> None:
        spec, meta, status = job["spec"], job["metadata"], job["status"]
        suspended = bool(spec["runPolicy"].get("suspend"))
        if not suspended:
            status.setdefault("startTime", c.timestamp(self.clock()))
        launcher = self.mine(job, r.BATCH_JOB, f"{meta['name']}-launcher")
        workers: Objects = []
        if launcher is None or not c.has(launcher.get("status", {}), "Complete", "Failed"):
            if self.mine(job, r.SERVICE, meta["name"]) is None:
                early = {"publishNotReadyAddresses": True} if spec.get("runLauncherAsWorker") else {}
                service = {"clusterIP": "None", "selector": labels(job), **early}
                self.ensure(job, r.SERVICE, meta["name"], spec=service)
            pods = self.store.list(r.POD, meta["namespace"], labels(job, "worker"))
            self.ensure(job, r.CONFIG_MAP, f"{meta['name']}-config", data=config(job, pods))
            if self.mine(job, r.SECRET, f"{meta['name']}-ssh") is None:
                self.ensure(job, r.SECRET, f"{meta['name']}-ssh", type="kubernetes.io/ssh-auth", data=ssh_keys())
            if not suspended:
                workers = self.workers(job, pods, lambda name, i: self.store.create(r.POD, worker(job, name, i)))
            at_once = spec["launcherCreationPolicy"] == "AtStartup"
            if launcher is None and (at_once or all(c.has(w.get("status", {}), "Ready") for w in workers)):
                self._create_launcher(job, suspended)
                launcher = self.mine(job, r.BATCH_JOB, f"{meta['name']}-launcher")
        if launcher is not None and bool(launcher["spec"].get("suspend")) != suspended:
            launcher = self.store.update(r.BATCH_JOB, {**launcher, "spec": {**launcher["spec"], "suspend": suspended}})
        if suspended:
            self._clean_workers(job)
        self._update_status(job, launcher, workers, suspended)

    def _update_status(self, job: Obj, launcher: Obj | None, workers: Objects, suspended: bool) -> None:
        status, name = job["status"], f"{job['metadata']['namespace']}/{job['metadata']['name']}"
        if suspended or c.condition(status, "Suspended"):
            reason, done = ("MPIJobSuspended", "suspended") if suspended else ("MPIJobResumed", "resumed")
            if self._condition(status, "Suspended", str(suspended), reason, f"MPIJob {done}"):
                self.recorder.event(job, "Normal", reason, f"MPIJob {done}")
                if not suspended:
                    status["startTime"] = c.timestamp(self.clock())
        counts = status.setdefault("replicaStatuses", {})
        pods = self.store.owned(r.POD, launcher) if launcher else []
        launchers_running = sum(c.phase(pod) == "Running" for pod in pods)
        if launcher is not None:
            ended = launcher.get("status", {})
            counts["Launcher"] = {"failed": ended["failed"]} if ended.get("failed") else {}
            if c.has(ended, "Complete"):
                counts["Launcher"]["succeeded"] = 1
                message = f"MPIJob {name} successfully completed."
                self.recorder.event(job, "Normal", "MPIJobSucceeded", message)
                status.setdefault("completionTime", ended.get("completionTime"))
                self._condition(status, "Succeeded", "True", "MPIJobSucceeded", message)
            elif failed := c.condition(ended, "Failed"):
                self._launcher_failed(job, failed, pods)
            elif launchers_running:
                counts["Launcher"]["active"] = launchers_running
        counts["Worker"] = c.tally(workers)
        evicted = sum(worker.get("status", {}).get("reason") == "Evicted" for worker in workers)
        if evicted:  # no completionTime: the launcher can still succeed
            message = f"{evicted}/{len(workers)} workers are evicted"
            self._condition(status, "Failed", "True", "MPIJobEvicted", message)
            self.recorder.event(job, "Warning", "MPIJobEvicted", message)
        if suspended:
            self._condition(status, "Running", "False", "MPIJobSuspended", f"MPIJob {name} is suspended.")
        elif launchers_running and counts["Worker"].get("active", 0) == len(workers):
            self._condition(status, "Running", "True", "MPIJobRunning", f"MPIJob {name} is running.")
            self.recorder.event(job, "Normal", "MPIJobRunning", f"MPIJob {name} is running")
        elif c.is_finished(status) and c.condition(status, "Running") is None:
            message = f"MPIJob {name} is finished but Running condition was never set."
            self._condition(status, "Running", "False", "MPIJobRunning", message)

    def _launcher_failed(self, job: Obj, why: Obj, pods: Objects) -> None:
        reason, message = why["reason"], why["message"]
        failed = [pod for pod in pods if c.phase(pod) == "Failed"]
        if reason == "BackoffLimitExceeded" and failed:
            last = max(failed, key=lambda pod: pod["metadata"]["creationTimestamp"])["status"]
            reason += f"/{last.get('reason', '')}"
            message = f"{message}: {last.get('message', '')}"
        self.recorder.event(job, "Warning", reason, message)
        job["status"].setdefault("completionTime", c.timestamp(self.clock()))
        self._condition(job["status"], "Failed", "True", reason, message)

    def _condition(self, status: Obj, type_: str, value: str, reason: str, message: str) -> bool:
        return c.set_condition(status, type_, value, reason, message, self.clock(), ends=("Running", "Failed"))

    def _clean_workers(self, job: Obj) -> None:
        """Delete the Workers. With cleanPodPolicy Running, keep those that have ended."""
        policy = job["spec"]["runPolicy"]["cleanPodPolicy"]
        for name in mpi.worker_names(job):
            pod = self.mine(job, r.POD, name)
            if pod and not c.is_terminating(pod) and (policy != "Running" or c.phase(pod) in ("Running", "Pending")):
                self.store.delete(r.POD, job["metadata"]["namespace"], name)

    def _create_launcher(self, job: Obj, suspended: bool) -> None:
        policy, meta = job["spec"]["runPolicy"], job["metadata"]
        if job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"].get("restartPolicy"):
            self.recorder.event(job, "Warning", "SetPodTemplateRestartPolicy", TEMPLATE_RESTART_POLICY)
        spec = {
            **{field: policy[field] for field in COPIED if policy.get(field) is not None},
            "podReplacementPolicy": "Failed", "template": launcher_template(job),
            **({"suspend": True} if suspended else {}),
        }  # fmt: skip
        self.ensure(job, r.BATCH_JOB, f"{meta['name']}-launcher", spec=spec)


def validate(job: Obj) -> Iterable[str]:
    """The validation errors of a defaulted job, with the messages of mpi-operator."""
    name, policy = job["metadata"]["name"], job["spec"]["runPolicy"]["cleanPodPolicy"]
    specs = {type_: spec for type_, spec in (job["spec"].get("mpiReplicaSpecs") or {}).items() if spec is not None}
    longest = f"{name}-worker-{max(specs.get('Worker', {}).get('replicas', 0) - 1, 0)}"
    if len(longest) > 63:
        yield (
            f'metadata.name: Invalid value: "{name}": will not able to create pod and service with '
            f'invalid DNS label "{longest}": must be no more than 63 characters'
        )
    if policy not in CLEAN_POLICIES:
        yield described(unsupported("spec.runPolicy.cleanPodPolicy", policy, CLEAN_POLICIES))
    if "Launcher" not in specs:
        yield "spec.mpiReplicaSpecs[Launcher]: Required value: must have Launcher replica spec"
    for type_ in (type_ for type_ in ("Launcher", "Worker") if type_ in specs):
        spec, path = specs[type_], f"spec.mpiReplicaSpecs[{type_}]"
        if type_ == "Launcher" and spec["replicas"] != 1:
            yield f"{path}.replicas: Invalid value: {spec['replicas']}: must be 1"
        if type_ == "Worker" and spec["replicas"] < 1:
            yield f"{path}.replicas: Invalid value: {spec['replicas']}: must be greater than or equal to 1"
        if spec["restartPolicy"] not in RESTART_POLICIES:
            yield described(unsupported(f"{path}.restartPolicy", spec["restartPolicy"], RESTART_POLICIES))
        if not ((spec.get("template") or {}).get("spec") or {}).get("containers"):
            yield f"{path}.template.spec.containers: Required value: must define at least one container"


def labels(job: Obj, role: str | None = None) -> dict[str, str]:
    """The labels of a job's objects, or of its pods with a role."""
    ours = {c.OPERATOR_NAME: "mpi-operator", c.JOB_NAME: job["metadata"]["name"]}
    return {**ours, **({c.JOB_ROLE: role} if role else {})}


def config(job: Obj, pods: Objects) -> dict[str, str]:
    """hostfile and discover_hosts.sh. discover_hosts.sh lists the running Workers."""
    spec, meta = job["spec"], job["metadata"]
    domain = f"{meta['name']}.{meta['namespace']}.svc"
    line = "{}.{} slots={}\n" if spec["mpiImplementation"] == "OpenMPI" else "{}.{}:{}\n"
    launcher = [f"{meta['name']}-launcher"] if spec.get("runLauncherAsWorker") else []
    running = sorted(pod["metadata"]["name"] for pod in pods if c.phase(pod) == "Running")
    hosts = [*launcher, *mpi.worker_names(job)]
    return {
        mpi.HOSTFILE: "".join(line.format(host, domain, spec["slotsPerWorker"]) for host in hosts),
        mpi.DISCOVER: "#!/bin/sh\n" + "".join(f"echo {host}.{domain}\n" for host in [*launcher, *running]),
    }


def ssh_keys() -> dict[str, str]:
    """Generate a key pair (ECDSA P-521) as data of a Secret of type kubernetes.io/ssh-auth."""
    key = ec.generate_private_key(ec.SECP521R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    data = {"ssh-privatekey": private, "ssh-publickey": public + b"\n"}
    return {name: base64.b64encode(value).decode() for name, value in data.items()}


def pod_template(job: Obj, type_: str, hostname: str, index: int | None) -> Obj:
    """Metadata and spec of a pod from the template of a replica spec, with the SSH keys mounted."""
    name, path, replica = (
        job["metadata"]["name"],
        job["spec"]["sshAuthMountPath"],
        job["spec"]["mpiReplicaSpecs"][type_],
    )
    own = {**labels(job, type_.lower()), **({c.REPLICA_INDEX: str(index)} if index is not None else {})}
    template = c.pod_template(replica["template"], own)
    spec = template["spec"]
    spec.update(hostname=hostname, subdomain=name, restartPolicy=replica["restartPolicy"])
    c.add_env(spec["containers"][0], {"K_MPI_JOB_ROLE": type_.lower()})
    secret: Obj = {"secretName": f"{name}-ssh", "items": SSH_ITEMS}
    if path == ROOT_SSH:
        secret["defaultMode"] = 0o600
    mpi.mount(spec, {"name": "ssh-auth", "secret": secret}, {"name": "ssh-auth", "mountPath": path})
    return template


def worker(job: Obj, name: str, index: int) -> Obj:
    """The pod of one Worker. With runLauncherAsWorker, index 0 is the launcher's."""
    pod = pod_template(job, "Worker", name, index + bool(job["spec"].get("runLauncherAsWorker")))
    spec, main = pod["spec"], pod["spec"]["containers"][0]
    spec["dnsConfig"] = {**(spec.get("dnsConfig") or {})}
    domain = f"{job['metadata']['name']}.{job['metadata']['namespace']}.svc.cluster.local"
    c.append(spec["dnsConfig"], "searches", domain)
    if not main.get("command") and not main.get("args"):
        main["command"] = ["/usr/sbin/sshd", "-De"]
    return c.child(job, name, pod)


def launcher_template(job: Obj) -> Obj:
    """The pod template of the launcher Job."""
    spec, as_worker = job["spec"], bool(job["spec"].get("runLauncherAsWorker"))
    template = pod_template(job, "Launcher", f"{job['metadata']['name']}-launcher", 0 if as_worker else None)
    templates = IMPLEMENTATIONS[spec["mpiImplementation"]].items()
    variables = {name: value.format(slots=spec["slotsPerWorker"]) for name, value in templates}
    c.add_env(template["spec"]["containers"][0], variables | ({} if as_worker else mpi.NO_GPUS))
    mpi.mount_config(job, template["spec"], mpi.HOSTFILE, mpi.DISCOVER)
    template["metadata"]["ownerReferences"] = [c.owner_reference(job)]
    return template
