"""MPIJob kubeflow.org/v2beta1 as mpi-operator 0.8.2 runs it: a launcher Job that reaches its workers by SSH."""

from __future__ import annotations

import base64
import copy
import time
from collections.abc import Iterable

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from airflow_provider_ktrain.local import resources as r
from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers.mpi_common import (
    CONFIG_DIR,
    CONFIG_MOUNT,
    DISCOVER,
    HOSTFILE,
    NO_GPUS,
    JobObjects,
    config_volume,
    mount,
    worker_names,
)
from airflow_provider_ktrain.local.controllers.owners import child, controller_of, is_controlled_by, owner_reference
from airflow_provider_ktrain.local.controllers.runtime import Clock, Controller, Key, controlled_by, itself
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.store import Change, Obj, Objects, Store

LABELS = {c.OPERATOR_NAME: "mpi-operator"}
CLEAN_POLICIES, RESTART_POLICIES = ("All", "None", "Running"), ("Never", "OnFailure")
ROOT_SSH = "/root/.ssh"
SSH_ITEMS = [
    {"key": "ssh-privatekey", "path": "id_rsa"},
    {"key": "ssh-publickey", "path": "id_rsa.pub"},
    {"key": "ssh-publickey", "path": "authorized_keys"},
]
SSH_ARGUMENTS = "-o ConnectionAttempts=10"
HOSTFILE_PATH = f"{CONFIG_DIR}/{HOSTFILE}"
IMPLEMENTATIONS = {  # launcher environment by mpiImplementation, and the variable that takes slotsPerWorker
    "OpenMPI": (
        {
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_default_hostfile": HOSTFILE_PATH,
            "OMPI_MCA_plm_rsh_args": SSH_ARGUMENTS,
        },
        "OMPI_MCA_orte_set_default_slots",
    ),
    "Intel": (
        {"I_MPI_HYDRA_HOST_FILE": HOSTFILE_PATH, "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": SSH_ARGUMENTS},
        "I_MPI_PERHOST",
    ),
    "MPICH": ({"HYDRA_HOST_FILE": HOSTFILE_PATH, "HYDRA_LAUNCH_EXTRA_ARGS": SSH_ARGUMENTS}, None),
}
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
        if (stored["spec"].get("runPolicy") or {}).get("managedBy", "kubeflow.org/mpi-operator") != (
            "kubeflow.org/mpi-operator"
        ):
            return
        job = defaulted(copy.deepcopy(stored))
        problems = validate(job)
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
                self._objects.ensure(job, r.SERVICE, meta["name"], spec=service_spec(job))
            pods = self._store.list(r.POD, meta["namespace"], labels(job, "worker"))
            self._objects.ensure(job, r.CONFIG_MAP, f"{meta['name']}-config", data=config(job, pods))
            if self._objects.mine(job, r.SECRET, f"{meta['name']}-ssh") is None:
                self._objects.ensure(
                    job, r.SECRET, f"{meta['name']}-ssh", type="kubernetes.io/ssh-auth", data=ssh_keys()
                )
            if not suspended:
                workers = self._objects.workers(
                    job, pods, lambda name, index: self._store.create(r.POD, worker(job, name, index))
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
            "podReplacementPolicy": "Failed", "template": launcher_template(job),
            **({"suspend": True} if suspended else {}),
        }  # fmt: skip
        name = f"{job['metadata']['name']}-launcher"
        try:
            return self._store.create(r.BATCH_JOB, child(job, name, {"app": job["metadata"]["name"]}, spec=wanted))
        except ApiError as error:
            self._recorder.event(job, "Warning", "MPIJobFailed", f"launcher pod created failed: {error}")
            raise


def defaulted(job: Obj) -> Obj:
    """The job with the operator's defaults, which never reach the API object."""
    spec = job["spec"]
    policy = spec["runPolicy"] = spec.get("runPolicy") or {}
    policy["cleanPodPolicy"] = policy.get("cleanPodPolicy") or "None"
    for field, value in (
        ("slotsPerWorker", 1), ("sshAuthMountPath", ROOT_SSH), ("mpiImplementation", "OpenMPI"),
        ("launcherCreationPolicy", "AtStartup"),
    ):  # fmt: skip
        spec[field] = spec.get(field) or value
    for type_, replicas, restarts in (("Launcher", 1, "OnFailure"), ("Worker", 0, "Never")):
        replica = (spec.get("mpiReplicaSpecs") or {}).get(type_)
        if replica:
            replica["replicas"] = replicas if replica.get("replicas") is None else replica["replicas"]
            replica["restartPolicy"] = replica.get("restartPolicy") or restarts
    return job


def validate(job: Obj) -> list[str]:
    """What is wrong with a defaulted job, as mpi-operator's validation words it."""
    problems = []
    specs, policy = job["spec"].get("mpiReplicaSpecs") or {}, job["spec"]["runPolicy"]
    longest = f"{job['metadata']['name']}-worker-{max((specs.get('Worker') or {}).get('replicas', 0) - 1, 0)}"
    if len(longest) > 63:
        problems.append(
            f'metadata.name: Invalid value: "{job["metadata"]["name"]}": will not able to create pod and service with '
            f'invalid DNS label "{longest}": must be no more than 63 characters'
        )
    if policy["cleanPodPolicy"] not in CLEAN_POLICIES:
        problems.append(_unsupported("spec.runPolicy.cleanPodPolicy", policy["cleanPodPolicy"], CLEAN_POLICIES))
    for type_ in ("Launcher", "Worker"):
        spec, path = specs.get(type_), f"spec.mpiReplicaSpecs[{type_}]"
        if spec is None:
            if type_ == "Launcher":
                problems.append(f"{path}: Required value: must have Launcher replica spec")
            continue
        if type_ == "Launcher" and spec["replicas"] != 1:
            problems.append(f"{path}.replicas: Invalid value: {spec['replicas']}: must be 1")
        if type_ == "Worker" and spec["replicas"] < 1:
            problems.append(f"{path}.replicas: Invalid value: {spec['replicas']}: must be greater than or equal to 1")
        if spec["restartPolicy"] not in RESTART_POLICIES:
            problems.append(_unsupported(f"{path}.restartPolicy", spec["restartPolicy"], RESTART_POLICIES))
        if not ((spec.get("template") or {}).get("spec") or {}).get("containers"):
            problems.append(f"{path}.template.spec.containers: Required value: must define at least one container")
    return problems


