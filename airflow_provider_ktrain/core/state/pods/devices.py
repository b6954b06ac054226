"""What pods request of accelerators: as resources, and as devices of ResourceClaims (dynamic resource allocation)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.state.accelerators import (
    UNKNOWN,
    Amounts,
    accelerator_of,
    accelerator_of_device,
    is_gpu,
    times,
)
from airflow_provider_ktrain.core.state.pods.objects import Json, created, name_of, node_of, uid_of
from airflow_provider_ktrain.core.state.quantity import parse_quantity


class Claim(NamedTuple):
    """What was read of a ResourceClaim.

    :param devices: that are allocated to it: the request, and as what the device is counted. None: not known.
    :param users: uids of the pods for which it is reserved.
    """

    devices: tuple[tuple[str, str], ...] | None
    users: frozenset[str] = frozenset()


Claims = Mapping[str, Claim]  #: by name, those of one namespace


def read_claim(claim: Json) -> Claim:
    """What counts of a ResourceClaim as read from the API server.

    Its devices are unknown once it isn't allocated: Kubernetes takes them from a claim whose pods have ended. A device
    with `adminAccess` isn't held.
    """
    status = claim.get("status") or {}
    allocation = status.get("allocation")
    users = frozenset(str(user.get("uid")) for user in status.get("reservedFor") or ())
    if allocation is None:
        return Claim(None, users)
    results = ((allocation.get("devices") or {}).get("results")) or ()
    return Claim(
        tuple(
            (
                str(device.get("request")),
                accelerator_of_device(
                    str(device.get("driver")), str(device.get("device")), is_share=bool(device.get("shareID"))
                ),
            )
            for device in results
            if not device.get("adminAccess")
        ),
        users,
    )


def requested_by(spec: Mapping[str, Any]) -> Amounts:
    """The accelerators that one pod requests, by the spec of a pod or a template. Its claims' devices are UNKNOWN."""
    return _of_containers(spec) + Amounts({UNKNOWN: len(_references(spec))})


def requested_by_all(pods: Iterable[tuple[int, Mapping[str, Any]]]) -> Amounts:
    """The accelerators that all pods of a job request together. A claim that pods name is one for all of them.

    :param pods: the spec of each template, and the number of its pods.
    """
    amounts, shared = Amounts(), set[str]()
    for number, spec in pods:
        names = [str(ref.get("resourceClaimName") or "") for ref in _references(spec)]
        amounts += times(number, _of_containers(spec) + Amounts({UNKNOWN: names.count("")}))
        shared |= {*filter(None, names)} if number else set()
    return amounts + Amounts({UNKNOWN: len(shared)})


def _references(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of `resourceClaims`; a manifest may have others, which the API server refuses."""
    return [ref for ref in spec.get("resourceClaims") or () if isinstance(ref, Mapping)]


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


def amounts_of(pods: Iterable[Json], claims: Claims) -> Iterator[tuple[Json, Amounts]]:
    """Each pod with the accelerators that it requests. A claim that pods share counts for the first one on a node.

    :param claims: those that were read; the devices of others are UNKNOWN.
    """
    counted = set[str]()
    for pod in sorted(pods, key=age):
        by_claim = amounts_by_claim(pod, claims)
        yield pod, sum((amounts for name, amounts in by_claim.items() if name not in counted), Amounts())
        counted |= by_claim.keys() - {""}


def amounts_by_claim(pod: Json, claims: Claims) -> dict[str, Amounts]:
    """The accelerators that a pod requests: as resources under "", and once it has a node those of each claim."""
    held = claims_of(pod).items() if node_of(pod) else ()
    devices = {name: _devices(claims.get(name), excepted) for name, excepted in held}
    return {"": _of_containers(pod.get("spec") or {}), **devices}


def age(pod: Json) -> tuple[str, str]:
    """By which pods are sorted, the oldest first."""
    return created(pod), uid_of(pod)


def claims_of(pod: Json) -> dict[str, frozenset[str]]:
    """The names of the pod's ResourceClaims, each with its requests that are counted as resources already.

    A scheduler may serve resources of a pod by a claim that it creates: `extendedResourceClaimStatus`. If the table has
    their names, they are counted as resources, and not as devices.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    generated = {one.get("name"): one.get("resourceClaimName") for one in status.get("resourceClaimStatuses") or ()}
    found = {}
    for ref in spec.get("resourceClaims") or ():
        key = ref.get("name")
        # a template's claim has the name in the status; none there: the pod needed no claim; no entry: it isn't known
        name = ref.get("resourceClaimName") or generated.get(key, f"{name_of(pod)}.{uid_of(pod)}.{key}")
        if name:
            found[str(name)] = frozenset[str]()
    extended = status.get("extendedResourceClaimStatus") or {}
    mapped = extended.get("requestMappings") or ()
    by_name = {str(one.get("requestName")) for one in mapped if accelerator_of(str(one.get("resourceName")))}
    if extended.get("resourceClaimName") and len(by_name) < len(mapped):
        found[str(extended["resourceClaimName"])] = frozenset(by_name)
    return found


def _devices(claim: Claim | None, excepted: frozenset[str]) -> Amounts:
    """The devices of a claim without those of some requests. A request may name one of its alternatives: `a/b`."""
    if claim is None or claim.devices is None:
        return Amounts({UNKNOWN: 1})
    return Amounts(device for request, device in claim.devices if request.partition("/")[0] not in excepted)


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
