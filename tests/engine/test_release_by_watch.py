"""A release in a process that watches the job: the watches take the place of reads, and prove what is gone."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity import DEPLOYMENT_LABEL, JobRef
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import MakeClient
from airflow_provider_ktrain.engine.follow.observer import subscriptions
from airflow_provider_ktrain.engine.job_view import JobView, current_phase, job_view
from airflow_provider_ktrain.engine.release import Mode, release
from airflow_provider_ktrain.engine.wakeup import Wakeup
from airflow_provider_ktrain.engine.watch.informer import SharedInformer
from airflow_provider_ktrain.engine.watch.subscription import Subscription
from tests.clusters import TestCluster
from tests.core.trainjobs import pod, trainjob
from tests.engine.tasks import MeddledApi, Task, TrainTask, api_of, soon, until

Object = dict[str, Any]
Disturb = Callable[[], Awaitable[object]]


class RecordingApi(MeddledApi):
    """Records its requests, and calls `disturb` once, before the first DELETE of a job."""

    def __init__(self, make_client: MakeClient) -> None:
        super().__init__(make_client)
        self.made: list[str] = []
        self.disturb: Disturb | None = None

    async def before(self, method: str, path: str) -> None:
        disturb, self.disturb = (self.disturb, None) if method == "DELETE" else (None, self.disturb)
        if disturb is not None:
            await disturb()
        self.made.append(f"{method} {path}")


class LabelledTrainTask(TrainTask):
    """A TrainJob whose pods have our labels, as those of operators have with Trainer 2.2 and newer."""

    def stamped(self, built: Object, number: int, submission: str) -> Object:
        labels = {"metadata": {"labels": self.owner(number).key.labels(submission)}}
        node = {"name": "node", "template": {"spec": {"template": labels}}}
        patch: Object = {"template": {"spec": {"replicatedJobs": [node]}}}
        built["spec"]["runtimePatches"] = [{"manager": "tests.local/labels", "trainingRuntimeSpec": patch}]
        return super().stamped(built, number, submission)


@contextlib.asynccontextmanager
async def watched(
    task: Task, cluster: TestCluster, ref: JobRef, *, shared: bool = False
) -> AsyncIterator[RecordingApi]:
    """A client that watches the job and its pods, and has recorded no request yet."""
    async with api_of(cluster, RecordingApi) as api, contextlib.AsyncExitStack() as watches:
        jobs, pods = [await watches.enter_async_context(to) for to in subscriptions(api, ref, shared=shared)]
        known = await task.pods(ref)

        async def synced() -> bool:
            async with job_view(api, ref) as view:
                return view is not None and len(pods.objects) == len(known)

        async def current() -> bool:
            job = await task.job() or {}
            held = jobs.objects.get(ref.uid) or job
            return bool(held["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"])

        await until(synced)
        await until(current)
        api.made.clear()
        yield api


async def finished(task: Task, ref: JobRef) -> None:
    """Wait until the job has ended."""

    async def ended() -> bool:
        return phase_of(await task.job()).ended

    await until(ended)


@pytest.mark.parametrize("shared", [False, True])
async def test_watches_replace_all_reads(task: Task, cluster: TestCluster, shared: bool) -> None:
    ref = (await task.submit(workers=1)).ref
    await task.running(ref, 2)
    async with watched(task, cluster, ref, shared=shared) as api:
        done = await release(api, ref)
    assert await task.job() is None
    assert not await task.pods(ref)
    assert (done.done, done.pods, done.gpus) == (True, 2, 2)
    assert {request for request in api.made if request != f"GET {task.path}"} == {f"DELETE {task.path}"}
    if api.made.count(f"DELETE {task.path}") == 1:  # else the operator has changed the job at the same time
        assert len(api.made) == 1


async def test_succeeded_job_whose_pods_have_succeeded_needs_no_request(task: Task, cluster: TestCluster) -> None:
    """The job is deleted afterwards, when its outcome is stored."""
    ref = (await task.submit(1, "true")).ref
    await finished(task, ref)
    async with watched(task, cluster, ref) as api:
        done = await release(api, ref, spare_ended=True)
        assert await current_phase(api, ref) is Phase.SUCCEEDED
        assert api.made == []
    assert (done.done, done.kept) == (True, True)
    assert "has ended. 1 pod had ended, no GPUs were left to release." in done.text


async def test_pods_of_a_kept_job_are_listed(task: Task, cluster: TestCluster) -> None:
    """Nothing would remove a pod that the watch hasn't shown yet."""
    ref = (await task.submit(1, "true")).ref
    await finished(task, ref)
    async with watched(task, cluster, ref) as api:
        assert (await release(api, ref, Mode.DELETE_PODS, spare_ended=True)).done
        assert f"GET {api_paths.core(ref.namespace, 'pods')}" in api.made


