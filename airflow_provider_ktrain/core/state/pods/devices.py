"""What pods and jobs request of accelerators, without the devices of ResourceClaims (dynamic resource allocation)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.accelerators import CLAIMS, DEVICE_CLASS, Amounts, accelerator_of, is_gpu, times
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.state.quantity import parse_quantity


def requested_by(spec: Mapping[str, Any]) -> Amounts:
    """The accelerators that one pod requests, by its spec or a template's. CLAIMS is 1 if it has ResourceClaims."""
    served = (name.startswith(DEVICE_CLASS) and accelerator_of(name) is None for name in resource_names(spec))
    return _of_containers(spec) + Amounts({CLAIMS: int(bool(spec.get("resourceClaims")) or any(served))})


def requested_by_all(pods: Iterable[tuple[int, Mapping[str, Any]]]) -> Amounts:
    """The accelerators that all pods of a job request together.

    :param pods: the spec of each template, and the number of its pods.
    """
    return sum((times(number, requested_by(spec)) for number, spec in pods), Amounts())


def amounts_of(pod: Json) -> Amounts:
    """The accelerators that an existing pod requests.

    A scheduler may serve resources by a claim that it creates: the devices of those in the table are counted as such.
    """
    extended = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    mapped = (str(one.get("resourceName")) for one in extended.get("requestMappings") or ())
    others = Amounts({CLAIMS: int(any(accelerator_of(name) is None for name in mapped))})
    return requested_by(pod.get("spec") or {}) | others


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


def requests_gpus(spec: Mapping[str, Any]) -> bool:
    """Whether a pod requests GPUs, or parts of them, as a resource."""
    return any(is_gpu(resource) and number for resource, number in _of_all_containers(spec))


def resource_names(spec: Mapping[str, Any]) -> set[str]:
    """The resources that a pod requests, such as `cpu` and `amd.com/gpu`."""
    return {name for name, _ in _of_all_containers(spec)}


def _of_all_containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        if isinstance(container, Mapping):
            yield from ((str(name), _whole(amount)) for name, amount in _resources(container).items())


def _of_containers(spec: Mapping[str, Any]) -> Amounts:
    """The sum of the containers, or what an init container needs beside those sidecars that started before it."""
    together, sidecars, largest = Amounts(), Amounts(), Amounts()
    for container in spec.get("initContainers") or ():
        if not isinstance(container, Mapping):
            continue
        if container.get("restartPolicy") == "Always":
            sidecars += _of_container(container)
            largest |= sidecars
        else:
            largest |= sidecars + _of_container(container)
    for container in spec.get("containers") or ():
        if isinstance(container, Mapping):
            together += _of_container(container)
    return (together + sidecars) | largest


def _of_container(container: Mapping[str, Any]) -> Amounts:
    amounts = Amounts()
    for resource, amount in _resources(container).items():
        if (name := accelerator_of(str(resource))) is not None:
            amounts[name] += _whole(amount)
    return amounts


def _resources(container: Mapping[str, Any]) -> dict[str, Any]:
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def _whole(amount: object) -> int:
    number = parse_quantity(amount)
    return int(number) if number is not None and number > 0 and number == int(number) else 0
