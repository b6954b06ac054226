"""Requests about one job and its pods that submit, release, follow and the operations share.

`delete_fenced` is the one way to delete a job: it can't hit a job that has changed since it was read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.errors import AccessError, KtrainError, OperatorMissingError
from airflow_provider_ktrain.core.identity.names import SUBMISSION_LABEL, SUSPENDED_ANNOTATION, JobRef
from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.kinds.conditions import FAILED_ANNOTATION, failure_annotation
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.answers import Target
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable, Object, get, get_if_allowed
from airflow_provider_ktrain.engine.api.request_errors import explain, retry_transient

T = TypeVar("T")
#: Pause after the second conflict in a row with other writers. It doubles after each further one.
CONFLICT_PAUSE_SECONDS = 0.05
MAX_CONFLICT_PAUSE_SECONDS = 2.0
PAGE_SIZE = 500  #: Pods per list request: parsing thousands at once would block the event loop.


class Log(Protocol):
    """Where the engine logs: structlog's and Airflow's loggers implement this.

    Lines of containers come with two keywords that replace what a logger would set itself: `logger`, the name of the
    source, and `timestamp`, a time in UTC with microseconds.
    """

    def info(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Progress that a user wants to see."""

    def warning(self, event: Any, *args: Any, **kw: Any) -> Any:
        """A problem that doesn't end the task, and that somebody may have to solve."""

    def error(self, event: Any, *args: Any, **kw: Any) -> Any:
        """Why the job failed."""


class JobChanged(KtrainError):
    """The job has changed or vanished since it was read. Nothing was released: read, and decide again."""


class ConflictPauses:
    """Pauses after writes that met other writes: none after the first, then longer each time.

    :ivar next: the next one, in seconds.
    :ivar total: of those so far, in seconds.
    """

    def __init__(self) -> None:
        self.next = self.total = 0.0

    async def wait(self) -> None:
        """Wait for the next one."""
        await asyncio.sleep(self.next)
        self.total += self.next
        self.next = min(self.next * 2 or CONFLICT_PAUSE_SECONDS, MAX_CONFLICT_PAUSE_SECONDS)


async def served_versions(api: Api, group: str) -> list[str]:
    """The versions in which this cluster serves an API group; empty if it doesn't.

    A proxy may answer "404 page not found", too, so only the list of all groups proves that there is no such group.
    """
    groups = (await api.request("GET", "/apis")).get("groups") or ()
    return [v["version"] for found in groups if found["name"] == group for v in found.get("versions") or ()]


async def served_version(api: Api, kind: Kind, *, patience: float = 0, log: Log | None = None) -> str:
    """The API version in which this cluster serves the kind, by discovery.

    :param patience: how long to repeat requests to an unreachable or overloaded API server, in seconds. Default: 0.
    :raises OperatorMissingError: the cluster doesn't serve a version that this provider supports.
    """
    offered: list[str] = []

    async def discover() -> str:
        nonlocal offered
        unread: dict[str, ApiUnavailable] = {}
        for version in kind.versions:
            try:
                if await _serves(api, kind, version):
                    return version
            except ApiUnavailable as e:
                if e.page != 404:
                    raise
                unread[version] = e
        offered = await served_versions(api, kind.group)
        for version in unread.keys() & offered:
            raise unread[version]
        return ""

    try:
        found = await retry_transient(discover, timing.now() + patience, warn=log.warning if log else None)
    except (ApiStatusError, ApiUnavailable) as e:
        raise explain(e, "GET", f"/apis/{kind.group}") from None
    if found:
        return found
    operators = " or ".join(operator.name for operator in kind.operators)
    raise OperatorMissingError(
        f"the cluster doesn't serve {kind.name}. Install {operators}, or check the connection. "
        f"Expected {' or '.join(kind.api_versions)}, found "
        f"{', '.join(f'{kind.group}/{v}' for v in offered) or f'no version of {kind.group}'}"
    )


async def _serves(api: Api, kind: Kind, version: str) -> bool:
    served = await api.request("GET", f"/apis/{kind.group}/{version}")
    return any(resource["name"] == kind.plural for resource in served.get("resources") or ())


