"""The exit code of a failed job: that of its primary replica's main container."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from airflow_provider_ktrain.core.diagnosis.pod_failures import Json, disruption_of, find_failures
from airflow_provider_ktrain.core.errors import ManifestError
from airflow_provider_ktrain.core.kinds import Kind


def primary_exit_code(kind: Kind, job: Json, pods: Sequence[Json]) -> int | None:
    """The exit code with which the program of a failed job ended by itself.

    None if that is not known: the primary replica has not failed, or its pod was evicted or deleted.

    :param kind: kind of the job.
    :param job: the job as last seen.
    :param pods: its pods, each as last seen, deleted ones included.
    """
    role = kind.primary(job)
    oldest_first = sorted(pods, key=lambda pod: str((pod.get("metadata") or {}).get("creationTimestamp")))
    by_name = {str((pod.get("metadata") or {}).get("name")): pod for pod in oldest_first}  # recreated pods share one
    for failure in reversed(find_failures(kind, pods, {})):
        if (failure.role, failure.index) != (role, 0) or failure.is_init or not failure.is_latest:
            continue
        pod = by_name[failure.pod]
        if disruption_of(pod.get("status") or {})[0]:
            continue
        with contextlib.suppress(ManifestError):  # the pod has no containers
            if failure.container == kind.main_container(job.get("spec") or {}, pod.get("spec") or {}, role)["name"]:
                return failure.exit_code
    return None
