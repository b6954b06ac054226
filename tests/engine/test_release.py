"""Release against an API server: what is deleted, kept or left unchanged, and the messages of failures."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity import SUSPENDED_ANNOTATION, JobRef, OnFinishAction, Owner
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.engine.api import ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.job_requests import job_pods
from airflow_provider_ktrain.engine.release import Mode, ReleaseError, mode_of, release
from tests.clusters import TestCluster
from tests.engine.tasks import EvictedApi, MeddledApi, NamesakeApi, Task, api_of, of_each_kind, until

STUBBORN = "trap '' TERM; echo started; sleep 600 & while true; do wait; done"
#: the Master ends and the Workers continue: `cleanPodPolicy: None` leaves them and their GPUs
#: the master must still run when its workers start: their init containers look for it
LEFT_BEHIND = "case $RANK in 0) sleep 15;; *) trap 'exit 143' TERM; sleep 600 & wait;; esac"


@pytest.mark.parametrize(
    ("action", "succeeded", "ended", "mode"),
    [
        ("delete_job", True, True, Mode.DELETE),
        ("delete_job", False, False, Mode.DELETE),
        ("keep_job", True, True, Mode.DELETE_PODS),
        ("keep_job", False, True, Mode.DELETE_PODS),
        ("keep_job", False, False, Mode.SUSPEND),
        ("delete_succeeded_job", True, True, Mode.DELETE),
        ("delete_succeeded_job", False, True, Mode.DELETE_PODS),
        ("delete_succeeded_job", False, False, Mode.SUSPEND),
    ],
)
def test_every_on_finish_action_releases_gpus(action: str, succeeded: bool, ended: bool, mode: Mode) -> None:
    assert mode_of(OnFinishAction(action), succeeded=succeeded, ended=ended) is mode


@of_each_kind
async def test_delete_waits_until_job_and_pods_are_gone(task: Task) -> None:
    ref = (await task.submit(workers=1)).ref
    await task.running(ref, 2)
    done = await release(task.api, ref)
    assert await task.job() is None
    assert not await task.pods(ref)
    assert (done.done, done.pods, done.gpus) == (True, 2, 2)
    assert "deleted. 2 GPUs released, 2 pods deleted." in done.text


async def test_job_pods_reads_all_pages(task: Task) -> None:
    ref = (await task.submit(workers=4)).ref
    await task.running(ref, 5)
    assert len(await job_pods(task.api, ref, page=2)) == 5


@of_each_kind
async def test_unscheduled_pods_do_not_count_as_gpus(task: Task) -> None:
    ref = (await task.submit(gpus=1000, workers=1)).ref

    async def made() -> bool:
        return len(await task.pods(ref)) == 2

    await until(made)
    done = await release(task.api, ref)
    assert (done.pods, done.gpus) == (2, 0)
    assert "deleted. No GPUs were held, 2 pods deleted." in done.text


@of_each_kind
async def test_release_is_idempotent(task: Task) -> None:
    ref = (await task.submit()).ref
    ends = await asyncio.gather(*(release(task.api, ref) for _ in range(4)))
    assert all(end.done for end in ends)
    again = await release(task.api, ref)
    assert (again.done, again.pods, again.gpus) == (True, 0, 0)


async def test_release_without_verify_returns_at_once(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=5)).ref
    await task.running(ref)
    done = await release(task.api, ref, verify=False)
    assert "deleted. 1 GPU will be released when 1 pod terminates." in done.text
    assert await task.pods(ref)
    job = await task.job()
    assert job is not None
    assert "foregroundDeletion" in job["metadata"]["finalizers"], "the job stays until its pods are gone"


# jobs that are kept


@of_each_kind
async def test_suspend_keeps_an_unfinished_job_without_pods(task: Task) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    done = await release(task.api, ref, Mode.SUSPEND)
    assert "suspended. 1 GPU released, 1 pod deleted." in done.text
    job = await task.job()
    assert job is not None
    assert wants_suspension(job)
    assert job["metadata"]["annotations"][SUSPENDED_ANNOTATION] == ref.owner
    assert not await task.holding(ref)


@pytest.mark.parametrize("mode", [Mode.DELETE_PODS, Mode.SUSPEND])
async def test_only_running_pods_of_a_finished_job_are_deleted(task: Task, mode: Mode) -> None:
    """With SUSPEND, the job has ended since it was seen running; suspending it would release nothing."""
    ref = (await task.submit(1, LEFT_BEHIND, workers=2, run_policy={"cleanPodPolicy": "None"})).ref
    await task.condition("Succeeded")
    await task.running(ref, 2)
    done = await release(task.api, ref, mode)
    assert not await task.holding(ref)
    assert "Succeeded" in (await task.pods(ref)).values()
    assert "2 GPUs released, 2 pods deleted." in done.text
    job = await task.job()
    assert job is not None
    assert not job["spec"]["runPolicy"].get("suspend")


async def test_failed_job_whose_pods_are_recreated_is_suspended() -> None:
    evicted = EvictedApi()
    done = await release(evicted, evicted.ref, Mode.DELETE_PODS, timeout=2, margin=-30)
    assert "suspended. No GPUs were held, 1 pod deleted." in done.text
    assert evicted.job is not None
    assert evicted.job["spec"] == {"runPolicy": {"suspend": True}}
    completed = EvictedApi(completionTime="2026-11-21T10:00:00Z")
    assert (
        "kept without running pods. No GPUs were held, 1 pod deleted."
        in (await release(completed, completed.ref, Mode.DELETE_PODS)).text
    )
    assert completed.job is not None
    assert not completed.job["spec"]


@of_each_kind
async def test_unfinished_job_of_a_kueue_queue_is_deleted(task: Task) -> None:
    """Kueue would resume it: its Workload is still admitted."""
    ref = (await task.submit(queue="team-a")).ref
    await task.running(ref)
    done = await release(task.api, ref, Mode.SUSPEND)
    assert "deleted. 1 GPU released, 1 pod deleted." in done.text
    assert done.text.endswith("\nIt was not suspended, because Kueue would resume it, and it has no Workload.")
    assert await task.job() is None


async def test_finished_job_of_a_kueue_queue_is_kept(task: Task) -> None:
    ref = (await task.submit(1, "true", queue="team-a")).ref
    await task.condition("Succeeded")
    assert "kept" in (await release(task.api, ref, Mode.SUSPEND)).text
    assert await task.job()


# jobs that are not changed


@of_each_kind
@pytest.mark.parametrize("mode", list(Mode))
async def test_job_of_another_try_is_not_released(task: Task, mode: Mode) -> None:
    ref = (await task.submit(1)).ref
    await task.submit(2)
    await task.running(ref)
    done = await release(task.api, ref, mode)
    assert not done.done
    assert "belongs to another try now. Nothing was released." in done.text
    assert list((await task.pods(ref)).values()) == ["Running"]
    assert Owner.of(await task.job() or {}) == task.owner(2)


@of_each_kind
async def test_new_job_of_the_same_name_is_not_released(task: Task) -> None:
    """After a clear, the next job has the same name and another uid."""
    ref = (await task.submit(1)).ref
    after = (await task.submit(2, first=2)).ref
    await task.running(after)
    await release(task.api, ref)
    job = await task.job()
    assert job is not None
    assert job["metadata"]["uid"] == after.uid
    assert "deletionTimestamp" not in job["metadata"]
    assert list((await task.pods(after)).values()) == ["Running"]


class Meddled(MeddledApi):
    """Another client writes to the job between our read and our write, a given number of times."""

    task: Task
    times = 1
    owner = 0  # the try that adopts the job; 0: only an irrelevant field changes

    async def before(self, method: str, path: str) -> None:
        if method not in ("DELETE", "PATCH") or self.task.kind.plural not in path or not self.times:
            return
        self.times -= 1
        if self.owner:
            await self.task.disown(self.owner)
        else:
            await self.task.patch({"metadata": {"annotations": {"tests.example/touched": str(self.times)}}})


@of_each_kind
@pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])
async def test_release_retries_after_a_concurrent_write(task: Task, cluster: TestCluster, mode: Mode) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    async with api_of(cluster, Meddled) as api:
        api.task, api.times = task, 3
        assert (await release(api, ref, mode)).done
        assert not api.times
    assert not await task.holding(ref)


@of_each_kind
@pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])
async def test_release_ends_after_a_concurrent_adoption(task: Task, cluster: TestCluster, mode: Mode) -> None:
    """An adoption keeps the uid. Without the resourceVersion, the release would delete the adopted job."""
    ref = (await task.submit(1)).ref
    await task.running(ref)
    async with api_of(cluster, Meddled) as api:
        api.task, api.owner = task, 2
        assert not (await release(api, ref, mode)).done
    assert list((await task.pods(ref)).values()) == ["Running"]
    assert Owner.of(await task.job() or {}) == task.owner(2)


# failures


async def test_error_names_pods_that_are_left_at_the_timeout(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=30)).ref
    await task.running(ref)
    with pytest.raises(
        ReleaseError,
        match=r"1 pod with 1 GPU still present 1 s after the deletion was requested\.\n"
        r"These are \S+-master-0\. See `kubectl get",
    ):
        await release(task.api, ref, timeout=1, margin=-29)


async def test_timeout_includes_the_grace_period_of_pods(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=3)).ref
    await task.running(ref)
    done = await release(task.api, ref, timeout=1)
    assert (done.done, done.pods, done.gpus) == (True, 1, 1)
    assert done.seconds > 1
    assert not await task.pods(ref)


async def test_job_that_a_finalizer_keeps_is_reported(task: Task) -> None:
    ref = (await task.submit(1, "true")).ref
    await task.patch({"metadata": {"finalizers": ["tests.example/hold"]}})
    done = await release(task.api, ref, timeout=1, margin=-29)
    await task.patch({"metadata": {"finalizers": None}})
    assert done.done
    assert "something keeps it, such as a finalizer" in done.text


async def test_pods_left_by_an_orphaning_deletion_are_deleted(task: Task) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    await task.delete("Orphan")

    async def gone() -> bool:
        return await task.job() is None

    await until(gone)
    assert await task.pods(ref)
    done = await release(task.api, ref)
    assert (done.pods, done.gpus) == (1, 1)
    assert not await task.pods(ref)


async def release_after_failures(task: Task, cluster: TestCluster, *, status: int) -> None:
    """Release a job while the API server answers three requests for it with `status`."""
    ref = (await task.submit()).ref
    cluster.admin("status", status=status, path=task.kind.plural, count=3)
    assert (await release(task.api, ref)).done
    assert await task.job() is None


@of_each_kind
@pytest.mark.embedded
async def test_release_retries_while_the_api_server_is_unreachable(task: Task, cluster: TestCluster) -> None:
    await release_after_failures(task, cluster, status=503)


@of_each_kind
@pytest.mark.embedded
async def test_release_retries_while_a_new_api_server_refuses_requests(task: Task, cluster: TestCluster) -> None:
    """An API server that has just started hasn't read the rights yet."""
    await release_after_failures(task, cluster, status=403)


