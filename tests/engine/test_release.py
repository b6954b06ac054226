"""Release against an API server: what is deleted, kept or left unchanged, and the messages of failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import pytest

from airflow_provider_ktrain.core.ending import Mode
from airflow_provider_ktrain.core.identity.names import SUBMISSION_LABEL, SUSPENDED_ANNOTATION, JobRef, Owner
from airflow_provider_ktrain.core.state.queue.kueue_status import QUEUE_LABEL
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.engine import release as releasing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api import job_calls as job_requests
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.api.job_calls import JobChanged, JobRead, job_pods, read_training
from airflow_provider_ktrain.engine.release import (
    ReleaseError,
    fitting_mode,
    release,
    release_now,
    release_others,
)
from tests.clusters import TestCluster
from tests.engine.tasks import (
    STUBBORN,
    EvictedApi,
    MeddledApi,
    NamesakeApi,
    Task,
    api_of,
    of_each_kind,
    release_job,
    until,
)

Object = dict[str, Any]
REF = JobRef("PyTorchJob", "v1", "ns", "train", "j", submission="s")
#: the Master ends and the Workers continue: `cleanPodPolicy: None` leaves them and their GPUs
#: the master must still run when its workers start: their init containers look for it
LEFT_BEHIND = "case $RANK in 0) sleep 15;; *) trap 'exit 143' TERM; sleep 600 & wait;; esac"


def ended_job(condition: str = "Succeeded", **spec: Any) -> Object:
    return {
        "kind": REF.kind, "metadata": {"name": REF.name, "uid": REF.uid, "resourceVersion": "1"}, "spec": spec,
        "status": {"conditions": [{"type": condition, "status": "True"}]},
    }  # fmt: skip


class RecordedApi(Api):
    """A cluster with one job and its pods, which records its requests.

    Each pod is on a node with one GPU. A deleted pod is gone at once, and so is a deleted job with its pods.
    """

    def __init__(self, job: Object | None, **phases: str) -> None:
        super().__init__(EvictedApi._no_client)
        self.job, self.made = job, list[str]()
        self.fails: dict[str, Exception] = {}  # by the name of the request; TimeoutError: it is never answered
        self.recreates = self.cleans_up = False  # whether the operator replaces deleted pods; deletes running pods
        self.pods: dict[str, Object] = {}
        for name, phase in phases.items():
            self.add(name, phase)

    def add(self, name: str, phase: str) -> None:
        limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
        self.pods[name] = {
            "metadata": {"name": name, "uid": f"{name}-{phase}", "labels": {SUBMISSION_LABEL: "s"}},
            "spec": {"nodeName": "node", "terminationGracePeriodSeconds": 0, "containers": [limits]},
            "status": {"phase": phase},
        }  # fmt: skip

    async def request(self, method: str, path: str, *, body: Any = None, **_: Any) -> Object:
        plural, name = path.split("/")[-2:]
        what = f"{method} {'job' if path == api_paths.job(REF) else 'pods' if name == 'pods' else plural}"
        self.made.append(what)
        error = self.fails.get(what)
        if isinstance(error, TimeoutError):
            await asyncio.Event().wait()
        if error is not None:
            raise error
        return getattr(self, f"_{what.lower().replace(' ', '_')}")(name, body) or {}

    def _get_job(self, name: str, _: Any) -> Object:
        if self.job is None:
            raise ApiStatusError(404, "NotFound")
        return self.job

    def _delete_job(self, name: str, body: Any) -> None:
        self._get_job(name, None)
        self.job, self.pods = None, {}

    def _patch_job(self, name: str, body: Any) -> Object:
        job = self._get_job(name, None)
        job["metadata"]["resourceVersion"] += "1"
        return job

    def _patch_workloads(self, name: str, body: Any) -> None:
        self.workload = body

    def _get_pods(self, name: str, _: Any) -> Object:
        found = list(self.pods.values())
        if self.cleans_up:
            self.pods = {name: pod for name, pod in self.pods.items() if pod["status"]["phase"] != "Running"}
        return {"items": found}

    def _delete_pods(self, name: str, _: Any) -> None:
        if not self.recreates:
            del self.pods[name]


@pytest.mark.parametrize(
    ("condition", "deleting", "fitting"),
    [
        ("Running", False, {Mode.DELETE: Mode.DELETE, Mode.SUSPEND: Mode.SUSPEND, Mode.DELETE_PODS: Mode.SUSPEND}),
        ("Running", True, {Mode.DELETE: Mode.DELETE, Mode.SUSPEND: Mode.DELETE, Mode.DELETE_PODS: Mode.DELETE}),
        (
            "Succeeded",
            False,
            {Mode.DELETE: Mode.DELETE, Mode.SUSPEND: Mode.DELETE_PODS, Mode.DELETE_PODS: Mode.DELETE_PODS},
        ),
    ],
)
def test_mode_fits_the_state_of_the_job(condition: str, deleting: bool, fitting: dict[Mode, Mode]) -> None:
    job = ended_job(condition)
    if deleting:
        job["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    assert {mode: fitting_mode(REF, job, mode) for mode in Mode} == fitting
    assert {fitting_mode(REF, None, mode) for mode in Mode} == {Mode.DELETE}


@of_each_kind
async def test_delete_waits_until_job_and_pods_are_gone(task: Task) -> None:
    ref = (await task.submit(workers=1)).ref
    await task.running(ref, 2)
    done = await release_job(task.api, ref)
    assert await task.job() is None
    assert not await task.pods(ref)
    assert "deleted. 2 GPUs released, 2 pods deleted." in done.text


async def test_job_pods_reads_all_pages(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = (await task.submit(workers=4)).ref
    await task.running(ref, 5)
    monkeypatch.setattr(job_requests, "PAGE_SIZE", 2)
    assert len(await job_pods(task.api, ref)) == 5


@of_each_kind
async def test_unscheduled_pods_do_not_count_as_gpus(task: Task) -> None:
    ref = (await task.submit(gpus=1000, workers=1)).ref

    async def made() -> bool:
        return len(await task.pods(ref)) == 2

    await until(made)
    done = await release_job(task.api, ref)
    assert "deleted. No GPUs were held, 2 pods deleted." in done.text


@of_each_kind
async def test_release_is_idempotent(task: Task) -> None:
    ref = (await task.submit()).ref
    await asyncio.gather(*(release_job(task.api, ref) for _ in range(4)))
    again = await release_job(task.api, ref)
    assert "is gone. No pods were left." in again.text


async def test_release_without_verify_returns_at_once(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=20)).ref
    await task.started(ref)
    done = await release_job(task.api, ref, verify=False)
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
    done = await release_job(task.api, ref, Mode.SUSPEND)
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
    done = await release_job(task.api, ref, mode)
    assert not await task.holding(ref)
    assert "Succeeded" in (await task.pods(ref)).values()
    assert "2 GPUs released, 2 pods deleted." in done.text
    job = await task.job()
    assert job is not None
    assert not job["spec"]["runPolicy"].get("suspend")


async def test_failed_job_whose_pods_are_recreated_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "GRACE_MARGIN_SECONDS", -30)
    evicted = EvictedApi()
    done = await release_job(evicted, evicted.ref, Mode.DELETE_PODS, timeout=2)
    assert "suspended. No GPUs were held, 1 pod deleted." in done.text
    assert evicted.job is not None
    assert evicted.job["spec"] == {"runPolicy": {"suspend": True}}
    completed = EvictedApi(completionTime="2026-11-21T10:00:00Z")
    assert (
        "kept without running pods. No GPUs were held, 1 pod deleted."
        in (await release_job(completed, completed.ref, Mode.DELETE_PODS)).text
    )
    assert completed.job is not None
    assert not completed.job["spec"]


@pytest.mark.usefixtures("without_kueue")
@of_each_kind
async def test_unfinished_job_of_a_kueue_queue_is_deleted(task: Task) -> None:
    """Kueue would resume it: its Workload is still admitted."""
    ref = (await task.submit(queue="team-a")).ref
    await task.running(ref)
    done = await release_job(task.api, ref, Mode.SUSPEND)
    assert "deleted. 1 GPU released, 1 pod deleted." in done.text
    assert done.text.endswith("\nIt was not suspended, because Kueue would resume it, and it has no Workload.")
    assert await task.job() is None


@pytest.mark.usefixtures("without_kueue")
async def test_finished_job_of_a_kueue_queue_is_kept(task: Task) -> None:
    ref = (await task.submit(1, "true", queue="team-a")).ref
    await task.condition("Succeeded")
    assert "kept" in (await release_job(task.api, ref, Mode.SUSPEND)).text
    assert await task.job()


# jobs that are not changed


@of_each_kind
@pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])
async def test_job_that_another_try_has_adopted_since_the_read_is_not_released(task: Task, mode: Mode) -> None:
    """An adoption keeps the uid. Without the resourceVersion, the release would delete the adopted job."""
    ref = (await task.submit(1)).ref
    await task.running(ref)
    read = await read_training(task.api, ref)
    await task.submit(2)
    with pytest.raises(JobChanged, match="has changed since it was read"):
        await release(task.api, ref, mode, read)
    with pytest.raises(JobChanged):
        await release_now(task.api, ref, mode, read.job or {}, timeout=5)
    assert list((await task.pods(ref)).values()) == ["Running"]
    assert Owner.of(await task.job() or {}) == task.owner(2)


@of_each_kind
@pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])
async def test_job_that_has_vanished_since_the_read_is_read_again(task: Task, mode: Mode) -> None:
    ref = (await task.submit()).ref
    read = await read_training(task.api, ref)
    await release_job(task.api, ref)
    with pytest.raises(JobChanged):
        await release(task.api, ref, mode, read)


async def test_job_of_others_is_left_if_that_is_decided(task: Task) -> None:
    ref = (await task.submit(1)).ref
    await task.running(ref)
    assert await release_others(task.api, ref, lambda _: None) is None
    assert list((await task.pods(ref)).values()) == ["Running"]


@of_each_kind
async def test_new_job_of_the_same_name_is_not_released(task: Task) -> None:
    """After a clear, the next job has the same name and another uid."""
    ref = (await task.submit(1)).ref
    after = (await task.submit(2, first=2)).ref
    await task.running(after)
    await release_job(task.api, ref)
    job = await task.job()
    assert job is not None
    assert job["metadata"]["uid"] == after.uid
    assert "deletionTimestamp" not in job["metadata"]
    assert list((await task.pods(after)).values()) == ["Running"]


class Meddled(MeddledApi):
    """Another client writes to the job between our read and our write, a given number of times."""

    task: Task
    times = 3

    async def before(self, method: str, path: str) -> None:
        if method in ("DELETE", "PATCH") and self.task.kind.plural in path and self.times:
            self.times -= 1
            await self.task.patch({"metadata": {"annotations": {"tests.example/touched": str(self.times)}}})


@of_each_kind
@pytest.mark.parametrize("mode", [Mode.DELETE, Mode.SUSPEND])
async def test_release_of_others_decides_again_after_a_concurrent_write(
    task: Task, cluster: TestCluster, mode: Mode
) -> None:
    ref, reads = (await task.submit()).ref, 0

    def decide(read: JobRead) -> Mode:
        nonlocal reads
        reads += 1
        return mode

    await task.running(ref)
    async with api_of(cluster, Meddled) as api:
        api.task = task
        done = await release_others(api, ref, decide)
        assert done is not None
        assert ("suspended." if mode is Mode.SUSPEND else "deleted.") in done.text
    assert reads >= 4
    assert not await task.holding(ref)


# failures


async def test_error_names_pods_that_are_left_at_the_timeout(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = (await task.submit(1, STUBBORN, grace=30)).ref
    await task.started(ref)
    monkeypatch.setattr(releasing, "GRACE_MARGIN_SECONDS", -29)
    with pytest.raises(
        ReleaseError,
        match=r"1 pod with 1 GPU still present 1 s after the deletion was requested\.\n"
        r"These are \S+-master-0\. See `kubectl get",
    ):
        await release_job(task.api, ref, timeout=1)
    monkeypatch.undo()


async def test_timeout_includes_the_grace_period_of_pods(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=3)).ref
    await task.started(ref)
    done = await release_job(task.api, ref, timeout=1)
    assert "1 GPU released, 1 pod deleted." in done.text
    assert done.seconds > 1
    assert not await task.pods(ref)


async def test_job_that_a_finalizer_keeps_is_reported(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "GRACE_MARGIN_SECONDS", -29)
    ref = (await task.submit(1, "true")).ref
    await task.patch({"metadata": {"finalizers": ["tests.example/hold"]}})
    try:
        done = await release_job(task.api, ref, timeout=1)
    finally:  # else the namespace of the tests would stay, too
        await task.patch({"metadata": {"finalizers": None}})
    assert "something keeps it, such as a finalizer" in done.text


async def test_pods_left_by_an_orphaning_deletion_are_deleted(task: Task) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    await task.delete("Orphan")

    async def gone() -> bool:
        return await task.job() is None

    await until(gone)
    assert await task.pods(ref)
    done = await release_job(task.api, ref)
    assert "1 GPU released, 1 pod deleted." in done.text
    assert not await task.pods(ref)


async def release_after_failures(task: Task, cluster: TestCluster, *, status: int) -> None:
    """Release a job while the API server answers three requests for it with `status`."""
    ref = (await task.submit()).ref
    cluster.admin("status", status=status, path=task.kind.plural, count=3)
    await release_others(task.api, ref, lambda _: Mode.DELETE)
    assert await task.job() is None


@of_each_kind
@pytest.mark.embedded("sets fault switches")
async def test_release_retries_while_the_api_server_is_unreachable(task: Task, cluster: TestCluster) -> None:
    await release_after_failures(task, cluster, status=503)


@of_each_kind
@pytest.mark.embedded("sets fault switches")
async def test_release_retries_while_a_new_api_server_refuses_requests(task: Task, cluster: TestCluster) -> None:
    """An API server that has just started hasn't read the rights yet."""
    await release_after_failures(task, cluster, status=403)


