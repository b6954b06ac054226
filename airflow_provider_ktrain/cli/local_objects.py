"""The objects that a job needs in an embedded cluster of its own: its namespace, and those beside it in its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.errors import ClusterError
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import Log


async def create(api: Api, namespace: str, objects: Iterable[Mapping[str, Any]], log: Log) -> None:
    """Create the namespace of a job, and the objects beside it in its file.

    :param namespace: of the job, and of objects that name none.
    :raises ClusterError: the cluster doesn't serve an object's kind, or rejects it.
    """
    await _post(api, "/api/v1/namespaces", {"metadata": {"name": namespace}})
    for obj in objects:
        title = f"{obj.get('kind')} {(obj.get('metadata') or {}).get('name')}"
        try:
            await _post(api, await _path(api, obj, namespace), obj)
        except ApiStatusError as e:
            raise ClusterError(f"{title} could not be created in the embedded cluster.\n{e}") from None
        log.info(f"{title} created.")


async def _post(api: Api, path: str, obj: Mapping[str, Any]) -> None:
    try:
        await api.request("POST", path, body=obj)
    except ApiStatusError as e:
        if e.status != 409:
            raise


async def _path(api: Api, obj: Mapping[str, Any], namespace: str) -> str:
    """The path at which objects of this kind are created."""
    version, kind = str(obj.get("apiVersion")), obj.get("kind")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    try:
        listed = (await api.request("GET", root)).get("resources") or ()
    except ApiUnavailable as e:
        if e.page != 404:
            raise
        listed = ()
    found = next((r for r in listed if r["kind"] == kind and "/" not in r["name"]), None)
    if found is None:
        raise ClusterError(f"the embedded cluster doesn't serve {kind} of {version}: remove it from the file")
    inside = (obj.get("metadata") or {}).get("namespace") or namespace
    return f"{root}/namespaces/{inside}/{found['name']}" if found["namespaced"] else f"{root}/{found['name']}"
