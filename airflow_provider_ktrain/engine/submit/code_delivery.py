"""The ConfigMap with the code of a job.

It is created after the job and owned by it, so that Kubernetes deletes it with the job. The job's pods wait for it,
because they mount it. Its name contains the job's submission, so that the pods of a job that replaces another job of
the same name never mount the old code.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.errors import ClusterError, ManifestError
from airflow_provider_ktrain.core.identity.names import CODE_ANNOTATION, PREFIX, JobRef
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.manifest.code import ARCHIVE, Code, config_map_name
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, Object, get, get_if_allowed
from airflow_provider_ktrain.engine.api.job_calls import is_owned
from airflow_provider_ktrain.engine.api.request_errors import explain, refuses_manifest

RESOURCE = "configmaps"


async def create(api: Api, ref: JobRef, job: Mapping[str, Any], code: Code) -> None:
    """Create the ConfigMap of a job, unless it exists.

    :raises ApiStatusError: the request fails; 409 if another job's ConfigMap has the name.
    """
    try:
        await api.request("POST", api_paths.core(ref.namespace, RESOURCE), body=_config_map(ref, job, code))
    except ApiStatusError as e:
        found = None if e.transient else await get_if_allowed(api, _path(ref))
        if not isinstance(found, dict) or not is_owned(found, ref):  # no earlier request, without response, created it
            raise


async def exists(api: Api, ref: JobRef) -> bool:
    """Whether the ConfigMap of a job exists."""
    found = await get(api, _path(ref))
    return found is not ABSENT and is_owned(found, ref)


def _path(ref: JobRef) -> str:
    return api_paths.core(ref.namespace, RESOURCE, config_map_name(ref.name, ref.submission))


def _config_map(ref: JobRef, job: Mapping[str, Any], code: Code) -> Object:
    kind, labels = kind_of(ref.kind), job["metadata"].get("labels") or {}
    owner = {"apiVersion": f"{kind.group}/{ref.version}", "kind": ref.kind, "name": ref.name, "uid": ref.uid}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": config_map_name(ref.name, ref.submission),
            "namespace": ref.namespace,
            "labels": {name: value for name, value in labels.items() if name.startswith(f"{PREFIX}/")},
            "annotations": {CODE_ANNOTATION: code.hash},
            "ownerReferences": [owner],
        },
        "binaryData": {ARCHIVE: base64.b64encode(code.archive).decode()},
        "immutable": True,
    }


def is_refused(error: ApiStatusError) -> bool:
    """Whether the response proves that the API server doesn't accept the ConfigMap: the job can't get its code.

    Only Kubernetes sets a reason: the error page of a proxy proves nothing, except that the request is too large.
    """
    if error.status == 413:
        return True
    refuses = 400 <= error.status < 500 and error.status not in (401, 409)
    return refuses and bool(error.reason) and not error.transient


def refusal(error: ApiStatusError, namespace: str) -> ManifestError | ClusterError:
    """The error with which the task fails if its job can't get its code."""
    if refuses_manifest(error):  # `explain` assumes that the request creates the job
        return ClusterError(
            f"the API server refused the ConfigMap with the code ({error.status} {error.reason}). Ask the "
            f"administrator of namespace {namespace!r}, or put the code into the image.\n{error.message}"
        )
    return explain(error, "create", RESOURCE, namespace)
