"""A failed TrainJob of a queue is kept from training again. Kueue doesn't change jobs whose Workload is finished."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.end_rules import Mode
from airflow_provider_ktrain.core.identity.names import OnFinishAction
from airflow_provider_ktrain.core.state.status import Phase
from tests.apiserver import ApiServer
from tests.engine.tasks import TrainTask, release_job

from .workloads import admit, end, is_suspended, operated, workload_name, write_workload

pytestmark = [
    pytest.mark.virtual_time,
    pytest.mark.parametrize("task", [TrainTask], indirect=True, ids=["trainjob"]),
]
ADMITTED, FINISHED = (
    {"type": type_, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-11-22T02:00:00Z"}
    for type_, reason in (("Admitted", "Admitted"), ("Finished", "Failed"))
)


def is_only_suspended(server: ApiServer, task: TrainTask) -> bool:
    """Whether the job is suspended, and its Workload active."""
    workload = server.objects["workloads"][workload_name(task)]
    return is_suspended(server.objects["trainjobs"][task.name]) and workload["spec"]["active"]


async def test_a_failed_job_that_is_kept_is_suspended(server: ApiServer, task: TrainTask) -> None:
    ref = (await task.submit(queue="team-a")).ref
    await write_workload(task.api, await task.job() or {}, [ADMITTED])
    async with operated(server, task):
        admit(server, task)
        await task.running(ref)
        end(server, task, exit_code=1)
        outcome = await task.ended(ref, deleted=False, on_finish_action=OnFinishAction.KEEP_JOB)
    assert outcome.phase is Phase.FAILED
    assert is_only_suspended(server, task)


async def test_a_job_that_trains_again_is_suspended_and_not_its_finished_workload(
    server: ApiServer, task: TrainTask
) -> None:
    """It lost its condition Failed before it could be suspended (recording 60b)."""
    ref = (await task.submit(queue="team-a")).ref
    await write_workload(task.api, await task.job() or {}, [ADMITTED, FINISHED])
    async with operated(server, task):
        admit(server, task)
        await task.running(ref)
        released = await release_job(task.api, ref, Mode.SUSPEND)
    assert "suspended. 1 GPU released, 1 pod deleted." in released.text
    assert is_only_suspended(server, task)