async def served_ref(api: Api, ref: JobRef) -> JobRef:
    """The reference to the job in a version that is still served, if a path of its version gets a 404 that isn't ours.

    :return: `ref` itself if no other version has the object with its uid.
    :raises ApiStatusError, ApiUnavailable: this can't be read now.
    """
    kind = kind_of(ref.kind)
    offered = await served_versions(api, kind.group)
    if ref.version in offered and await _serves(api, kind, ref.version):
        return ref
    for version in offered:
        other = replace(ref, version=version)
        if version in kind.versions and await _serves(api, kind, version) and await read_job(api, other) is not ABSENT:
            return other
    return ref


async def in_served_version(api: Api, ref: JobRef, ask: Callable[[JobRef], Awaitable[T]]) -> tuple[JobRef, T]:
    """The answer to a request about the job, and its reference: in another version if that of `ref` isn't served."""
    try:
        return ref, await ask(ref)
    except ApiUnavailable as e:
        if e.page != 404 or (other := await served_ref(api, ref)) == ref:
            raise
    return other, await ask(other)


def if_not_served(ref: JobRef, error: BaseException | None) -> str:
    """How a user deletes the pods if an error suggests that the job's kind isn't served any more; else empty."""
    if not isinstance(error, ApiUnavailable) or error.page != 404:
        return ""
    return f"\nIf {ref.kind} isn't served any more, run: {ref.delete_pods_command}"


async def find(
    api: Api, kind: Kind, namespace: str, name: str, *, timeout: float = 0
) -> tuple[JobRef, Object | Absent]:
    """The job of this name, no matter who submitted it, and a reference to it without a uid.

    :param timeout: how long to repeat requests to an unreachable API server, in seconds. Default: 0.
    """
    ref = JobRef(kind.name, await served_version(api, kind), namespace, name, uid="")
    try:
        return ref, await retry_transient(lambda: get(api, api_paths.job(ref)), timing.now() + timeout)
    except (ApiStatusError, ApiUnavailable) as e:
        raise explain(e, "get", f"{kind.plural}.{kind.group}", namespace) from None


async def read_job(api: Api, ref: JobRef) -> Object | Absent:
    """The job with the uid of `ref`; it is absent if a new job has its name."""
    found = await get(api, api_paths.job(ref))
    return found if found is not ABSENT and found["metadata"]["uid"] == ref.uid else ABSENT


@dataclass(frozen=True)
class JobRead:
    """What the API server has of a job: the evidence on which it is released.

    :param job: the job, or the proof that it doesn't exist.
    :param pods: its pods, ended ones included; if the job is gone, those that are left of it.
    """

    job: Object | Absent
    pods: list[Object]


@dataclass(frozen=True)
class Observed:
    """A job as it was seen last: by a watch, in the answer to a write, or by a read without its pods.

    It says when to look. Only a kill that has seconds acts on it.

    :param workload: Kueue's, if its watch has shown one. Default: None.
    """

    job: Object | Absent
    workload: Object | None = None


async def read_training(api: Api, ref: JobRef) -> JobRead:
    """Read the job, then list its pods: in this order, no pod of a job that has ended is missing."""
    job = await read_job(api, ref)
    return JobRead(job, await job_pods(api, ref))


async def job_pods(api: Api, ref: JobRef) -> list[Object]:
    """All pods of this job, ended ones included."""
    pods = await list_pods(api, ref.namespace, ref.pod_selector)
    owners = await pod_owners(api, ref, pods)
    return [p for p in pods if belongs(p, ref, owners)]


async def list_pods(api: Api, namespace: str, selector: str) -> list[Object]:
    """The pods that a label selector selects."""
    return await list_objects(api, api_paths.core(namespace, "pods"), selector, keep=lambda pod: pod)


async def read_pod(api: Api, namespace: str, pod: Mapping[str, Any]) -> Object | Absent:
    """A listed pod as it is now; it is absent if a new pod has its name."""
    found = await get(api, api_paths.core(namespace, "pods", pod["metadata"]["name"]))
    return found if found is not ABSENT and found["metadata"]["uid"] == pod["metadata"]["uid"] else ABSENT


