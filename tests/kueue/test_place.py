"""The job's place in its queue, where Kueue's visibility API may be read."""

from __future__ import annotations

import asyncio
import math

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.apiserver import NAMESPACE, ApiServer, Response, connected, served
from tests.engine.tasks import Lines, until

from .test_status import PENDING

pytestmark = pytest.mark.virtual_time

JOB = {
    "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {},
    "metadata": {"name": "train", "uid": "u-1", "labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
}  # fmt: skip


def pending_workloads(names: list[str]) -> Response:
    """A LocalQueue as the visibility API shows it."""
    items = [
        {"metadata": {"name": name}, "positionInLocalQueue": 0, "positionInClusterQueue": at}
        for at, name in enumerate(names)
    ]
    return Response(200, {"kind": "PendingWorkloadsSummary", "metadata": {"name": "team-a"}, "items": items})


@pytest.mark.parametrize("readable", [True, False])
async def test_the_place_in_the_queue_is_shown_where_it_may_be_read(readable: bool) -> None:
    api, log, waiting = ApiServer(), Lines(), ["other", "pytorchjob-train-1"]
    owner = {"uid": "u-1", "controller": True, "kind": "PyTorchJob", "name": "train"}
    meta = {"name": "pytorchjob-train-1", "ownerReferences": [owner]}
    spec = {"queueName": "team-a", "podSets": []}
    api.put("workloads", {"metadata": meta, "spec": spec, "status": {"conditions": [PENDING]}})
    if readable:
        api.replace("GET", "visibility", lambda request, _: pending_workloads(waiting), math.inf, processed=False)
    else:
        api.fail("GET", "visibility", 403, float("inf"))
    state = JobState(JobRef("PyTorchJob", "v1", NAMESPACE, "train", "u-1"), Handover())
    state.job = JOB
    state.enter(Phase.QUEUED)
    async with served(api) as url, connected(url) as client:
        follower = QueueFollower(FollowContext(client, state, log))

        async def shows(place: int | None) -> bool:
            await follower.update()
            return follower.status is not None and follower.status.place == place

        try:
            await until(lambda: shows(2 if readable else None))
            assert (follower.due is not None) is readable
            if readable:
                waiting.remove("other")
                await until(lambda: shows(1))
        finally:
            await follower.close()
            await asyncio.sleep(0)
    why = f"{PENDING['reason']}: {PENDING['message']}"
    assert log.messages[0] == f"Queued in LocalQueue team-a: {why}{' (place 2 in the queue)' if readable else ''}"
    assert not [line for line in log.messages if "right" in line]
    (asked,) = {line.partition(" ")[2] for line in api.requests if "visibility" in line}
    assert not [line for line in api.requests if "queues" in line and "visibility" not in line]
    assert (
        asked == f"/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/localqueues/team-a/pendingworkloads"
    )