@pytest.mark.embedded("sets fault switches")
@pytest.mark.parametrize("fault", ["drop", "refuse"])
async def test_release_fails_at_the_timeout_if_the_api_server_stays_unreachable(
    task: Task, cluster: TestCluster, fault: str
) -> None:
    """The error names the job that may still hold GPUs."""
    ref = (await task.submit()).ref
    await task.running(ref)
    read = await read_training(task.api, ref)
    cluster.admin(fault, seconds=20)

    async def away() -> bool:
        with contextlib.suppress(ApiUnavailable):
            return await task.job() is None
        return True

    await until(away)
    began = time.monotonic()
    with pytest.raises(ReleaseError, match=r"within 1 s: the API server can't be reached\.\n.+\n.*kubectl delete -n"):
        await release_others(task.api, ref, lambda _: Mode.DELETE, timeout=1)
    with pytest.raises(ReleaseError, match="within 1 s: the API server can't be reached"):
        await release(task.api, ref, Mode.DELETE, read, timeout=1)
    assert time.monotonic() - began < 30, "nothing waits for pods that cannot be asked for"
    done = await release_others(task.api, ref, lambda _: Mode.DELETE, timeout=120)
    assert done is not None
    assert "1 GPU released" in done.text, "it is released, and counted, once it is back"


