"""The training runtimes of the cluster. They correspond to runtimes of the Kubeflow Trainer 2.3."""

from __future__ import annotations

from ktrain_embedded.objects import resources as r
from ktrain_embedded.objects.store import Obj, Store
from ktrain_embedded.objects.trainingruntimes import ANCESTOR

#: The image of both runtimes. It is always mapped to an empty directory: programs run in the cluster's Python.
IMAGE = "docker.io/library/ktrain-runtime:local"
FRAMEWORK = "trainer.kubeflow.org/framework"
TRAINER = {"metadata": {"labels": {ANCESTOR: "trainer"}}}


def install(store: Store) -> None:
    """Create the ClusterTrainingRuntimes torch-distributed and mpi-distributed."""
    for runtime in (torch_distributed(), mpi_distributed()):
        store.create(r.CLUSTER_TRAINING_RUNTIME, runtime)


def torch_distributed() -> Obj:
    """The Trainer's torch-distributed with an empty image. Programs run in the cluster's Python."""
    node = _replicated("node", trainer=True)
    return _runtime("torch", {"torch": {}}, {"replicatedJobs": [node]})


def mpi_distributed() -> Obj:
    """The Trainer's deepspeed-distributed with another image. The launcher is also a node and waits for the others."""
    policy = {
        "numProcPerNode": 1, "mpiImplementation": "OpenMPI", "sshAuthMountPath": "/root/.ssh",
        "runLauncherAsNode": True,
    }  # fmt: skip
    probe = {"tcpSocket": {"port": 2222}, "initialDelaySeconds": 2}
    node = _replicated("node", command=["/usr/sbin/sshd"], args=["-De"], readinessProbe=probe)
    launcher = {**_replicated("launcher", trainer=True), "dependsOn": [{"name": "node", "status": "Ready"}]}
    spec = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "replicatedJobs": [node, launcher],
    }
    return _runtime("mpi", {"mpi": policy}, spec)


def _runtime(framework: str, policy: Obj, spec: Obj) -> Obj:
    return {
        "metadata": {"name": f"{framework}-distributed", "labels": {FRAMEWORK: framework}},
        "spec": {"mlPolicy": {"numNodes": 1, **policy}, "template": {"spec": spec}},
    }


def _replicated(name: str, *, trainer: bool = False, **container: object) -> Obj:
    pod = {"spec": {"containers": [{"name": "node", "image": IMAGE, **container}]}}
    template = {**(TRAINER if trainer else {}), "spec": {"template": pod}}
    return {"name": name, "groupName": "default", "replicas": 1, "template": template}
