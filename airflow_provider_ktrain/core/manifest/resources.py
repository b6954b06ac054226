"""The accelerators that a job requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.accelerators import Amounts
from airflow_provider_ktrain.core.state.pods.devices import requested_by_all, resource_names


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
