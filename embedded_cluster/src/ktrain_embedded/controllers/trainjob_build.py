"""Builds the JobSet of a TrainJob from a runtime, and a hostfile for MPI, like the Trainer 2.3. Pure functions."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ktrain_embedded import trainer_status
from ktrain_embedded.controllers import common as c
from ktrain_embedded.objects import patch, quantity
from ktrain_embedded.objects.store import Obj, Objects
from ktrain_embedded.objects.trainingruntimes import step_of

NODE, LAUNCHER = "node", "launcher"  # names of replicated jobs and of the trainer's container
MERGE_KEYS = {**patch.MERGE_KEYS, "replicatedJobs": "name", "ports": "containerPort"}
PORT = 29500  # port of torchrun's rendezvous
RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SSH_VOLUME, HOSTFILE_VOLUME, HOSTFILE, HOSTFILE_DIR = "mpi-ssh-auth", "mpi-hostfile", "hostfile", "/etc/mpi"
SSH_ITEMS = [
    {"key": "ssh-privatekey", "path": "id_rsa", "mode": 0o640},
    {"key": "ssh-publickey", "path": "id_rsa.pub", "mode": 0o644},
    {"key": "ssh-publickey", "path": "authorized_keys", "mode": 0o644},
]
STATUS_VOLUME, STATUS_DIR = "kubeflow-trainer-token", "/var/run/secrets/kubeflow/trainer"
INITIALIZERS = {"dataset-initializer": "dataset", "model-initializer": "model"}


@dataclass(frozen=True)
class Built:
    """A JobSet's metadata and spec, and the content of the hostfile (None if the runtime isn't for MPI)."""

    jobset: Obj
    hostfile: str | None = None


def build(job: Obj, runtime: Obj, *, reports_status: bool = False) -> Built:
    """Build the JobSet of a TrainJob from its runtime.

    :param reports_status: whether the feature gate TrainJobStatus is on.
    """
    template = copy.deepcopy(runtime["spec"]["template"])
    for entry in job["spec"].get("runtimePatches") or ():
        changes = (entry.get("trainingRuntimeSpec") or {}).get("template")
        template = patch.strategic(template, copy.deepcopy(changes), MERGE_KEYS) if changes else template
    policy = runtime["spec"].get("mlPolicy") or {}
    spec = template.setdefault("spec", {})
    replicated: Objects = spec.setdefault("replicatedJobs", [])
    for one in replicated:
        count = _count(one, job, policy)
        one["replicas"] = 1
        one["template"].setdefault("spec", {}).update(parallelism=count, completions=count)
    hostfile = None
    if "torch" in policy:
        _apply_torch(job, replicated, policy["torch"] or {})
    elif "mpi" in policy:
        hostfile = _apply_mpi(job, replicated, policy["mpi"], str((spec.get("network") or {}).get("subdomain") or ""))
    for one in replicated:
        _apply_initializer(job, one)
        _apply_trainer(job, one, as_node=bool((policy.get("mpi") or {}).get("runLauncherAsNode")))
        if reports_status and step_of(one) == "trainer":
            _apply_status(job, one)
    spec["suspend"] = bool(job["spec"].get("suspend"))
    return Built(
        c.child(job, job["metadata"]["name"], {"metadata": template.get("metadata") or {}, "spec": spec}), hostfile
    )


def _count(replicated: Obj, job: Obj, policy: Obj) -> int:
    """The number of pods of a replicated job: its parallelism, or the policy's number for the job of the trainer."""
    wanted = (job["spec"].get("trainer") or {}).get("numNodes")
    count = int((replicated["template"].get("spec") or {}).get("parallelism", 1))
    if policy and step_of(replicated) == "trainer":
        count = int(policy.get("numNodes", 1))
    if wanted is None:
        return count
    if "mpi" in policy:
        as_node = bool(policy["mpi"].get("runLauncherAsNode"))
        return (max(wanted - 1, 1) if as_node else int(wanted)) if replicated["name"] == NODE else count
    return int(wanted) if step_of(replicated) == "trainer" else count


