"""What an MPIJob v2beta1 means: its defaults, what is wrong with it, and the objects that it is made into."""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from airflow_provider_ktrain.local.controllers import job_common as c
from airflow_provider_ktrain.local.controllers.mpi_common import (
    CONFIG_DIR,
    CONFIG_MOUNT,
    DISCOVER,
    HOSTFILE,
    NO_GPUS,
    config_volume,
    mount,
    worker_names,
)
from airflow_provider_ktrain.local.controllers.owners import child, owner_reference
from airflow_provider_ktrain.local.store import Obj, Objects

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


def pod_template(job: Obj, type_: str, hostname: str, own: dict[str, str]) -> Obj:
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
            "labels": {**(meta.get("labels") or {}), **own},
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