async def list_objects(
    api: Api,
    path: str,
    selector: str = "",
    *,
    fields: str = "",
    keep: Callable[[Object], T],
    page_size: int = PAGE_SIZE,
) -> list[T]:
    """The objects at a path, read in pages.

    :param keep: what to keep of an object: only one page is in memory.
    """
    selectors = {"labelSelector": selector, "fieldSelector": fields}
    selected = {name: value for name, value in selectors.items() if value}
    objects: list[T] = []
    query = {**selected, "limit": str(page_size)}
    while True:
        try:
            found = await api.request("GET", path, query=query)
        except ApiStatusError as e:
            if e.status != 410 or "continue" not in query:
                raise
            objects, query = [], selected  # the continue token has expired: list all at once
            continue
        objects += map(keep, found.get("items") or ())
        if not (token := found["metadata"].get("continue")):
            return objects
        query["continue"] = token


def belongs(pod: Mapping[str, Any], ref: JobRef, owners: Mapping[str, bool]) -> bool:
    """Whether a pod that `ref.pod_selector` selects belongs to the job.

    :param owners: of `pod_owners`. A pod whose owner is not known there belongs to the job: it has the job's name.
    """
    known = shown_owner(pod, ref)
    return owners.get(owner_of(pod, ref), True) if known is None else known


