"""When the clock of `progress_timeout` starts: at the last progress, or when the training started, whichever is later.

A training that restarts needs time until it reports a step again, so the start of any of its containers restarts the
clock. All times are the cluster's: the kubelet's for lines of a log and for starts of containers, the program's for a
TrainJob's `trainerStatus`.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.state.pods.objects import Json, container_status, has_ended, runs_of, uid_of
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds


class RunStarts:
    """When the containers of a job started. A pod is looked at again only when it has changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Json, float | None]] = {}  # pods by uid, as last seen, each with its start

    def last(self, job: Json, pods: Iterable[Json]) -> float | None:
        """When the last training container started, in epoch seconds.

        :param job: the job as last seen; empty if it has not been seen yet.
        :return: None if a container has not started yet: the others wait for it. An elastic job doesn't wait.
        """
        if not job:
            return None
        kind = kind_of(job.get("kind"))
        known, self._known = self._known, {}
        for pod in pods:
            uid = uid_of(pod)
            found = known.get(uid)
            self._known[uid] = found if found and found[0] is pod else (pod, _started_at(kind, job, pod))
        if not kind.scaling.is_elastic(job) and any(
            at is None and not has_ended(pod) for pod, at in self._known.values()
        ):
            return None
        return max((at for _, at in self._known.values() if at is not None), default=None)


def _started_at(kind: Kind, job: Json, pod: Json) -> float | None:
    main = kind.main_container_name(job, pod)
    *_, newest = {}, *runs_of(container_status(pod, main))
    return epoch_seconds(newest.get("startedAt"))
