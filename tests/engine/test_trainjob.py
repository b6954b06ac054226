"""TrainJobs against an API server: failures that their status doesn't show, and objects that outlive them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS
from airflow_provider_ktrain.core.ending import Mode
from airflow_provider_ktrain.core.errors import ClusterError, ManifestError
from airflow_provider_ktrain.core.identity.names import JobRef, OnFinishAction
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.status import Phase, wants_suspension
from airflow_provider_ktrain.engine import job_control as operations
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError
from airflow_provider_ktrain.engine.api.job_calls import job_pods, list_pods
from airflow_provider_ktrain.engine.follow import startup
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.clusters import TestCluster
from tests.core.trainjobs import CREATED, jobs_status, pod, trainjob
from tests.engine.tasks import STUBBORN, TRAINS, EvictedApi, Lines, MeddledApi, TrainTask, api_of, release_job, until

Object = dict[str, Any]
TASK = TrainTask  #: of the fixture `task`


async def jobset(task: TrainTask) -> Object | None:
    try:
        path = f"/apis/{TRAINJOB.behavior.pod_owner.rpartition('/')[0]}/namespaces/{task.namespace}/jobsets/{task.name}"
        return await task.api.request("GET", path)
    except ApiStatusError as e:
        if e.status == 404:
            return None
        raise


# ---- pods


async def test_logs_of_all_nodes_by_completion_index(task: TrainTask) -> None:
    ref = (
        await task.submit(1, "echo rank $PET_NODE_RANK of $PET_NNODES; echo KTRAIN_RESULT $PET_NODE_RANK", workers=1)
    ).ref
    outcome = await task.ended(ref)
    assert (outcome.succeeded, outcome.result) == (True, 0)
    assert {"[node 0] rank 0 of 2", "[node 1] rank 1 of 2"} <= set(task.log.messages)
    assert f"{ref} is Running" in task.log.messages
    assert f"{ref} is Succeeded: jobset completed successfully" in task.log.messages


async def test_pods_of_a_foreign_jobset_are_ignored(task: TrainTask) -> None:
    """They have the label with its name, but the JobSet's owner is another object."""
    ref = (await task.submit(1)).ref
    await task.running(ref)
    (ours,) = await job_pods(task.api, ref)
    namesake = type(ref)(**{**ref.to_dict(), "uid": "another", "submission": ""})
    assert await list_pods(task.api, ref.namespace, ref.pod_selector)
    assert await job_pods(task.api, namesake) == []
    assert ours["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] == ref.name


class LogRequests(Api):
    """Returns no logs and records the requested ones."""

    def __init__(self) -> None:
        super().__init__(EvictedApi._no_client)
        self.asked: list[str] = []

    @contextlib.asynccontextmanager
    async def stream(self, path: str, **_: Any) -> AsyncIterator[Any]:
        self.asked.append(path.split("/")[-2])
        if self.asked:
            raise ApiStatusError(404, "NotFound")
        yield


async def test_launcher_is_the_primary_of_a_job_without_status() -> None:
    """The runtime defines the launcher. Its log contains the result."""
    api, log, launcher = LogRequests(), Lines(), pod("launcher")
    launcher["status"]["containerStatuses"] = [
        {"name": "node", "restartCount": 0, "state": {"running": {"startedAt": CREATED}}}
    ]
    launcher["metadata"]["namespace"] = "ns"
    launcher["spec"] = {"containers": [{"name": "node"}]}
    state = JobState(JobRef("TrainJob", "v1alpha1", "ns", "train", "j"), Handover())
    output = JobOutput(FollowContext(api, state, log, Options(logs="primary")))
    state.job = trainjob()
    output.observe({})
    state.job = trainjob(jobsStatus=jobs_status(node={}, launcher={}))
    output.observe({"l": launcher})

    async def asked() -> bool:
        return launcher["metadata"]["name"] in api.asked

    await until(asked)
    await output.follower.close()


# ---- restarts


async def test_restarts_by_jobset_are_followed_and_counted(task: TrainTask) -> None:
    """All pods are recreated with other names; the TrainJob's status doesn't show it."""
    policy = {"failurePolicy": {"maxRestarts": 1}}
    ref = (await task.submit(1, "sleep 1; echo attempt; exit 3", jobset=policy)).ref
    outcome = await task.ended(ref)
    assert outcome.phase is Phase.FAILED
    assert task.log.messages.count("[node 0] attempt") == 2
    assert any("node 0 restarted (1st time) after exit code 3" in line for line in task.log.messages)
    assert "exit code 3" in (outcome.cause or {})["summary"]


async def test_restarts_by_jobset_count_for_max_restarts(task: TrainTask) -> None:
    ref = (await task.submit(1, "sleep 1; exit 3", jobset={"failurePolicy": {"maxRestarts": 5}})).ref
    outcome = await task.ended(ref, limits=Limits(max_restarts=1))
    assert "max_restarts=1" in (outcome.cause or {})["summary"]
    assert await task.job() is None


# ---- failures that never reach the TrainJob


async def test_a_refused_jobset_is_found_by_its_event(task: TrainTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.5)
    monkeypatch.setitem(GRACE_SECONDS, "refusal", 1)
    ref = (await task.submit(1, role="a-replicated-job-with-a-name-that-is-too-long")).ref
    outcome = await task.ended(ref)
    assert outcome.cause is not None
    assert "can't create its JobSet: JobSet name is too long" in outcome.cause["summary"]
    assert await task.job() is None


async def test_a_refused_job_is_found_by_an_event_of_the_jobset(
    task: TrainTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.5)
    monkeypatch.setitem(GRACE_SECONDS, "refusal", 1)
    ref = (await task.submit(1, workers=-2)).ref
    outcome = await task.ended(ref)
    assert "can't create its Jobs: spec.parallelism: Invalid value: -1" in (outcome.cause or {})["summary"]


@pytest.mark.embedded("sets fault switches")
async def test_without_the_right_to_read_events_a_refused_jobset_ends_by_the_startup_limit(
    task: TrainTask, cluster: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "FIRST_INTERVAL_SECONDS", 0.5)
    cluster.admin("status", status=403, path="/events")
    try:
        ref = (await task.submit(1, role="a-replicated-job-with-a-name-that-is-too-long")).ref
        outcome = await task.ended(ref, limits=Limits(startup=2))
    finally:
        cluster.admin("clear")
    assert "had no pods within 2 s (startup_timeout)" in (outcome.cause or {})["summary"]
    assert "events of the job" in (outcome.cause or {})["resolution"]
    assert await task.job() is None


# ---- failed jobs


async def test_a_failed_job_is_suspended_before_its_jobset_can_come_back(task: TrainTask) -> None:
    """The runtime's TTL deletes the JobSet, and the TrainJob would train again (recording 60b)."""
    ref = (await task.submit(1, "sleep 1; exit 3", jobset={"ttlSecondsAfterFinished": 5})).ref
    first = await until(lambda: jobset(task))
    assert first is not None
    outcome = await task.ended(ref, deleted=False, on_finish_action=OnFinishAction.KEEP_JOB)
    assert outcome.phase is Phase.FAILED
    job = await task.job()
    assert job is not None
    assert wants_suspension(job)

    async def recreated() -> bool:
        found = await jobset(task)
        return found is not None and found["metadata"]["uid"] != first["metadata"]["uid"]

    await until(recreated)
    assert wants_suspension(await jobset(task) or {})
    assert not await task.holding(ref)

    async def failed_condition_is_gone() -> bool:
        conditions = ((await task.job() or {}).get("status") or {}).get("conditions") or ()
        return not any((c["type"], c["status"]) == ("Failed", "True") for c in conditions)

    await until(failed_condition_is_gone)
    again = await task.follow(ref, release=False)  # a triggerer that was restarted
    assert isinstance(again, Outcome)
    assert again.phase is Phase.FAILED
    retry = await task.submit(2)
    assert retry.created
    assert "it is the failed job of try 1. Replacing it." in str(task.log)


async def test_first_failed_condition_is_final(task: TrainTask, cluster: TestCluster) -> None:
    """Nobody suspends the job of a sensor: it trains again after the sensor has seen its failure."""
    ref = (await task.submit(1, "sleep 1; exit 3", jobset={"ttlSecondsAfterFinished": 0})).ref
    outcome = await task.follow(ref, release=False)
    assert isinstance(outcome, Outcome)
    assert (outcome.phase, outcome.succeeded) == (Phase.FAILED, False)


# ---- release


async def test_pods_are_gone_when_the_release_ends(task: TrainTask) -> None:
    """The TrainJob is deleted immediately, its pods after their grace period."""
    ref = (await task.submit(1, STUBBORN, grace=10)).ref
    await task.started(ref)
    releasing = asyncio.create_task(release_job(task.api, ref))

    async def gone() -> bool:
        return await task.job() is None

    await until(gone)
    assert await task.pods(ref)
    assert "1 GPU released, 1 pod deleted." in (await releasing).text
    assert not await list_pods(task.api, ref.namespace, ref.pod_selector)


class RequestOrder(MeddledApi):
    """Records its requests.

    :ivar made: the last parts of their paths.
    """

    made: list[str]

    async def before(self, method: str, path: str) -> None:
        if method == "GET":
            self.made.append(path.split("/")[-2] if "jobsets" in path else path.split("/")[-1])


async def test_pods_are_listed_after_the_jobset_is_gone(task: TrainTask, cluster: TestCluster) -> None:
    """An earlier list may miss pods: those of a JobSet that was created right before the TrainJob was deleted."""
    ref = (await task.submit(1, STUBBORN, grace=1)).ref
    await task.started(ref)
    async with api_of(cluster, RequestOrder) as api:
        api.made = []
        await release_job(api, ref)
    assert "jobsets" in api.made
    assert api.made[-1] == "pods"


async def test_job_is_created_after_earlier_pods_are_gone(task: TrainTask) -> None:
    """The name is free before the pods are deleted (recording 58), whoever deleted the job."""
    ref = (await task.submit(1, STUBBORN, grace=10)).ref
    await task.started(ref)
    (old,) = await task.pods(ref)
    await task.delete("Background")
    after = (await task.submit(2)).ref
    assert after.uid != ref.uid
    assert old not in {p["metadata"]["name"] for p in await list_pods(task.api, ref.namespace, ref.pod_selector)}


async def test_pods_that_are_not_deleted_are_named(task: TrainTask) -> None:
    ref = (await task.submit(1)).ref
    await task.running(ref)
    (pod,) = await task.pods(ref)
    await task.delete("Orphan")
    with pytest.raises(
        ClusterError, match=f"pods of an earlier job of this name(?s:.*){pod}(?s:.*)Nobody deletes them"
    ):
        await task.submit(2, deletion_patience=1)
    await task.api.request("DELETE", api_paths.pod_owner(ref), body={"propagationPolicy": "Background"})


async def test_job_that_appears_during_the_wait_is_adopted(task: TrainTask, cluster: TestCluster) -> None:
    """Two tries race: the pods that the later one finds belong to the earlier one's job."""
    first = await task.submit(1)
    await task.running(first.ref)
    again = await task.submit(1)
    assert again.ref.uid == first.ref.uid


class CreatesLate(MeddledApi):
    """Before its first create request, another try creates a TrainJob of the same name and deletes it.

    :ivar other: the task of that try.
    :ivar pods: the pods of its job.
    """

    other: TrainTask
    pods: set[str]

    async def before(self, method: str, path: str) -> None:
        if method == "POST" and path.endswith("/trainjobs") and not self.pods:
            ref = (await self.other.submit(1, STUBBORN, grace=10)).ref
            await self.other.started(ref)
            self.pods |= set(await self.other.pods(ref))
            await self.other.delete("Background")

            async def gone() -> bool:
                return await self.other.job() is None

            await until(gone)


async def test_a_job_that_was_created_beside_pods_of_another_try_is_created_again(
    task: TrainTask, cluster: TestCluster
) -> None:
    """Its try looked for pods before the other try's job existed, and created its job after that was deleted."""
    async with api_of(cluster, CreatesLate) as api:
        api.other, api.pods = task, set()
        submitted = await task.submit(1, api=api)
    assert submitted.created
    assert "is deleted and created again: pods of an earlier job of this name are left." in str(task.log)
    left = {pod["metadata"]["name"] for pod in await list_pods(task.api, task.namespace, submitted.ref.pod_selector)}
    assert not left & api.pods
    await task.running(submitted.ref)


async def test_job_released_right_after_its_creation_leaves_nothing(task: TrainTask) -> None:
    """The JobSet and its pods may appear while the TrainJob is being deleted."""
    for number in range(1, 11):
        ref = (await task.submit(number, first=number)).ref
        await release_job(task.api, ref)
        assert await jobset(task) is None
        assert not await list_pods(task.api, ref.namespace, ref.pod_selector)


class NoDeadline(MeddledApi):
    """Counts the deletions by propagation policy."""

    propagations: list[str]

    async def request(self, method: str, path: str, **how: Any) -> Object:
        if method == "DELETE" and "trainjobs" in path:
            self.propagations.append(how["body"]["propagationPolicy"])
        return await super().request(method, path, **how)


async def test_a_trainjob_is_never_deleted_in_the_foreground(task: TrainTask, cluster: TestCluster) -> None:
    """Kubeflow Trainer would recreate the JobSet during the deletion (recordings 53b, 53e)."""
    async with api_of(cluster, NoDeadline) as api:
        api.propagations = []
        ref = (await task.submit(1)).ref
        await task.running(ref)
        await release_job(api, ref)
        failed = (await task.submit(2, "exit 3", first=2)).ref
        await task.condition("Failed")
        await release_job(api, failed)
    assert api.propagations == ["Background", "Background"]


# ---- operations


async def test_scale_is_refused_with_the_reason(task: TrainTask) -> None:
    ref = (await task.submit(1, TRAINS)).ref
    with pytest.raises(ManifestError, match=r"can't be scaled: Kubeflow Trainer can't change .*KEP-2903"):
        await operations.scale(task.api, ref, 3, timeout=5)


async def test_suspend_and_resume(task: TrainTask) -> None:
    ref = (await task.submit(1, TRAINS)).ref
    await task.running(ref)
    (before,) = await task.pods(ref)
    assert "is suspended and its pods are gone" in await operations.suspend(task.api, ref, timeout=60)
    assert not await task.holding(ref)
    assert "is resumed" in await operations.resume(task.api, ref, timeout=60)
    await task.running(ref)
    assert list(await task.pods(ref)) != [before]
    await release_job(task.api, ref, Mode.DELETE)
