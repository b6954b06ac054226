"""The accelerators that a job requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.loader import load
from airflow_provider_ktrain.core.state.accelerators import Amounts, stored
from airflow_provider_ktrain.core.state.pods.devices import requested_by_all, resource_names


def gpus_of(source: object) -> int:
    """The GPUs that all replicas of a job request together: the task's `pool_slots` in a pool that counts GPUs.

    Of a job without GPUs, these are its other accelerators, such as TPUs; of several kinds, the first one in the table
    of `core.state.accelerators`. Of a TrainJob, these are the nodes and GPUs that its manifest sets; its runtime is not
    known.

    :param source: a manifest: a mapping, YAML text, or the path of a YAML or JSON file.
    :raises ManifestError: if it isn't the manifest of a training job.
    """
    return int(stored(accelerators_of_job(load(source)))["gpus"])


def accelerators_of_job(job: Mapping[str, Any]) -> Amounts:
    """The accelerators that all replicas of a job request together, without those that only its runtime requests."""
    kind = kind_of(job.get("kind"))
    return requested_by_all((kind.count(job, role), pod_of(spec)) for role, spec in kind.replicas(job).items())


def resources_of_job(job: Mapping[str, Any]) -> set[str]:
    """The resources that the replicas of a job request, such as `cpu` and `amd.com/gpu`."""
    replicas = kind_of(job.get("kind")).replicas(job)
    return {name for spec in replicas.values() for name in resource_names(pod_of(spec))}


def pod_of(replica_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec of the pods of a replica spec; empty if there is none."""
    pod = (replica_spec.get("template") or {}).get("spec")
    return pod if isinstance(pod, Mapping) else {}
