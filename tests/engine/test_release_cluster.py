"""Release on a cluster: what operators, garbage collector and kubelets do. test_release.py has all scenarios."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.identity.names import SUSPENDED_ANNOTATION
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.engine.api.job_calls import Observed, read_training
from airflow_provider_ktrain.engine.release import HurriedKill, release
from tests.engine.tasks import STUBBORN, Task, of_each_kind, present, release_job, until

pytestmark = pytest.mark.thorough

#: The Master ends and the Workers continue: `cleanPodPolicy: None` leaves them and their GPUs. The Master must still
#: run when its Workers start: their init containers look for it.
LEFT_BEHIND = "case $RANK in 0) sleep 15;; *) trap 'exit 143' TERM; sleep 600 & wait;; esac"


@of_each_kind
async def test_delete_waits_until_job_and_pods_are_gone(task: Task) -> None:
    ref = (await task.submit(workers=1)).ref
    await task.running(ref, 2)
    done = await release_job(task.api, ref)
    assert await task.job() is None
    assert not await task.pods(ref)
    assert "deleted. 2 GPUs released, 2 pods deleted." in done.text


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


async def test_only_running_pods_of_a_finished_job_are_deleted(task: Task) -> None:
    ref = (await task.submit(1, LEFT_BEHIND, workers=2, run_policy={"cleanPodPolicy": "None"})).ref
    await task.condition("Succeeded")
    await task.running(ref, 2)
    done = await release_job(task.api, ref, Mode.DELETE_PODS)
    assert not await task.holding(ref)
    assert "Succeeded" in (await task.pods(ref)).values()
    assert "2 GPUs released, 2 pods deleted." in done.text


async def test_timeout_includes_the_grace_period_of_pods(task: Task) -> None:
    ref = (await task.submit(1, STUBBORN, grace=3)).ref
    await task.started(ref)
    done = await release_job(task.api, ref, timeout=1)
    assert "1 GPU released, 1 pod deleted." in done.text
    assert done.seconds > 1
    assert not await task.pods(ref)


async def test_pods_left_by_an_orphaning_deletion_are_deleted(task: Task) -> None:
    ref = (await task.submit()).ref
    await task.running(ref)
    await task.delete("Orphan")

    async def gone() -> bool:
        return await task.job() is None

    await until(gone)
    assert await task.pods(ref)
    assert "1 GPU released, 1 pod deleted." in (await release_job(task.api, ref)).text
    assert not await task.pods(ref)


async def test_release_after_a_kill_takes_one_request(task: Task) -> None:
    submitted = await task.submit(1, STUBBORN, grace=20)
    await task.started(submitted.ref)
    read = await read_training(task.api, submitted.ref)
    done = await release(task.api, submitted.ref, HurriedKill(Mode.DELETE, Observed(present(read))), timeout=5)
    assert done.text == f"{submitted.ref} deleted. Its pods are being terminated."
    assert "deletionTimestamp" in (await task.job() or {})["metadata"]
