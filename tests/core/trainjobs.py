"""TrainJobs and their pods, as in recordings 50 to 61."""

from __future__ import annotations

from typing import Any

CREATED = "2026-11-22T10:00:00Z"


def trainjob(nodes: int | None = 2, *conditions: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    """A TrainJob.

    :param nodes: numNodes. None: the runtime's default.
    :param conditions: type, status and reason of each.
    :param status: further fields of the status.
    """
    found = [
        {"type": type_, "status": state, "reason": reason, "message": reason} for type_, state, reason in conditions
    ]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "train", "namespace": "ns", "uid": "j", "creationTimestamp": CREATED},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {"image": "registry/train:1"} | ({} if nodes is None else {"numNodes": nodes}),
        },
        "status": {**({"conditions": found} if found else {}), **status},
    }


def jobs_status(**roles: dict[str, int]) -> list[dict[str, Any]]:
    """`status.jobsStatus`; the keyword `dataset_initializer` is the job dataset-initializer."""
    zero = dict.fromkeys(("active", "failed", "ready", "succeeded", "suspended"), 0)
    return [{"name": role.replace("_", "-"), **zero, **counts} for role, counts in roles.items()]


def pod(role: str = "node", index: int = 0, phase: str = "Running", *, attempt: int = 0, **more: Any) -> dict[str, Any]:
    """A pod of the TrainJob."""
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "train",
        "jobset.sigs.k8s.io/jobset-uid": "js",
        "jobset.sigs.k8s.io/replicatedjob-name": role,
        "jobset.sigs.k8s.io/job-index": "0",
        "jobset.sigs.k8s.io/restart-attempt": str(attempt),
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    name = f"train-{role}-0-{index}-{attempt}abcd"
    meta = {"name": name, "uid": name, "labels": labels, "creationTimestamp": CREATED}
    node = {} if phase == "Pending" else {"nodeName": "n"}
    return {"metadata": meta, "spec": {"containers": [{"name": "node"}], **node}, "status": {"phase": phase, **more}}
