"""The GPUs and other extended resources that a job's pods request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.loader import load


def gpus_of(source: object) -> int:
    """The GPUs that all replicas of a job request together: the task's `pool_slots` in a pool that counts GPUs.

    Of a TrainJob, these are the nodes and GPUs that its manifest sets; its runtime is not known.

    :param source: a manifest: a mapping, YAML text, or the path of a YAML or JSON file.
    :raises ManifestError: if it isn't the manifest of a training job.
    """
    return gpus_of_job(load(source))


def gpus_of_job(job: Mapping[str, Any]) -> int:
    """The GPUs that all replicas of a job request together, without those that only its runtime requests.

    :param job: a manifest, or a job as read from the API server.
    """
    kind = kind_of(job.get("kind"))
    return sum(kind.count(job, role) * pod_gpus(pod_of(spec)) for role, spec in kind.replicas(job).items())


@lru_cache(maxsize=256)
def is_gpu(resource: str) -> bool:
    """Whether an extended resource is a GPU or a part of one: nvidia.com/gpu, amd.com/gpu, nvidia.com/mig-1g.5gb."""
    return bool(re.fullmatch(r"[a-z0-9.-]+\.com/(gpu(\.shared)?|mig-.+)", resource))


def pod_gpus(pod_spec: Mapping[str, Any]) -> int:
    """The GPUs that one pod requests."""
    return pod_amount(pod_spec, is_gpu)


def pod_amount(pod_spec: Mapping[str, Any], counts: Callable[[str], bool]) -> int:
    """How much one pod requests of the extended resources that `counts` selects by name.

    That is the sum of its containers, or the largest amount of an init container if that is more.
    """

    def requested(container: Mapping[str, Any]) -> int:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        return sum(_whole(amount) for name, amount in amounts.items() if counts(name))

    together = sum(requested(c) for c in pod_spec.get("containers") or () if isinstance(c, Mapping))
    return max([together, *(requested(c) for c in pod_spec.get("initContainers") or () if isinstance(c, Mapping))])


def _whole(amount: Any) -> int:
    return int(amount) if str(amount).isdigit() else 0


def pod_of(replica_spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The spec of the pods of a replica spec; empty if there is none."""
    pod = (replica_spec.get("template") or {}).get("spec")
    return pod if isinstance(pod, Mapping) else {}