def _containers(replicated: Obj, *names: str) -> Iterator[Obj]:
    pod = (replicated["template"]["spec"].get("template") or {}).get("spec") or {}
    yield from (container for container in pod.get("containers") or () if container["name"] in names)


def _upsert(container: Obj, field: str, key: str, *entries: Obj) -> None:
    """Add entries to a list of the container. An existing entry with the same `key` is replaced in its position."""
    known: Objects = container.setdefault(field, [])
    for entry in entries:
        at = next((i for i, old in enumerate(known) if old.get(key) == entry.get(key)), len(known))
        known[at : at + 1] = [entry]


def _apply_torch(job: Obj, replicated: Objects, policy: Obj) -> None:
    """Set torchrun's PET_* variables, but only if the TrainJob has a trainer (recording 50b)."""
    trainer = job["spec"].get("trainer")
    if trainer is None:
        return
    name = job["metadata"]["name"]
    for one in (one for one in replicated if step_of(one) == "trainer"):
        for container in _containers(one, NODE):
            processes = trainer.get("numProcPerNode", policy.get("numProcPerNode"))
            if processes is None:
                resources = trainer.get("resourcesPerNode") or container.get("resources") or {}
                processes = _processes(resources)
            _upsert(container, "env", "name", *copy.deepcopy(trainer.get("env") or []))
            _upsert(
                container, "env", "name",
                {"name": "PET_NNODES", "value": str(one["template"]["spec"]["completions"])},
                {"name": "PET_NPROC_PER_NODE", "value": str(processes)},
                {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK_FIELD}}},
                {"name": "PET_MASTER_ADDR", "value": f"{name}-{NODE}-0-0.{name}"},
                {"name": "PET_MASTER_PORT", "value": str(PORT)},
            )  # fmt: skip
            _upsert(container, "ports", "containerPort", {"containerPort": PORT, "protocol": "TCP"})


def _processes(resources: Obj) -> str | int:
    """The number of processes per node. With GPUs, "auto": torchrun counts them. Otherwise, the number of CPUs."""
    amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    if any("gpu" in name.lower() for name in amounts):
        return "auto"
    return max(math.ceil(quantity.parse(amounts.get("cpu", 1))), 1)


def _apply_mpi(job: Obj, replicated: Objects, policy: Obj, subdomain: str) -> str:
    """Mount SSH keys and the hostfile, and set Open MPI's variables. Returns the content of the hostfile."""
    trainer, name = job["spec"].get("trainer") or {}, job["metadata"]["name"]
    slots = trainer.get("numProcPerNode") or max(policy.get("numProcPerNode", 1), _gpus(trainer, replicated))
    hosts = []
    for one in (one for one in replicated if one["name"] in (NODE, LAUNCHER)):
        launcher = one["name"] == LAUNCHER
        volumes = [
            {
                "name": SSH_VOLUME,
                "secret": {"secretName": f"{name}-{SSH_VOLUME}", "defaultMode": 0o400, "items": SSH_ITEMS},
            }
        ]
        mounts = [{"name": SSH_VOLUME, "mountPath": policy.get("sshAuthMountPath", "/root/.ssh")}]
        if launcher:
            items = [{"key": HOSTFILE, "path": HOSTFILE, "mode": 0o444}]
            volumes.append(
                {"name": HOSTFILE_VOLUME, "configMap": {"name": f"{name}-{HOSTFILE_VOLUME}", "items": items}}
            )
            mounts.append({"name": HOSTFILE_VOLUME, "mountPath": HOSTFILE_DIR})
        _upsert(one["template"]["spec"]["template"]["spec"], "volumes", "name", *copy.deepcopy(volumes))
        for container in _containers(one, NODE):
            _upsert(container, "volumeMounts", "mountPath", *mounts)
            if launcher:
                _upsert(container, "env", "name", *({"name": k, "value": v} for k, v in _open_mpi(slots).items()))
        if not launcher or policy.get("runLauncherAsNode"):
            count = one["template"]["spec"]["completions"]
            hosts += [f"{name}-{one['name']}-0-{i}.{subdomain or name} slots={slots}\n" for i in range(count)]
    return "".join(hosts)


