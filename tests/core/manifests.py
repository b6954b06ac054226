"""Manifests for tests: the documents of the seeds, and small ones of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
GUIDES = sorted(p.name for p in DATA.glob("*.yaml"))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def container(name: str = "pytorch", **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "registry/train:1", "command": ["python", "train.py"], **more}


def replica(count: int = 1, name: str = "pytorch", **more: Any) -> dict[str, Any]:
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container(name, **more)]}},
    }


def pytorchjob(workers: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train"},
        "spec": {"pytorchReplicaSpecs": {"Master": replica(**more), "Worker": replica(workers, **more)}},
    }


def mpijob(version: str = "v2beta1", workers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": f"kubeflow.org/{version}",
        "kind": "MPIJob",
        "metadata": {"name": "horovod"},
        "spec": {
            "slotsPerWorker": 1,
            "mpiReplicaSpecs": {"Launcher": replica(name="mpi"), "Worker": replica(workers, "mpi", **more)},
        },
    }


def trainjob(nodes: int = 2, **trainer: Any) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "train"},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {"image": "registry/train:1", "command": ["torchrun", "train.py"], "numNodes": nodes, **trainer},
        },
    }


def runtime_patch(manager: str, job: str, **pod: Any) -> dict[str, Any]:
    """An entry of a TrainJob's runtimePatches that changes the pods of one replicated job."""
    jobs = [{"name": job, "template": {"spec": {"template": {"spec": pod}}}}]
    return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
