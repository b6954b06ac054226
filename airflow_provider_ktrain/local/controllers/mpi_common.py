"""What the controllers of both MPIJob versions make alike: objects named after the job, and the files in /etc/mpi."""

from __future__ import annotations

from collections.abc import Callable

from airflow_provider_ktrain.local.controllers import common as c
from airflow_provider_ktrain.local.controllers.runtime import ObjectController, ReconcileError
from airflow_provider_ktrain.local.objects import resources as r
from airflow_provider_ktrain.local.objects.resources import Resource
from airflow_provider_ktrain.local.objects.store import Obj, Objects

CONFIG_DIR = "/etc/mpi"
KUBEXEC, HOSTFILE, DISCOVER = "kubexec.sh", "hostfile", "discover_hosts.sh"
MODES = {KUBEXEC: 0o555, HOSTFILE: 0o444, DISCOVER: 0o555}
CONFIG_MOUNT = {"name": "mpi-job-config", "mountPath": CONFIG_DIR}
# a launcher that asked for no GPU shall not see those of its node
NO_GPUS = {"NVIDIA_VISIBLE_DEVICES": "", "NVIDIA_DRIVER_CAPABILITIES": ""}


class MPIJobController(ObjectController):
    """Makes objects under the names of a job and of its replicas."""

    def mine(self, job: Obj, resource: Resource, name: str) -> Obj | None:
        """The job's object of that name, if any. ReconcileError where it is somebody else's."""
        found = self.store.find(resource, job["metadata"]["namespace"], name)
        if found is not None and not c.is_controlled_by(found, job):
            message = f'Resource "{name}" of Kind "{resource.kind}" already exists and is not managed by MPIJob'
            self.recorder.event(job, "Warning", "ErrResourceExists", message)
            raise ReconcileError(message)
        return found

    def ensure(self, job: Obj, resource: Resource, name: str, **fields: object) -> bool:
        """Create the job's object, or give it these fields; whether it was there."""
        found = self.mine(job, resource, name)
        if found is None:
            meta = {"labels": {"app": job["metadata"]["name"]}}
            self.store.create(resource, c.child(job, name, {"metadata": meta, **fields}))
        else:
            self.store.update(resource, {**found, **fields})
        return found is not None

    def workers(self, job: Obj, known: Objects, create: Callable[[str, int], Obj]) -> Objects:
        """The worker pods by index: those that miss are created, those beyond the replicas deleted."""
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
    """Add a volume to the pod and mount it in the first container."""
    c.append(spec, "volumes", volume)
    c.append(spec["containers"][0], "volumeMounts", path)


def mount_config(job: Obj, spec: Obj, *files: str) -> None:
    """Mount those files of the job's ConfigMap."""
    items = [{"key": file, "path": file, "mode": MODES[file]} for file in files]
    config_map = {"name": f"{job['metadata']['name']}-config", "items": items}
    mount(spec, {"name": CONFIG_MOUNT["name"], "configMap": config_map}, CONFIG_MOUNT)