def _gpus(trainer: Obj, replicated: Objects) -> int:
    own = trainer.get("resourcesPerNode")
    of_runtime = [container.get("resources") or {} for one in replicated for container in _containers(one, NODE)]
    found = [0]
    for resources in [own] if own else of_runtime:
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        found += [int(quantity.parse(amount)) for what, amount in amounts.items() if "gpu" in what.lower()]
    return max(found)


def _open_mpi(slots: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_default_hostfile": f"{HOSTFILE_DIR}/{HOSTFILE}", "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": str(slots), "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }  # fmt: skip


def _apply_initializer(job: Obj, replicated: Obj) -> None:
    step = step_of(replicated)
    source: Obj | None = (job["spec"].get("initializer") or {}).get(INITIALIZERS.get(step, ""))
    if source is None:
        return
    for container in _containers(replicated, step):
        if source.get("storageUri") is not None:
            _upsert(container, "env", "name", {"name": "STORAGE_URI", "value": source["storageUri"]})
        _upsert(container, "env", "name", *copy.deepcopy(source.get("env") or []))
        if source.get("secretRef"):
            c.append(container, "envFrom", {"secretRef": {"name": source["secretRef"]["name"]}})


def _apply_trainer(job: Obj, replicated: Obj, *, as_node: bool) -> None:
    """Set the trainer's image, command, args, resources and environment in a replicated job that has labels."""
    trainer: dict[str, Any] = job["spec"].get("trainer") or {}
    if not (replicated["template"].get("metadata") or {}).get("labels"):
        return
    for container in _containers(replicated, NODE, *([LAUNCHER] if as_node else [])):
        for field in ("image", "command", "args"):
            if trainer.get(field) is not None:
                container[field] = copy.deepcopy(trainer[field])
        if any((trainer.get("resourcesPerNode") or {}).get(kind) for kind in ("limits", "requests")):
            container["resources"] = copy.deepcopy(trainer["resourcesPerNode"])
        if trainer.get("env"):
            _upsert(container, "env", "name", *copy.deepcopy(trainer["env"]))


def tls_config(job: Obj) -> str:
    """The name of the ConfigMap that holds the status server's CA."""
    return f"{job['metadata']['name']}-tls-config"


def _apply_status(job: Obj, replicated: Obj) -> None:
    """Pass URL, CA and token of the status server to the trainer, so that it can post its progress (recording 61)."""
    place = (job["metadata"]["namespace"], job["metadata"]["name"])
    ca = {"name": tls_config(job), "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    token = {"audience": trainer_status.audience(*place), "expirationSeconds": 3600, "path": "token"}
    volume = {"name": STATUS_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}, {"configMap": ca}]}}
    for container in _containers(replicated, NODE):
        _upsert(
            container, "env", "name",
            {"name": "KUBEFLOW_TRAINER_SERVER_URL", "value": trainer_status.url(*place)},
            {"name": "KUBEFLOW_TRAINER_SERVER_CA_CERT", "value": f"{STATUS_DIR}/ca.crt"},
            {"name": "KUBEFLOW_TRAINER_SERVER_TOKEN", "value": f"{STATUS_DIR}/token"},
        )  # fmt: skip
        mount = {"name": STATUS_VOLUME, "mountPath": STATUS_DIR, "readOnly": True}
        _upsert(container, "volumeMounts", "name", mount)
    _upsert(replicated["template"]["spec"]["template"]["spec"], "volumes", "name", volume)