class SilentApi(EvictedApi):
    """Its API server accepts requests, and doesn't respond."""

    async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("the wait is endless")


async def test_error_of_a_release_without_any_response_has_its_reason() -> None:
    silent, first = SilentApi(), r"within 0 s: the API server can't be reached\."
    with pytest.raises(ReleaseError, match=rf"{first}\nIt did not respond\.\nIts pods"):
        await release_others(silent, silent.ref, lambda _: Mode.DELETE, timeout=0.1)


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
    with pytest.raises(ReleaseError, match=r"because it kept changing\.\n.*\n409 Conflict.*: the object has been mod"):
        await release_others(api, api.ref, lambda _: mode, timeout=2)
    assert 1 < api.writes < 10, "pauses of 0, 0.05, 0.1, 0.2, 0.4, and then 0.5 seconds"


async def test_missing_right_is_an_error(task: Task, cluster: TestCluster) -> None:
    ref = (await task.submit()).ref
    async with api_of(cluster, token="nobody") as stranger:
        with pytest.raises(ReleaseError, match=r"could not be released\.\n401 Unauthorized"):
            await release_others(stranger, ref, lambda _: Mode.DELETE)


async def test_pods_of_a_job_without_our_labels_are_found(task: Task) -> None:
    """Like a deletion by the job control operators: the job has no owner, and its pods lack our labels."""
    ref = (await task.submit()).ref
    await task.running(ref)
    theirs = JobRef(ref.kind, ref.version, ref.namespace, ref.name, ref.uid)
    assert "1 GPU released" in (await release_job(task.api, theirs)).text