async def pod_owners(api: Api, ref: JobRef, pods: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Whether the owners of pods belong to the job, by uid, for pods that don't show it themselves.

    A TrainJob's pods are owned by the Jobs of a JobSet of its name. If our labels are not on them, the JobSet is read.

    :param pods: pods that `ref.pod_selector` selects.
    :return: empty if no owner had to be read, or if it doesn't exist or can't be read.
    """
    unknown = [pod for pod in pods if shown_owner(pod, ref) is None]
    if not unknown:
        return {}
    owner = await _read_pod_owner(api, ref)
    if owner is None or owner is ABSENT:
        return await _owners_by_age(api, ref, unknown)
    ours = is_owned(owner, ref)
    return {owner["metadata"]["uid"]: ours, "": ours}  # nothing is known about pods of an earlier owner of this name


async def pod_owner_exists(api: Api, ref: JobRef) -> bool:
    """Whether the object between the job and its pods still exists. False: it doesn't, or it can't be read."""
    if not kind_of(ref.kind).behavior.pod_owner:
        return False
    owner = await _read_pod_owner(api, ref)
    return isinstance(owner, dict) and is_owned(owner, ref)


async def _read_pod_owner(api: Api, ref: JobRef) -> Object | Absent | None:
    """The object between the job and its pods. None: it can't be read, as without the right to, or if JobSets of this
    version aren't served.
    """
    path = api_paths.pod_owner(ref)
    try:
        return await get_if_allowed(api, path)
    except ApiUnavailable as e:
        target = Target.of(path)
        if e.page != 404 or target.version in await served_versions(api, target.group):
            raise
        return None


def is_owned(obj: Mapping[str, Any], ref: JobRef) -> bool:
    """Whether the job is an owner of an object."""
    return any(owner["uid"] == ref.uid for owner in obj["metadata"].get("ownerReferences") or ())


async def _owners_by_age(api: Api, ref: JobRef, pods: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """`pod_owners` if the owners can't be read: pods of a later job of this name aren't older than that job."""
    job = await get_if_allowed(api, api_paths.job(ref))
    if not isinstance(job, dict) or job["metadata"]["uid"] == ref.uid:
        return {}
    by_age = sorted((pod["metadata"]["creationTimestamp"], owner_of(pod, ref)) for pod in pods)
    return {owner: created < job["metadata"]["creationTimestamp"] for created, owner in by_age}


def shown_owner(pod: Mapping[str, Any], ref: JobRef) -> bool | None:
    """Whether the pod belongs to the job; None if only its owner shows that."""
    kind = kind_of(ref.kind)
    submission = (pod["metadata"].get("labels") or {}).get(SUBMISSION_LABEL)
    if ref.submission and (submission or kind.behavior.labels_pods):
        return bool(submission == ref.submission)
    return kind.behavior.owns_pod(pod, ref.name, ref.uid)


def owner_of(pod: Mapping[str, Any], ref: JobRef) -> str:
    """The uid of the object between job and pod; empty if the pod doesn't have it, as before JobSet 0.10."""
    return str((pod["metadata"].get("labels") or {}).get(kind_of(ref.kind).behavior.pod_owner_label, ""))


async def delete_fenced(api: Api, ref: JobRef, job: Mapping[str, Any]) -> None:
    """Delete the job, only if it is still as it was read. The one way to delete a job.

    The decision to delete was made on what was read: the owner, the phase. A uid alone does not protect that decision,
    because another try adopts the job by a patch, which changes its owner and keeps its uid. Every write changes the
    resourceVersion, so the API server answers 409 to a delete that was decided on an old read.

    :raises AbsentError: it doesn't exist.
    :raises ApiStatusError: 409 where the job has changed since.
    """
    fence = {"uid": job["metadata"]["uid"], "resourceVersion": job["metadata"]["resourceVersion"]}
    propagation = kind_of(ref.kind).behavior.propagation
    await api.request("DELETE", api_paths.job(ref), body={"propagationPolicy": propagation, "preconditions": fence})


async def patch_fenced(
    api: Api, ref: JobRef, job: Mapping[str, Any], annotations: Mapping[str, str | None], spec: Object | None = None
) -> Object:
    """Patch annotations and spec of the job, only if it hasn't changed since it was read; returns the job.

    :param annotations: to be set; None removes one.
    :raises ApiStatusError: 409 if the job has changed.
    """
    metadata = {"resourceVersion": job["metadata"]["resourceVersion"], "annotations": annotations}
    patch = {"metadata": metadata, **({} if spec is None else {"spec": spec})}
    answer = await api.request("PATCH", api_paths.job(ref), body=patch)
    if answer["metadata"]["uid"] != job["metadata"]["uid"]:
        raise ApiUnavailable(f"PATCH {api_paths.job(ref)}: the response is about another job of this name")
    return answer


async def set_suspended(api: Api, ref: JobRef, job: Mapping[str, Any], suspend: bool, *, by: str = "") -> Object:
    """Suspend or resume the job by `patch_fenced`.

    :param by: ti_id of the try that suspends it, so that the next try resumes it. Default: empty, nobody resumes it.
    """
    annotations = {
        SUSPENDED_ANNOTATION: (by or None) if suspend else None,
        FAILED_ANNOTATION: failure_annotation(job) if suspend else None,
    }
    return await patch_fenced(api, ref, job, annotations, kind_of(ref.kind).form.suspension(suspend))


async def annotate(api: Api, ref: JobRef, job: Mapping[str, Any], annotations: Mapping[str, str]) -> Object:
    """Set annotations of the job, or remove those with an empty value, by `patch_fenced`."""
    return await patch_fenced(api, ref, job, {name: value or None for name, value in annotations.items()})


async def check_cluster(api: Api, ref: JobRef, *, patience: float = 0, log: Log | None = None) -> None:
    """Check that the connection leads to the cluster of the job.

    In another cluster the job would look deleted, and a retry would submit it a second time. The same URL and
    certificate authority mean the same cluster. If they differ, the cluster may have a new address: then a job with
    the same uid proves that it is the same cluster.

    :param patience: how long to repeat requests to an unreachable or overloaded API server, in seconds. Default: 0.
    :raises AccessError: the connection leads to another cluster.
    :raises UnreachableError: the API server can't be reached, so it is unknown which cluster it is.
    """
    if not ref.cluster or ref.cluster == (here := await api.cluster()):
        return
    try:
        end = timing.now() + patience
        if await retry_transient(lambda: read_job(api, ref), end, warn=log.warning if log else None) is not ABSENT:
            return
        response = "that job doesn't exist there"
    except ApiUnavailable as e:
        raise explain(e, "get", ref.kind) from None
    except ApiStatusError as e:
        response = f"the API server there answers {e}"
    raise AccessError(
        f"{ref} was submitted to {ref.cluster}, but the connection now leads to {here}. Nothing was deleted.\n"
        f"Restore the connection, or clear the task if {ref.cluster} doesn't exist anymore ({response})"
    )
