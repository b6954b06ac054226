"""When the clock of `progress_timeout` starts: at the last progress, or when the training started, whichever is later.

A training that restarts needs time until it reports a step again, so the start of any of its containers restarts the
clock. All times are the cluster's: the kubelet's for lines of a log and for starts of containers, the program's for a
TrainJob's `trainerStatus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.timestamps import epoch_seconds

Object = Mapping[str, Any]


def run_began(job: Object, pods: Iterable[Object]) -> float | None:
    """When the last training container started, in epoch seconds.

    :param job: the job as last seen; empty if it has not been seen yet.
    :param pods: its pods.
    :return: None if a container has not started yet: the others wait for it. An elastic job doesn't wait.
    """
    if not job:
        return None
    kind = kind_of(job.get("kind"))
    waits, starts = not kind.is_elastic(job), []
    for pod in pods:
        started = _started_at(kind, job, pod)
        if started is not None:
            starts.append(started)
        elif waits and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            return None
    return max(starts, default=None)


def _started_at(kind: Kind, job: Object, pod: Object) -> float | None:
    """When the newest run of a pod's main container started."""
    main = kind.main_container_name(job, pod)
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    status: Object = next((status for status in statuses if status.get("name") == main), {})
    state, earlier = status.get("state") or {}, status.get("lastState") or {}
    run = state.get("running") or state.get("terminated") or earlier.get("terminated") or {}
    return epoch_seconds(run.get("startedAt"))
