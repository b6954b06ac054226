"""Requests about one job and its pods that submit, release, follow and the operations share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from airflow_provider_ktrain.core.errors import AccessError, OperatorMissingError
from airflow_provider_ktrain.core.identity import SUSPENDED_ANNOTATION, JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.errors import explain, retry_transient, unreachable

Object = dict[str, Any]
PAGE_SIZE = 500  # pods that one request asks for: parsing those of thousands at once would stall the loop
MERGE_PATCH = "application/merge-patch+json"


class Log(Protocol):
    """What the engine says, and to whom: structlog's and Airflow's loggers fit."""

    def info(self, event: Any, *args: Any, **kw: Any) -> Any: ...

    def warning(self, event: Any, *args: Any, **kw: Any) -> Any: ...


async def served_version(api: Api, kind: Kind, *, patience: float = 0) -> str:
    """The API version in which this cluster serves the kind: discovered, never guessed.

    :param patience: seconds that an unreachable or overloaded API server is asked again.
    :raises OperatorMissingError: no version that we know is served.
    :raises AccessError, UnreachableError, ClusterError: other ends of a request.
    """
    end = time.monotonic() + patience

    async def discover(path: str) -> Object:
        try:
            return await retry_transient(lambda: api.request("GET", path), end)
        except ApiStatusError as e:
            if e.status == 404:
                return {}
            raise explain(e, "GET", path) from e
        except ApiUnavailable as e:
            raise unreachable(e) from e

    group = await discover(f"/apis/{kind.group}")
    offered = [v["version"] for v in group.get("versions") or ()]
    for version in [v for v in kind.versions if v in offered]:
        served = await discover(f"/apis/{kind.group}/{version}")
        if any(r["name"] == kind.plural for r in served.get("resources") or ()):
            return version
    raise OperatorMissingError(
        f"the cluster serves no {kind.name}: expected {' or '.join(kind.api_versions)}, found "
        f"{', '.join(f'{kind.group}/{v}' for v in offered) or f'no version of {kind.group}'}. Install "
        f"{' or '.join(kind.operators)}, or check the connection"
    )


async def find(
    api: Api, kind: Kind, version: str, namespace: str, name: str, *, timeout: float = 0
) -> tuple[JobRef, Object] | None:
    """The job of that name, whoever submitted it; None where there is none.

    :param timeout: seconds that an API server which is away is asked again.
    """
    path = paths.jobs(kind, version, namespace, name)
    try:
        job = await retry_transient(lambda: api.request("GET", path), time.monotonic() + timeout)
    except ApiStatusError as e:
        if e.not_found:
            return None
        raise explain(e, "get", f"{kind.plural}.{kind.group}", namespace) from e
    except ApiUnavailable as e:
        raise unreachable(e) from e
    return JobRef(kind.name, version, namespace, name, job["metadata"]["uid"]), job


async def read_job(api: Api, ref: JobRef) -> Object | None:
    """The job if it is still this very one (by uid); None where it is gone."""
    try:
        found = await api.request("GET", paths.job(ref))
    except ApiStatusError as e:
        if e.status == 404:
            return None
        raise
    return found if found["metadata"]["uid"] == ref.uid else None


async def job_pods(api: Api, ref: JobRef, *, page: int = PAGE_SIZE) -> list[Object]:
    """The pods of this very job, ended ones included.

    :param page: how many of them one request asks for. Default: PAGE_SIZE.
    """
    pods: list[Object] = []
    query = {"labelSelector": ref.pod_selector, "limit": str(page)}
    while True:
        try:
            found = await api.request("GET", paths.core(ref.namespace, "pods"), query=query)
        except ApiStatusError as e:
            if not e.gone or "continue" not in query:
                raise
            pods, query = [], {"labelSelector": ref.pod_selector}  # the token has expired: all at once, then
            continue
        pods += found.get("items") or []
        if not (token := (found.get("metadata") or {}).get("continue")):
            break
        query["continue"] = token
    return pods if ref.submission else [p for p in pods if belongs(p, ref)]


def belongs(pod: Mapping[str, Any], ref: JobRef) -> bool:
    """Whether a pod that only the operator labelled is this very job's: mpi-operator's launcher is its Job's."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return any(o["uid"] == ref.uid or (o["kind"] == "Job" and o["name"] == f"{ref.name}-launcher") for o in owners)


def is_terminating(pod: Mapping[str, Any]) -> bool:
    """Whether its deletion was asked for. A job that is resumed meanwhile fails: operators count it as a failure.

    training-operator 1.9 (`UpdateJobReplicaStatuses`): a pod that is Failed, or Running with a deletionTimestamp.
    """
    return "deletionTimestamp" in pod["metadata"]


async def delete_fenced(api: Api, path: str, job: Mapping[str, Any]) -> None:
    """Delete the job at `path`, in the foreground, only if it is still as it was read. The one way to delete a job.

    The decision to delete was made on what was read: the owner, the phase. A uid alone does not protect that decision,
    because another try adopts the job by a patch, which changes its owner and keeps its uid. Every write changes the
    resourceVersion, so the API server answers 409 to a delete that was decided on an old read.

    :param path: path of the job.
    :param job: the job as it was read.
    :raises ApiStatusError: 409 where the job has changed since, 404 where it does not exist.
    """
    fence = {"uid": job["metadata"]["uid"], "resourceVersion": job["metadata"]["resourceVersion"]}
    await api.request("DELETE", path, body={"propagationPolicy": "Foreground", "preconditions": fence})


async def set_suspended(api: Api, ref: JobRef, job: Mapping[str, Any], suspend: bool, *, by: str = "") -> Object:
    """Suspend or resume the job that was read; ApiStatusError 409 where it changed since."""
    patch = {
        "metadata": {
            "resourceVersion": job["metadata"]["resourceVersion"],
            "annotations": {SUSPENDED_ANNOTATION: (by or None) if suspend else None},
        },
        "spec": {"runPolicy": {"suspend": suspend}},
    }
    return await api.request("PATCH", paths.job(ref), body=patch, content_type=MERGE_PATCH)


async def check_cluster(api: Api, ref: JobRef) -> None:
    """See that the job is in this cluster: in another one it would look deleted, and a retry would submit it again.

    The same URL and authority are the same cluster. Where they differ, a cluster may have got another address: the
    job's uid tells.

    :raises AccessError: the connection means another cluster than the one that the job was submitted to.
    :raises UnreachableError: that cannot be seen.
    """
    here = await api.cluster()
    if ref.cluster in ("", here):
        return
    try:
        if await read_job(api, ref) is not None:
            return
        said = "has no such job"
    except ApiUnavailable as e:
        raise unreachable(e) from e
    except ApiStatusError as e:
        said = f"says {e}"
    raise AccessError(
        f"{ref} was submitted to {ref.cluster}, but the connection means {here} by now, which {said}. Nothing was "
        f"deleted. Put the connection back; if {ref.cluster} is no more, clear the task"
    )