async def test_pods_of_the_next_tries_job_are_not_deleted() -> None:
    """Trainer before 2.2 can't label pods, and kubeflow-trainer-edit grants no right to read JobSets."""
    api = NamesakeApi(before="2026-11-22T10:00:00Z", after="2026-11-22T10:01:00Z")
    released = await release_job(api, api.ref, timeout=5)
    assert "1 pod deleted." in released.text
    assert [pod["metadata"]["name"] for pod in api.pods] == ["after"]


# requests


@pytest.mark.parametrize("phase", ["Succeeded", "Running"])
async def test_requests_of_a_deletion(phase: str) -> None:
    api = RecordedApi(ended_job(), master=phase)
    read = await read_training(api, REF)
    api.made.clear()
    done = await release(api, REF, Mode.DELETE, read)
    assert api.made == ["DELETE job", "GET job", "GET pods"]
    assert ("1 GPU released, 1 pod deleted." in done.text) is (phase == "Running")


async def test_kept_job_without_running_pods_takes_one_list() -> None:
    api = RecordedApi(ended_job(), master="Succeeded", worker="Failed")
    read = await read_training(api, REF)
    api.made.clear()
    done = await release(api, REF, Mode.DELETE_PODS, read)
    assert api.made == ["GET pods"]
    assert done.text.endswith("kept without running pods.")


