"""TrainJobs: failures that their status doesn't show, and objects that outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.errors import ClusterError, ManifestError
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.core.state.status import Phase, wants_suspension
from airflow_provider_ktrain.engine import job_control as operations
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.api.job_calls import job_pods, list_pods
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import connected
from tests.engine import scripted
from tests.engine.staged import NAME, Staged, staged
from tests.engine.tasks import STUBBORN, TRAINS, AnyCluster, MeddledApi, TrainTask, api_of, release_job, until

Object = dict[str, Any]
TASK = TrainTask  #: Class of the fixture `task`.
cluster, task = scripted.cluster, scripted.task
virtual_time = pytest.mark.virtual_time


@virtual_time
async def test_launcher_is_the_primary_of_a_job_without_status() -> None:
    """The runtime defines the launcher. Its log contains the result."""
    async with staged(TRAINJOB, roles=("node", "launcher")) as training:
        assert training.role == "launcher"
        training.start()
        training.line("KTRAIN_RESULT 7", role="launcher")
        training.pod(0, "Succeeded", role="launcher")
        training.ended()
        outcome = await training.follow(Options(logs="primary"))
        assert (outcome.succeeded, outcome.result) == (True, 7)


@virtual_time
async def test_an_initializer_that_fails_is_the_cause() -> None:
    async with staged(TRAINJOB, roles=("node", "model-initializer")) as training:
        training.pod(0, role="model-initializer")
        training.line("no token for the model", role="model-initializer")
        training.pod(0, "Failed", role="model-initializer", code=3)
        training.ended("Failed")
        outcome = await training.follow()
        assert outcome.phase is Phase.FAILED
        assert "model-initializer" in (outcome.cause or {})["summary"]
        assert "[model-initializer 0] no token for the model" in training.log.messages


# ---- restarts


@virtual_time
@pytest.mark.parametrize(("limit", "phase"), [(None, Phase.FAILED), (0, Phase.RUNNING)])
async def test_restarts_by_jobset_are_followed_and_counted(limit: int | None, phase: Phase) -> None:
    """All pods are recreated with other names; the TrainJob's status doesn't show it."""

    def restart() -> None:
        training.line("attempt")
        training.pod(0, "Failed", code=3)
        training.after(0.5, training.api.remove, "pods", training.pod_name())
        training.after(1.0, again)

    def again() -> None:
        training.attempt += 1
        training.pod(0, since=0.0)
        training.line("attempt")

    async with staged(TRAINJOB) as training:
        training.start()
        training.after(10.0, restart)
        training.after(20.0, training.end, 3)
        outcome = await training.follow(Options(limits=Limits(max_restarts=limit)))
        assert outcome.phase is phase
        assert training.log.messages.count("[node 0] attempt") == 2
        assert any("node 0 restarted (1st time) after exit code 3" in line for line in training.log.messages)
        cause = str(outcome.cause)
        assert "exit code 3" in cause
        assert ("max_restarts=0" in cause) is (limit == 0)
        assert training.exists is (limit is None)


# ---- failures that never reach the TrainJob


def refused_jobset(training: Staged) -> None:
    training.event("TrainJobResourcesCreationFailed", "JobSet name is too long", since=0.0)


def refused_jobs(training: Staged) -> None:
    """The event is about the JobSet."""
    owner = {"kind": "TrainJob", "name": NAME, "uid": training.ref.uid}
    training.api.put("jobsets", {"metadata": {"name": NAME, "ownerReferences": [owner]}, "spec": {}})
    training.event("JobCreationFailed", "spec.parallelism: Invalid value: -1", since=0.0)
    jobset = training.api.objects["jobsets"][NAME]
    about = {"kind": "JobSet", "name": NAME, "uid": jobset["metadata"]["uid"], "namespace": training.ref.namespace}
    training.api.change("events", f"event-{NAME}-jobcreationfailed", lambda event: event.update(involvedObject=about))


@virtual_time
@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (refused_jobset, "can't create its JobSet: JobSet name is too long"),
        (refused_jobs, "can't create its Jobs: spec.parallelism: Invalid value: -1"),
    ],
)
async def test_a_refused_object_is_found_by_its_event(refusal: Any, text: str) -> None:
    async with staged(TRAINJOB, since=0.0) as training:
        refusal(training)
        outcome = await training.follow()
        assert text in (outcome.cause or {})["summary"]
        assert 60.0 <= training.decided_after < 120.0, "the grace period of a refusal, and the next look"
        assert not training.exists


@virtual_time
async def test_without_the_right_to_read_events_a_refused_jobset_ends_by_the_startup_limit() -> None:
    async with staged(TRAINJOB, since=0.0) as training:
        refused_jobset(training)
        training.api.fail("GET", "/events", 403, math.inf)
        outcome = await training.follow(Options(limits=Limits(startup=120)))
        assert "had no pods within 120 s (startup_timeout)" in (outcome.cause or {})["summary"]
        assert "events of the job" in (outcome.cause or {})["resolution"]
        assert training.decided_after == 120.0


# ---- failed jobs


@virtual_time
async def test_failure_of_a_suspended_job_is_known_after_its_condition_is_gone() -> None:
    """The runtime's TTL deletes the JobSet, and the TrainJob would train again (recording 60b)."""
    async with staged(TRAINJOB) as training:
        training.start()
        training.end(3)
        options = Options(on_finish_action=OnFinishAction.KEEP_JOB)
        assert (await training.follow(options)).phase is Phase.FAILED
        assert wants_suspension(training.job)
        training.condition()
        again = await training.follow(Options(release=False))  # a triggerer that was restarted
        assert again.phase is Phase.FAILED


