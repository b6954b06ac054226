"""Releases in a process whose watch of the pods is behind its watch of the job."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest

from airflow_provider_ktrain.core.identity import SUBMISSION_LABEL, JobRef
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api
from airflow_provider_ktrain.engine.follow.observer import subscriptions
from airflow_provider_ktrain.engine.job_view import job_view
from airflow_provider_ktrain.engine.release import ReleaseError, release
from tests.engine.model_watches import History, Stream, WatchingApi
from tests.engine.tasks import until

Object = dict[str, Any]
REF = JobRef("PyTorchJob", "v1", "ns", "train", "j", submission="s")
JOB, PODS = api_paths.job(REF), api_paths.core("ns", "pods")


class EndedJobApi(WatchingApi):
    """A job whose Master has succeeded and whose Worker has failed. Its watches deliver nothing after their lists."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.histories = {api_paths.jobs(PYTORCHJOB, "v1", "ns"): History(), PODS: History()}
        super().__init__(self.histories, self.streams)
        self.made: list[str] = []
        self.recreates = False  # whether deleted pods are replaced at once
        self.pods: dict[str, Object] = {}
        self.add_pod("master", "Succeeded")
        self.add_pod("worker", "Failed")

    def add_pod(self, role: str, phase: str) -> None:
        self.pods[f"train-{role}-0"] = {
            "metadata": {"name": f"train-{role}-0", "uid": f"{role}-{phase}", "resourceVersion": "1",
                         "labels": {SUBMISSION_LABEL: "s", "training.kubeflow.org/replica-type": role}},
            "spec": {"nodeName": "node", "containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]},
            "status": {"phase": phase},
        }  # fmt: skip

    async def request(self, method: str, path: str, *, query: Mapping[str, str] | None = None, **_: Any) -> Object:
        self.made.append(f"{method} {path}")
        job = {
            "kind": REF.kind, "metadata": {"name": REF.name, "uid": REF.uid, "resourceVersion": "1"},
            "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}},
            "status": {"conditions": [{"type": "Succeeded", "status": "True"}]},
        }  # fmt: skip
        if path == JOB:
            return job
        if method == "DELETE":
            name = path.rpartition("/")[2]
            return self.pods[name] if self.recreates else self.pods.pop(name)
        items = list(self.pods.values()) if path == PODS else [job]
        return copy.deepcopy({"kind": "List", "items": items, "metadata": {"resourceVersion": "1"}})


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[EndedJobApi]:
    """An API that watches the ended job and its pods."""
    api = EndedJobApi()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(api.close)
        for subscription in subscriptions(cast(Api, api), REF, shared=False):
            await stack.enter_async_context(subscription)

        async def synced() -> bool:
            async with job_view(cast(Api, api), REF) as view:
                return view is not None and view.is_complete

        await until(synced)
        api.made.clear()
        yield api


async def test_pod_that_the_watch_does_not_show_yet_is_deleted() -> None:
    """The operator has replaced a Worker when the Master ended, and leaves it running (`cleanPodPolicy: None`)."""
    async with watched() as api:
        api.add_pod("worker", "Running")
        done = await release(cast(Api, api), REF, spare_ended=True)
    assert list(api.pods) == ["train-master-0"]
    assert (done.done, done.kept, done.gpus) == (True, True, 1)


@pytest.mark.parametrize("timeout", [0.6, 0.7, 0.8, 0.9])
async def test_pods_that_are_replaced_until_the_timeout_are_named(timeout: float) -> None:
    """The last pause between two rounds must not end in the timeout of a request."""
    async with watched() as api:
        api.add_pod("worker", "Running")
        api.pods["train-worker-0"]["spec"]["terminationGracePeriodSeconds"] = 0
        api.recreates = True
        with pytest.raises(ReleaseError, match="1 pod with 1 GPU still present"):
            await release(cast(Api, api), REF, spare_ended=True, timeout=timeout, margin=0)


async def test_ended_pods_of_a_kept_job_are_listed_once() -> None:
    async with watched() as api:
        done = await release(cast(Api, api), REF, spare_ended=True)
        assert api.made == [f"GET {PODS}"]
    assert (done.done, done.kept, done.gpus) == (True, True, 0)