async def test_job_that_is_being_deleted_is_not_deleted_again() -> None:
    job = ended_job("Running")
    job["metadata"]["deletionTimestamp"] = "2026-11-21T10:00:00Z"
    api = RecordedApi(job, master="Running")
    read = await read_training(api, REF)
    api.job, api.pods = None, {}
    api.made.clear()
    assert "deleted. 1 GPU released, 1 pod deleted." in (await release(api, REF, Mode.DELETE, read)).text
    assert api.made == ["GET job", "GET pods"]


async def test_pod_that_appears_after_the_read_is_deleted_and_counted() -> None:
    """The operator has replaced a Worker when the Master ended, and leaves it running (`cleanPodPolicy: None`)."""
    api = RecordedApi(ended_job(), master="Succeeded", worker="Failed")
    read = await read_training(api, REF)
    api.add("worker", "Running")
    done = await release(api, REF, Mode.DELETE_PODS, read)
    assert list(api.pods) == ["master"]
    assert "1 GPU released, 1 pod deleted." in done.text


async def test_pods_that_the_operator_cleans_up_are_left_to_it() -> None:
    api = RecordedApi(ended_job(runPolicy={"cleanPodPolicy": "Running"}), master="Succeeded", worker="Running")
    read = await read_training(api, REF)
    api.cleans_up = True
    assert "1 GPU released" in (await release(api, REF, Mode.DELETE_PODS, read)).text
    assert "DELETE pods" not in api.made
    api.cleans_up = False
    api.add("worker", "Running")
    read = await read_training(api, REF)
    assert "1 GPU released" in (await release(api, REF, Mode.DELETE_PODS, read)).text
    assert api.made.count("DELETE pods") == 1, "the operator doesn't delete them in time"


