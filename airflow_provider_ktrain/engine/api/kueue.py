"""Requests about the Workload by which Kueue queues a job."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.identity.names import SUSPENDED_ANNOTATION, JobRef, label
from airflow_provider_ktrain.core.kinds.conditions import true_conditions
from airflow_provider_ktrain.core.state.queue.kueue_status import PRIORITY_LABEL, QUEUE_LABEL, workload_of
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import annotate, list_objects, served_versions

GROUP = "kueue.x-k8s.io"
VISIBILITY_GROUP = f"visibility.{GROUP}"
PLACE_SECONDS = 60.0  #: How long the places of jobs in a queue are used before they are read again.
PLACE_TIMEOUT_SECONDS = 5.0  #: Timeout of the read of these places.
VERSIONS = ("v1beta2", "v1beta1")  #: Versions of Workload that this provider reads, the preferred one first.


def queue_of(job: Mapping[str, Any]) -> str:
    """The LocalQueue that the job names; "" if it names none."""
    return str(label(job, QUEUE_LABEL) or "")


def priority_class_of(job: Mapping[str, Any]) -> str:
    """The WorkloadPriorityClass that the job names; "" if it names none."""
    return str(label(job, PRIORITY_LABEL) or "")


def workloads_path(version: str, namespace: str, name: str = "") -> str:
    """Path of the Workloads of a namespace, or of one."""
    base = f"/apis/{GROUP}/{version}/namespaces/{namespace}/workloads"
    return f"{base}/{name}" if name else base


async def served_version(api: Api) -> str:
    """The version in which this cluster serves Kueue; "" if it serves none that this provider reads."""
    offered = await served_versions(api, GROUP)
    return next((version for version in VERSIONS if version in offered), "")


async def find_workload(api: Api, ref: JobRef) -> Object | None:
    """The Workload of the job; None if it has none yet, or if the cluster doesn't serve Kueue.

    :raises ApiStatusError: 403 without the right to list Workloads.
    :raises ApiUnavailable: there was no response.
    """
    version = await served_version(api)
    path = workloads_path(version, ref.namespace)
    workload = workload_of(await list_objects(api, path, keep=dict) if version else [], ref.uid)
    return dict(workload) if workload is not None else None


@dataclass
class _Places:
    """The places of the jobs of a LocalQueue, from 1, by the name of the Workload; for all jobs of a process."""

    at: float = -math.inf  # timing.now()
    of: dict[str, int] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_places: WeakKeyDictionary[Api, dict[str, _Places]] = WeakKeyDictionary()


async def find_place(api: Api, version: str, workload: Mapping[str, Any]) -> int | None:
    """The place of a Workload in its ClusterQueue, from 1, by Kueue's visibility API; None if that isn't known.

    One request in PLACE_SECONDS reads the places of all jobs of a LocalQueue.
    """
    namespace, queue = workload["metadata"]["namespace"], (workload.get("spec") or {}).get("queueName")
    path = f"/apis/{VISIBILITY_GROUP}/{version}/namespaces/{namespace}/localqueues/{queue}/pendingworkloads"
    places = _places.setdefault(api, {}).setdefault(path, _Places())
    async with places.lock:
        if timing.now() >= places.at + PLACE_SECONDS:
            try:
                pending = (await api.request("GET", path, timeout=PLACE_TIMEOUT_SECONDS)).get("items") or ()
            except (ApiStatusError, ApiUnavailable):
                pending = ()
            read = {of["metadata"]["name"]: of.get("positionInClusterQueue") for of in pending}
            places.of = {name: place + 1 for name, place in read.items() if isinstance(place, int)}
            places.at = timing.now()
        return places.of.get(workload["metadata"]["name"])


class NotPausableError(Exception):
    """The job can't be paused by its Workload; the text contains the reason."""


class WorkloadFinishedError(NotPausableError):
    """The Workload is finished, so that Kueue doesn't change the job any more: a suspension by hand lasts."""


async def pause(api: Api, ref: JobRef, job: Mapping[str, Any], *, by: str = "") -> None:
    """Pause a job of a queue: deactivate its Workload. Kueue undoes a suspension by hand within a second (74b).

    First the job is marked as suspended, if it is still as it was read, so that the next try activates the Workload.

    :param job: as it was read; the mark is fenced by its resourceVersion, the deactivation by the Workload's.
    :param by: ti_id of the try that pauses it. Default: empty, the next try doesn't resume it.
    :raises NotPausableError: the job has no Workload, it is finished, or the right to read or to patch it is missing.
    :raises ApiStatusError: 409 if the job or its Workload has changed since it was read.
    """
    try:
        workload = await find_workload(api, ref)
        if workload is None:
            raise NotPausableError("it has no Workload")
        if "Finished" in true_conditions(workload):
            raise WorkloadFinishedError("its Workload is finished")
        if by:
            await annotate(api, ref, job, {SUSPENDED_ANNOTATION: by})
        await set_active(api, ref.namespace, workload, False)
    except ApiStatusError as e:
        if e.status == 403:
            raise NotPausableError(f"the right to read and patch workloads.{GROUP} is missing") from e
        raise


async def set_active(
    api: Api, namespace: str, workload: Mapping[str, Any], active: bool, *, fenced: bool = True
) -> None:
    """Activate or deactivate a Workload, only if it hasn't changed since it was read.

    Kueue evicts an inactive Workload: it suspends the job, the pods are deleted, and the quota is free (recording 74c).

    :param fenced: False: also if it has changed, but is still the same object. Default: True.
    :raises ApiStatusError: 409 if it has changed, 404 if it doesn't exist, 403 without the right to patch it.
    """
    meta = workload["metadata"]
    version = str(workload["apiVersion"]).partition("/")[2]
    fence = {key: meta[key] for key in (("uid", "resourceVersion") if fenced else ("uid",))}
    patch = {"metadata": fence, "spec": {"active": active}}
    await api.request("PATCH", workloads_path(version, namespace, meta["name"]), body=patch)