def labels(job: Obj, role: str | None = None) -> dict[str, str]:
    return {**LABELS, c.JOB_NAME: job["metadata"]["name"], **({c.JOB_ROLE: role} if role else {})}


def service_spec(job: Obj) -> Obj:
    """The headless service that gives launcher and workers their host names."""
    early = {"publishNotReadyAddresses": True} if job["spec"].get("runLauncherAsWorker") else {}
    return {"clusterIP": "None", "selector": labels(job), **early}


def config(job: Obj, pods: Objects) -> dict[str, str]:
    """hostfile and discover_hosts.sh; the latter names the workers that run now."""
    spec, meta = job["spec"], job["metadata"]
    domain = f"{meta['name']}.{meta['namespace']}.svc"
    line = "{}.{} slots={}\n" if spec["mpiImplementation"] == "OpenMPI" else "{}.{}:{}\n"
    launcher = [f"{meta['name']}-launcher"] if spec.get("runLauncherAsWorker") else []
    running = sorted(pod["metadata"]["name"] for pod in pods if c.phase(pod) == "Running")
    hosts = [*launcher, *worker_names(job)]
    return {
        HOSTFILE: "".join(line.format(host, domain, spec["slotsPerWorker"]) for host in hosts),
        DISCOVER: "#!/bin/sh\n" + "".join(f"echo {host}.{domain}\n" for host in [*launcher, *running]),
    }


def ssh_keys() -> dict[str, str]:
    """A new key pair (ECDSA P-521) as data of a Secret of type kubernetes.io/ssh-auth."""
    key = ec.generate_private_key(ec.SECP521R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    data = {"ssh-privatekey": private, "ssh-publickey": public + b"\n"}
    return {name: base64.b64encode(value).decode() for name, value in data.items()}


def pod_template(job: Obj, type_: str, hostname: str, labels_: dict[str, str]) -> Obj:
    """Metadata and spec after the template of a replica spec, with the SSH keys mounted."""
    replica = job["spec"]["mpiReplicaSpecs"][type_]
    template = copy.deepcopy(replica["template"])
    meta, spec = template.get("metadata") or {}, template["spec"]
    spec.update(hostname=hostname, subdomain=job["metadata"]["name"], restartPolicy=replica["restartPolicy"])
    if spec.get("hostNetwork"):
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    c.add_env(spec["containers"][0], [("K_MPI_JOB_ROLE", type_.lower())])
    path = job["spec"]["sshAuthMountPath"]
    secret: Obj = {"secretName": f"{job['metadata']['name']}-ssh", "items": SSH_ITEMS}
    if path == ROOT_SSH:
        secret["defaultMode"] = 0o600
    mount(spec, {"name": "ssh-auth", "secret": secret}, {"name": "ssh-auth", "mountPath": path})
    return {
        "metadata": {
            "labels": {**(meta.get("labels") or {}), **labels_},
            **({"annotations": meta["annotations"]} if meta.get("annotations") else {}),
        },
        "spec": spec,
    }


def worker(job: Obj, name: str, index: int) -> Obj:
    """The pod of one worker; where the launcher works too, it has index 0."""
    meta = job["metadata"]
    own = {**labels(job, "worker"), c.REPLICA_INDEX: str(index + bool(job["spec"].get("runLauncherAsWorker")))}
    template = pod_template(job, "Worker", name, own)
    spec = template["spec"]
    search = f"{meta['name']}.{meta['namespace']}.svc.cluster.local"
    dns = spec.get("dnsConfig") or {}
    spec["dnsConfig"] = {**dns, "searches": [*(dns.get("searches") or ()), search]}
    main = spec["containers"][0]
    if not main.get("command") and not main.get("args"):
        main["command"] = ["/usr/sbin/sshd", "-De"]
    pod = child(job, name, template["metadata"].pop("labels"), spec=spec)
    pod["metadata"].update(template["metadata"])
    return pod


def launcher_template(job: Obj) -> Obj:
    """The pod template of the launcher Job."""
    spec, as_worker = job["spec"], bool(job["spec"].get("runLauncherAsWorker"))
    own = {**labels(job, "launcher"), **({c.REPLICA_INDEX: "0"} if as_worker else {})}
    template = pod_template(job, "Launcher", f"{job['metadata']['name']}-launcher", own)
    variables, slots = IMPLEMENTATIONS[spec["mpiImplementation"]]
    c.add_env(template["spec"]["containers"][0], [
        *variables.items(),
        *([(slots, spec["slotsPerWorker"])] if slots else []),
        *([] if as_worker else NO_GPUS),
    ])  # fmt: skip
    mount(template["spec"], config_volume(job, HOSTFILE, DISCOVER), CONFIG_MOUNT)
    template["metadata"]["ownerReferences"] = [owner_reference(job)]
    return template


def _unsupported(path: str, value: str, supported: Iterable[str]) -> str:
    known = ", ".join(f'"{x}"' for x in supported)
    return f'{path}: Unsupported value: "{value}": supported values: {known}'


def _short(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