@pytest.mark.virtual_time
@pytest.mark.parametrize("timeout", [0.6, 0.7, 0.8, 0.9])
async def test_pods_that_are_replaced_until_the_timeout_are_named(
    timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pause between two checks must not end in the timeout of a request."""
    monkeypatch.setattr(releasing, "GRACE_MARGIN_SECONDS", 0)
    api = RecordedApi(ended_job(), master="Running")
    api.recreates = True
    read = await read_training(api, REF)
    with pytest.raises(ReleaseError, match="1 pod with 1 GPU still present"):
        await release(api, REF, Mode.DELETE_PODS, read, timeout=timeout)


# kills


async def test_release_after_a_kill_takes_one_request(task: Task) -> None:
    submitted = await task.submit(1, STUBBORN, grace=20)
    await task.started(submitted.ref)
    read = await read_training(task.api, submitted.ref)
    done = await release_now(task.api, submitted.ref, Mode.DELETE, read.job or {}, timeout=5)
    assert done.text == f"{submitted.ref} deleted. Its pods are being terminated."
    assert "deletionTimestamp" in (await task.job() or {})["metadata"]


@pytest.mark.parametrize(
    ("condition", "mode", "text", "requests"),
    [
        ("Running", Mode.DELETE, "deleted. Its pods are being terminated.", ["DELETE job"]),
        ("Running", Mode.SUSPEND, "suspended. Its pods are being terminated.", ["PATCH job"]),
        ("Succeeded", Mode.DELETE, "deleted. Its pods are being terminated.", ["DELETE job"]),
        ("Succeeded", Mode.SUSPEND, "has ended and is kept. Its running pods are not deleted.", []),
    ],
)
async def test_requests_after_a_kill(condition: str, mode: Mode, text: str, requests: list[str]) -> None:
    job = ended_job(condition)
    api = RecordedApi(job, master="Running")
    assert (await release_now(api, REF, mode, job, timeout=5)).text == f"{REF} {text}"
    assert api.made == requests


def queued_job() -> Object:
    job = ended_job("Running")
    job["metadata"]["labels"] = {QUEUE_LABEL: "queue"}
    return job


OWNED = dataclasses.replace(REF, owner="ti-1")
WORKLOAD: Object = {
    "apiVersion": "kueue.x-k8s.io/v1beta2", "metadata": {"name": "w", "uid": "w", "resourceVersion": "1"},
}  # fmt: skip


async def test_job_of_a_queue_is_paused_by_its_workload_after_a_kill() -> None:
    """Its Workload may have changed since it was seen."""
    job = queued_job()
    api = RecordedApi(job)
    done = await release_now(api, OWNED, Mode.SUSPEND, job, timeout=5, workload=WORKLOAD)
    assert done.text == f"{REF} paused by its Workload. Its pods are being terminated."
    assert api.made == ["PATCH job", "PATCH workloads"]
    assert api.workload == {"metadata": {"uid": "w"}, "spec": {"active": False}}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (TimeoutError(), "its Workload could not be deactivated in time"),
        (ApiUnavailable("cut"), "its Workload could not be deactivated in time"),
        (ApiStatusError(403, "Forbidden"), "its Workload could not be deactivated (403 Forbidden)"),
    ],
)
async def test_job_of_a_queue_that_cannot_be_paused_in_time_is_deleted(error: Exception, why: str) -> None:
    job = queued_job()
    api = RecordedApi(job)
    api.fails["PATCH workloads"] = error
    done = await release_now(api, OWNED, Mode.SUSPEND, job, timeout=0.4, workload=WORKLOAD)
    assert done.text == (
        f"{REF} deleted. Its pods are being terminated.\n"
        f"It was not suspended, because Kueue would resume it, and {why}."
    )
    assert api.made[-1] == "DELETE job"


async def test_job_of_a_queue_with_unknown_workload_is_deleted_after_a_kill() -> None:
    job = queued_job()
    api = RecordedApi(job)
    await release_now(api, OWNED, Mode.SUSPEND, job, timeout=5)
    assert api.made == ["DELETE job"]


async def test_job_whose_workload_is_finished_is_suspended_after_a_kill() -> None:
    job = queued_job()
    finished = {**WORKLOAD, "status": {"conditions": [{"type": "Finished", "status": "True"}]}}
    api = RecordedApi(job)
    await release_now(api, OWNED, Mode.SUSPEND, job, timeout=5, workload=finished)
    assert api.made == ["PATCH job"]


async def test_kill_that_is_not_answered_is_an_error() -> None:
    job = ended_job("Running")
    api = RecordedApi(job)
    api.fails["DELETE job"] = TimeoutError()
    with pytest.raises(ReleaseError, match="could not be released within 0 s"):
        await release_now(api, REF, Mode.DELETE, job, timeout=0.1)


def waiting_pod(*, deleted: bool) -> Object:
    """A Worker that still waits for its Master. Its program hasn't begun."""
    meta: Object = {"name": "w", "uid": "w-Pending", "labels": {SUBMISSION_LABEL: "s"}}
    if deleted:
        meta |= {"deletionTimestamp": "2026-11-24T10:00:30Z", "deletionGracePeriodSeconds": 30}
    init = {"name": "init-pytorch", "state": {"running": {"startedAt": "2026-11-24T10:00:00Z"}}}
    return {"metadata": meta, "spec": {"containers": [{"name": "pytorch"}]},
            "status": {"phase": "Pending", "initContainerStatuses": [init],
                       "containerStatuses": [{"name": "pytorch", "state": {"waiting": {}}}]}}  # fmt: skip


async def test_delete_carries_uid_and_version_of_the_job_that_was_read() -> None:
    bodies: list[Object] = []

    class Recording(RecordedApi):
        def _delete_job(self, name: str, body: Any) -> None:
            bodies.append(body)
            super()._delete_job(name, body)

    await release_job(Recording(ended_job()), REF, Mode.DELETE)
    assert [body["preconditions"] for body in bodies] == [{"uid": REF.uid, "resourceVersion": "1"}]


@pytest.mark.parametrize("deleted", [False, True])
async def test_worker_that_waits_for_the_master_of_an_ended_job_has_a_second(deleted: bool) -> None:
    """Its shell is PID 1 and ignores SIGTERM: it would hold GPUs for 30 s, also if the operator deletes it."""
    bodies: list[Object] = []

    class Recording(RecordedApi):
        def _delete_pods(self, name: str, body: Any) -> None:
            bodies.append(body)
            super()._delete_pods(name, body)

    api = Recording(ended_job())
    api.pods["w"] = waiting_pod(deleted=deleted)
    done = await release_job(api, REF, Mode.DELETE_PODS)
    assert "1 pod deleted." in done.text
    assert bodies == [{"gracePeriodSeconds": 1, "preconditions": {"uid": "w-Pending"}}]


@pytest.mark.parametrize("refused", [False, True])
async def test_worker_that_waits_for_the_master_of_a_deleted_job_has_a_second(refused: bool) -> None:
    """After Ctrl-C the command would wait for the whole grace period, of 30 s by default."""
    bodies: list[Object] = []

    class Recording(RecordedApi):
        def _delete_pods(self, name: str, body: Any) -> None:
            bodies.append(body)
            if refused:
                raise ApiStatusError(403, "Forbidden", "no right to delete pods")

    api = Recording(ended_job("Running"))
    api.pods["w"] = waiting_pod(deleted=False)
    done = await release_job(api, REF, Mode.DELETE)
    assert done.text.startswith(f"{REF} deleted.")
    assert bodies == [{"gracePeriodSeconds": 1, "preconditions": {"uid": "w-Pending"}}]


@pytest.mark.parametrize("error", [ApiUnavailable("no response within 30 s"), TimeoutError()])
async def test_api_server_that_is_away_is_asked_once_to_end_waiting_pods(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 Workers that wait, each with a request that isn't answered within 30 s, would stop a release for 2 hours."""
    monkeypatch.setattr(releasing, "WAITING_PODS_SECONDS", 0.2)
    api = RecordedApi(ended_job("Running"))
    for number in range(3):
        pod = waiting_pod(deleted=False)
        api.pods[f"w{number}"] = {**pod, "metadata": {**pod["metadata"], "uid": f"w{number}"}}
    api.fails["DELETE pods"] = error
    done = await asyncio.wait_for(release_job(api, REF, Mode.DELETE), 120)
    assert done.text.startswith(f"{REF} deleted.")
    assert api.made.count("DELETE pods") == 1


async def test_waiting_for_a_grace_period_is_logged(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releasing, "WAIT_NOTICE_SECONDS", 1.0)
    ref = (await task.submit(1, STUBBORN, grace=10)).ref
    await task.started(ref)
    lines: list[str] = []
    await release(task.api, ref, Mode.DELETE, await read_training(task.api, ref), say=lines.append)
    (line,) = lines
    assert f"Waiting for the pods of {ref} to end" in line
    assert "its grace period of 10 s is over" in line
