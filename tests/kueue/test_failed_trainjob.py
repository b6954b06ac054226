"""A failed TrainJob of a queue is kept from training again. Kueue doesn't change jobs whose Workload is finished."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from airflow_provider_ktrain.core.ending import Mode
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.state.status import Phase, wants_suspension
from airflow_provider_ktrain.engine.api import kueue as requests
from airflow_provider_ktrain.engine.api.client import Api
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, TrainTask, release_job

from .workloads import write_workload

pytestmark = pytest.mark.embedded("writes the Workloads itself, where no Kueue runs")
ADMITTED, FINISHED = (
    {"type": type_, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-11-22T02:00:00Z"}
    for type_, reason in (("Admitted", "Admitted"), ("Finished", "Failed"))
)


@pytest.fixture
async def task(kueue: TestCluster, api: Api) -> AsyncIterator[TrainTask]:
    made = TrainTask(api, kueue.namespace)
    yield made
    await made.delete()


async def is_active(task: TrainTask) -> bool:
    """Whether the job's Workload is active."""
    found = await task.api.request("GET", requests.workloads_path("v1beta2", task.namespace))
    (workload,) = (w for w in found["items"] if w["metadata"]["name"] == f"trainjob-{task.name}-12345")
    return bool(workload["spec"]["active"])


async def test_a_failed_job_that_is_kept_is_suspended(task: TrainTask) -> None:
    ref = (await task.submit(1, "sleep 1; exit 3", queue="team-a", jobset={"ttlSecondsAfterFinished": 1})).ref
    await write_workload(task.api, await task.job() or {}, [ADMITTED])
    await task.patch({"spec": {"suspend": False}})
    outcome = await task.ended(ref, deleted=False, on_finish_action=OnFinishAction.KEEP_JOB)
    assert outcome.phase is Phase.FAILED
    assert wants_suspension(await task.job() or {})
    assert await is_active(task)


async def test_a_job_that_trains_again_is_suspended_and_not_its_finished_workload(task: TrainTask) -> None:
    """It lost its condition Failed before it could be suspended (recording 60b)."""
    ref = (await task.submit(1, TRAINS, queue="team-a")).ref
    await write_workload(task.api, await task.job() or {}, [ADMITTED, FINISHED])
    await task.patch({"spec": {"suspend": False}})
    await task.running(ref)
    released = await release_job(task.api, ref, Mode.SUSPEND)
    assert "suspended. 1 GPU released, 1 pod deleted." in released.text
    assert wants_suspension(await task.job() or {})
    assert await is_active(task)
