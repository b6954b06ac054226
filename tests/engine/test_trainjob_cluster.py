"""TrainJobs on a cluster: what Kubeflow Trainer and JobSet do. The tests of test_trainjob.py run there, too."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.startup_rules import GRACE_SECONDS
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.core.state.status import Phase, wants_suspension
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.follow import startup
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.clusters import TestCluster
from tests.engine.tasks import STUBBORN, MeddledApi, TrainTask, api_of, release_job, until

Object = dict[str, Any]
TASK = TrainTask  #: Class of the fixture `task`.
pytestmark = pytest.mark.thorough


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
    later = api.made[len(api.made) - api.made[::-1].index("jobsets") :]
    assert "pods" in later
