"""Functions of the controllers of both MPIJob versions: objects named after the job, and files in /etc/mpi."""

from __future__ import annotations

from collections.abc import Callable

from ktrain_embedded.controllers import common as c
from ktrain_embedded.controllers.runtime import ObjectController, ReconcileError
from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Obj, Objects

CONFIG_DIR = "/etc/mpi"
KUBEXEC, HOSTFILE, DISCOVER = "kubexec.sh", "hostfile", "discover_hosts.sh"
MODES = {KUBEXEC: 0o555, HOSTFILE: 0o444, DISCOVER: 0o555}
CONFIG_MOUNT = {"name": "mpi-job-config", "mountPath": CONFIG_DIR}
# a launcher that doesn't request GPUs must not see the GPUs of its node
NO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}


class MPIJobController(ObjectController):
    """Creates objects that are named after a job and its replicas."""

    def mine(self, job: Obj, resource: Resource, name: str) -> Obj | None:
        """The job's object with this name, or None. ReconcileError if another owner controls it."""
        found = self.store.find(resource, job["metadata"]["namespace"], name)
        if found is not None and not c.is_controlled_by(found, job):
            message = f'Resource "{name}" of Kind "{resource.kind}" already exists and is not managed by MPIJob'
            self.recorder.event(job, "Warning", "ErrResourceExists", message)
            raise ReconcileError(message)
        return found

    def ensure(self, job: Obj, resource: Resource, name: str, **fields: object) -> bool:
        """Create the job's object or update these fields. Returns whether the object already existed."""
        found = self.mine(job, resource, name)
        if found is None:
            meta = {"labels": {"app": job["metadata"]["name"]}}
            self.store.create(resource, c.child(job, name, {"metadata": meta, **fields}))
        else:
            self.store.update(resource, {**found, **fields})
        return found is not None

    def workers(self, job: Obj, known: Objects, create: Callable[[str, int], Obj]) -> Objects:
        """The Worker pods by index. Creates missing pods and deletes pods with an index beyond the replicas."""
        names = worker_names(job)
        for pod in known:
            if pod["metadata"]["name"] not in names and not c.is_terminating(pod):
                self.store.delete(r.POD, pod["metadata"]["namespace"], pod["metadata"]["name"])
        return [self.mine(job, r.POD, name) or create(name, index) for index, name in enumerate(names)]


def worker_names(job: Obj) -> list[str]:
    """The names of a job's Worker pods, by index."""
    replicas = (job["spec"]["mpiReplicaSpecs"].get("Worker") or {}).get("replicas", 0)
    return [f"{job['metadata']['name']}-worker-{index}" for index in range(replicas)]


def mount(spec: Obj, volume: Obj, path: Obj) -> None:
    """Add a volume to a pod spec and mount it in the first container."""
    c.append(spec, "volumes", volume)
    c.append(spec["containers"][0], "volumeMounts", path)


def mount_config(job: Obj, spec: Obj, *files: str) -> None:
    """Mount these files of the job's ConfigMap."""
    items = [{"key": file, "path": file, "mode": MODES[file]} for file in files]
    config_map = {"name": f"{job['metadata']['name']}-config", "items": items}
    mount(spec, {"name": CONFIG_MOUNT["name"], "configMap": config_map}, CONFIG_MOUNT)