@virtual_time
async def test_first_failed_condition_is_final() -> None:
    """Nobody suspends the job of a sensor: it trains again after the sensor has seen its failure."""

    def train_again() -> None:
        training.api.remove("pods", training.pod_name())
        training.condition()
        training.attempt += 1
        training.pod(0, since=0.0)

    async with staged(TRAINJOB) as training:
        training.start()
        training.after(5.0, training.end, 3)
        training.after(5.5, train_again)
        outcome = await training.follow(Options(release=False))
        assert (outcome.phase, outcome.succeeded) == (Phase.FAILED, False)


# ---- release


@virtual_time
async def test_pods_are_listed_after_the_jobset_is_gone() -> None:
    """An earlier list may miss pods: those of a JobSet that was created right before the TrainJob was deleted."""
    async with staged(TRAINJOB) as training, connected(training.url) as api:
        training.start()
        training.api.put("jobsets", {"metadata": {"name": NAME, "uid": "jobset"}, "spec": {}})
        training.after(5.0, training.api.remove, "jobsets", NAME)
        await release_job(api, training.ref)
        made = [line.partition("?")[0] for line in training.api.requests]
        assert any("/jobsets/" in line for line in made)
        lists = [at for at, line in enumerate(made) if line.endswith("/pods")]
        assert len(lists) == 2, "the read, and once after it"
        assert lists[-1] > max(at for at, line in enumerate(made) if "/jobsets/" in line)


async def jobset(task: TrainTask) -> Object | None:
    try:
        path = f"/apis/{TRAINJOB.behavior.pod_owner.rpartition('/')[0]}/namespaces/{task.namespace}/jobsets/{task.name}"
        return await task.api.request("GET", path)
    except ApiStatusError as e:
        if e.status == 404:
            return None
        raise


@pytest.mark.scripted
async def test_pods_of_a_foreign_jobset_are_ignored(task: TrainTask) -> None:
    """They have the label with its name, but the JobSet's owner is another object."""
    ref = (await task.submit(1)).ref
    await task.running(ref)
    (ours,) = await job_pods(task.api, ref)
    namesake = type(ref)(**{**ref.to_dict(), "uid": "another", "submission": ""})
    assert await list_pods(task.api, ref.namespace, ref.pod_selector)
    assert await job_pods(task.api, namesake) == []
    assert ours["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] == ref.name


@pytest.mark.scripted
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


@pytest.mark.scripted
async def test_job_is_created_after_earlier_pods_are_gone(task: TrainTask) -> None:
    """The name is free before the pods are deleted (recording 58), whoever deleted the job."""
    ref = (await task.submit(1, STUBBORN, grace=10)).ref
    await task.started(ref)
    (old,) = await task.pods(ref)
    await task.delete("Background")
    after = (await task.submit(2)).ref
    assert after.uid != ref.uid
    assert old not in {p["metadata"]["name"] for p in await list_pods(task.api, ref.namespace, ref.pod_selector)}


@pytest.mark.scripted
async def test_pods_that_are_not_deleted_are_named(task: TrainTask) -> None:
    ref = (await task.submit(1)).ref
    await task.running(ref)
    (pod,) = await task.pods(ref)
    await task.delete("Orphan")
    with pytest.raises(
        ClusterError, match=f"pods of an earlier job of this name(?s:.*){pod}(?s:.*)Nobody deletes them"
    ):
        await task.submit(2, deletion_patience=1)
    with contextlib.suppress(ApiStatusError):
        await task.api.request("DELETE", api_paths.pod_owner(ref), body={"propagationPolicy": "Background"})


@pytest.mark.scripted
async def test_job_that_appears_during_the_wait_is_adopted(task: TrainTask, cluster: AnyCluster) -> None:
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


@pytest.mark.scripted
async def test_a_job_that_was_created_beside_pods_of_another_try_is_created_again(
    task: TrainTask, cluster: AnyCluster
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


@pytest.mark.scripted
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


@pytest.mark.scripted
async def test_a_trainjob_is_never_deleted_in_the_foreground(task: TrainTask, cluster: AnyCluster) -> None:
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


@pytest.mark.scripted
async def test_scale_is_refused_with_the_reason(task: TrainTask) -> None:
    ref = (await task.submit(1, TRAINS)).ref
    with pytest.raises(ManifestError, match=r"can't be scaled: Kubeflow Trainer can't change .*KEP-2903"):
        await operations.scale(task.api, ref, 3, timeout=5)


@pytest.mark.scripted
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