@pytest.mark.embedded
@pytest.mark.parametrize("fault", ["drop", "refuse"])
async def test_release_fails_at_the_timeout_if_the_api_server_stays_unreachable(
    task: Task, cluster: TestCluster, fault: str
) -> None:
    """The error names the job that may still hold GPUs."""
    ref = (await task.submit()).ref
    await task.running(ref)
    cluster.admin(fault, seconds=20)

    async def away() -> bool:
        with contextlib.suppress(ApiUnavailable):
            return await task.job() is None
        return True

    await until(away)
    began = time.monotonic()
    with pytest.raises(ReleaseError, match=r"within 1 s: the API server cannot be reached\.\n.+\n.*kubectl delete -n"):
        await release(task.api, ref, timeout=1)
    assert time.monotonic() - began < 30, "nothing waits for pods that cannot be asked for"
    done = await release(task.api, ref, timeout=120)
    assert (done.done, done.gpus) == (True, 1), "it is released, and counted, once it is back"


@pytest.mark.embedded
async def test_release_does_not_wait_for_the_count_of_pods(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    cluster.admin("status", status=503, verb="list", path="/pods", count=1)
    done = await release(task.api, ref)
    assert "deleted. Its pods are gone; their GPUs were not counted." in done.text
    assert await task.job() is None


class SilentApi(EvictedApi):
    """Its API server accepts requests, and doesn't respond."""

    async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("the wait is endless")


async def test_error_of_a_release_without_any_response_has_its_reason() -> None:
    silent, first = SilentApi(), r"within 0 s: the API server cannot be reached\."
    with pytest.raises(ReleaseError, match=rf"{first}\nIt did not respond\.\nIts pods"):
        await release(silent, silent.ref, timeout=0.1)


class ContendedApi(EvictedApi):
    """Its operator writes to the job before each of our writes."""

    writes = 0

    async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        if method in ("DELETE", "PATCH"):
            self.writes += 1
            raise ApiStatusError(409, "Conflict", "the object has been modified")
        return await super().request(method, path, **how)


@pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])
async def test_release_pauses_between_conflicts_and_ends_with_an_error(mode: Mode) -> None:
    api = ContendedApi()
    with pytest.raises(ReleaseError, match=r"could not be released\.\n409 Conflict.*: the object has been modified"):
        await release(api, api.ref, mode, timeout=2)
    assert 1 < api.writes < 10, "pauses of 0, 0.05, 0.1, 0.2, 0.4, and then 0.5 seconds"


async def test_missing_right_is_an_error(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    async with api_of(cluster, token="nobody") as stranger:
        with pytest.raises(ReleaseError, match=r"could not be released\.\n401 Unauthorized"):
            await release(stranger, ref)


async def test_pods_of_a_job_without_our_labels_are_found(task: Task) -> None:
    """Like a deletion by the job control operators: the job has no owner, and its pods lack our labels."""
    ref = (await task.submit()).ref
    await task.running(ref)
    theirs = JobRef(ref.kind, ref.version, ref.namespace, ref.name, ref.uid)
    assert (await release(task.api, theirs)).gpus == 1


async def test_pods_of_the_next_tries_job_are_not_deleted() -> None:
    """Trainer before 2.2 can't label pods, and kubeflow-trainer-edit grants no right to read JobSets."""
    api = NamesakeApi(before="2026-11-22T10:00:00Z", after="2026-11-22T10:01:00Z")
    released = await release(api, api.ref, timeout=5)
    assert released.pods == 1
    assert [pod["metadata"]["name"] for pod in api.pods] == ["after"]