async def test_job_that_has_changed_is_read_before_it_is_deleted(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    async with watched(task, cluster, ref) as api:
        api.disturb = lambda: task.patch({"metadata": {"annotations": {"changed": "yes"}}})
        assert (await release(api, ref)).done
        assert f"GET {task.path}" in api.made
        assert api.made.count(f"DELETE {task.path}") >= 2
    assert await task.job() is None


async def test_job_that_was_adopted_meanwhile_is_kept(task: Task, cluster: TestCluster) -> None:
    """The watch doesn't show the new owner yet; the fence does."""
    ref = (await task.submit()).ref
    await task.running(ref)
    async with watched(task, cluster, ref) as api:
        api.disturb = lambda: task.disown(2)
        done = await release(api, ref)
    assert not done.done
    assert "belongs to another try" in done.text
    assert list((await task.pods(ref)).values()) == ["Running"]


async def test_pods_are_listed_if_a_watch_ends(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    async with watched(task, cluster, ref) as api:

        async def disturb() -> None:
            for informer in list(api.informers.values()):
                assert isinstance(informer, SharedInformer)
                await informer.close()

        api.disturb = disturb
        done = await release(api, ref)
        assert f"GET {api_paths.core(ref.namespace, 'pods')}" in api.made
    assert (done.done, done.gpus) == (True, 1)
    assert await task.job() is None


async def test_job_that_lost_its_label_does_not_count_as_deleted(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    async with watched(task, cluster, ref, shared=True) as api, job_view(api, ref) as view:
        assert view is not None
        await task.patch({"metadata": {"labels": {DEPLOYMENT_LABEL: None}}})
        assert not await view.wait(lambda view: view.job is None, soon(60))
        assert view.job is None


@pytest.mark.parametrize("task", [LabelledTrainTask], indirect=True)
@pytest.mark.parametrize("shared", [False, True])
async def test_watch_replaces_repeated_lists_of_a_trainjobs_pods(
    task: TrainTask, cluster: TestCluster, shared: bool
) -> None:
    """It is deleted in the background: when the watch shows that its pods are gone, that is verified once."""
    ref = (await task.submit(workers=1)).ref
    await task.running(ref, 2)
    async with watched(task, cluster, ref, shared=shared) as api:
        done = await release(api, ref)
    assert (done.done, done.pods, done.gpus) == (True, 2, 2)
    assert not await task.pods(ref)
    deletions = api.made.count(f"DELETE {task.path}")
    reads = Counter(request for request in api.made if request.startswith("GET"))
    assert reads[f"GET {api_paths.core(ref.namespace, 'pods')}"] == 1
    assert reads[f"GET {api_paths.pod_owner(ref)}"] == 1
    assert reads[f"GET {task.path}"] == deletions  # Kubeflow Trainer may write its status before the first deletion


@pytest.mark.parametrize("task", [LabelledTrainTask], indirect=True)
async def test_succeeded_trainjob_whose_pods_have_ended_needs_no_request(task: TrainTask, cluster: TestCluster) -> None:
    ref = (await task.submit(1, "true")).ref
    await finished(task, ref)
    async with watched(task, cluster, ref) as api:
        done = await release(api, ref, spare_ended=True)
        assert api.made == []
    assert (done.done, done.kept) == (True, True)


@pytest.mark.parametrize("task", [TrainTask], indirect=True)
async def test_watch_of_pods_that_do_not_show_their_job_is_not_used(task: TrainTask, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    async with api_of(cluster) as api, contextlib.AsyncExitStack() as watches:
        _, pods = [await watches.enter_async_context(to) for to in subscriptions(api, ref, shared=False)]

        async def synced() -> bool:
            return bool(pods.objects)

        await until(synced)
        async with job_view(api, ref) as view:
            assert view is None
        assert (await release(api, ref)).gpus == 1
    assert not await task.pods(ref)


async def test_ended_initializer_does_not_show_that_the_training_has_ended() -> None:
    """The watch of the pods may not have the nodes yet."""
    ref = JobRef("TrainJob", "v1alpha1", "ns", "train", "t")
    jobs, pods = Subscription(), Subscription()
    view = JobView(ref, (), (jobs, pods), Wakeup())
    for role, expected in (("dataset-initializer", False), ("node", True)):
        ended = pod(role, phase="Succeeded")
        pods.objects[ended["metadata"]["uid"]] = ended
        assert await view.is_left_to_operator(trainjob()) is expected
