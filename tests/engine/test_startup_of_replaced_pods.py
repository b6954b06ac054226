"""A startup rule is decided on the pods that exist."""

from __future__ import annotations

import time
from typing import Any

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.startup import StartupChecks
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.engine.tasks import Lines
from tests.factories import replica_pod


class NoEvents:
    async def watched(self) -> list[Any]:
        return []


def pod(uid: str, created: str, reason: str) -> dict[str, Any]:
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": created}
    container = {"name": "pytorch", "image": "image", "state": {"waiting": {"reason": reason}}}
    return replica_pod(
        "worker", 1, job="job", meta={"uid": uid, "creationTimestamp": created}, spec={"nodeName": "node"},
        phase="Pending", conditions=[scheduled], containerStatuses=[container],
    )  # fmt: skip


async def test_image_error_of_a_pod_that_was_replaced_does_not_end_the_job() -> None:
    """Somebody deleted the pod that could not pull its image. The new one pulls a large image without an error."""
    state = JobState(JobRef("PyTorchJob", "v1", "default", "job", "uid", "ti"), Handover())
    roles = {"Master": {"replicas": 1}, "Worker": {"replicas": 2}}
    state.job = {
        "kind": "PyTorchJob",
        "metadata": {"name": "job", "uid": "uid"},
        "spec": {"pytorchReplicaSpecs": roles},
    }
    old, new = (
        pod("a", "2026-01-01T10:00:00Z", "ErrImagePull"),
        pod("b", f"{timing.utc_now():%FT%TZ}", "ContainerCreating"),
    )
    state.pods.update({"a": old}, [], timing.utc_now())
    state.pods.update({"b": new}, ["a"], timing.utc_now())
    state.phase, state.phase_since = Phase.STARTING, time.monotonic() - 600
    api: Any = None
    events: Any = NoEvents()
    checks = StartupChecks(FollowContext(api, state, Lines()), events, lambda at: 0.0)
    assert await checks.find_failure(at_once=True) is None
