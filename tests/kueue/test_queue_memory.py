"""The follower of a queue in several processes: its clock, the evictions, and what was logged."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.state.accelerators import GPU
from airflow_provider_ktrain.core.state.queue.kueue_status import QueuePhase
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import kueue as requests
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.follow import queueing
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import JobState
from tests.apiserver import ApiServer
from tests.engine.tasks import Task, of_each_kind, until

from .test_follow import EVICTED_FOR_GOOD
from .test_weak_evidence import NEVER_FITS
from .workloads import admit, end, operated, until_logged, workload_name, write_workload

pytestmark = pytest.mark.virtual_time
PREEMPTED = {
    "type": "Evicted", "status": "True", "reason": "Preempted", "message": "Preempted to accommodate a workload",
    "lastTransitionTime": "2026-11-22T02:00:00Z",
}  # fmt: skip
RESERVED = {
    "type": "QuotaReserved", "status": "True", "reason": "QuotaReserved", "message": "",
    "lastTransitionTime": "2026-11-22T01:00:00Z",
}  # fmt: skip


async def state_of(task: Task, handover: Handover | None = None, **overlay: Any) -> JobState:
    """The state of a job that waits in a queue."""
    state = JobState((await task.submit(queue="team-a", **overlay)).ref, handover or Handover())
    state.job = await task.job()
    state.enter(Phase.QUEUED)
    return state


@contextlib.asynccontextmanager
async def follower_of(api: Api, state: JobState, task: Task) -> AsyncIterator[QueueFollower]:
    follower = QueueFollower(FollowContext(api, state, task.log))
    try:
        yield follower
    finally:
        await follower.close()


@contextlib.asynccontextmanager
async def following(task: Task, state: JobState, phase: QueuePhase) -> AsyncIterator[QueueFollower]:
    """A follower that has seen the phase."""
    async with follower_of(task.api, state, task) as follower:
        await until(lambda: _reaches(follower, phase))
        yield follower


async def _reaches(follower: QueueFollower, phase: QueuePhase) -> bool:
    await follower.update()
    return follower.status is not None and follower.status.phase is phase


async def set_conditions(task: Task, *conditions: dict[str, str]) -> None:
    path = requests.workloads_path("v1beta2", task.namespace, workload_name(task))
    body = {"status": {"conditions": list(conditions)}}
    await task.api.request("PATCH", f"{path}/status", body=body)


@of_each_kind
async def test_clock_of_a_job_that_never_fits_begins_again_in_the_next_process(task: Task) -> None:
    """A Workload doesn't show since when it has had its reason."""
    state = await state_of(task)
    await write_workload(task.api, state.known_job, [NEVER_FITS])
    for handover in (Handover(), Handover(handed_over_at=timing.epoch() - 3600)):
        state = await state_of(task, handover)
        async with following(task, state, QueuePhase.NEVER_FITS) as follower:
            await asyncio.sleep(599)
            assert await follower.find_failure() is None
            await asyncio.sleep(2)
            cause = await follower.find_failure()
        assert cause is not None
        assert cause.summary.startswith(f"{state.ref} can't run: ExceedsMaxQuota: couldn't assign flavors")


async def test_another_phase_starts_the_clock_again(task: Task) -> None:
    state = await state_of(task)
    await write_workload(task.api, state.known_job, [])
    async with following(task, state, QueuePhase.QUEUED) as follower:
        await asyncio.sleep(601)
        await set_conditions(task, NEVER_FITS)
        await until(lambda: _reaches(follower, QueuePhase.NEVER_FITS))
        assert await follower.find_failure() is None


async def test_evictions_are_counted_and_logged_once_in_all_processes(task: Task) -> None:
    """Kueue before 0.13 doesn't count them, and a Workload shows only the last one."""
    state = await state_of(task)
    await write_workload(task.api, state.known_job, [RESERVED, PREEMPTED])
    async with following(task, state, QueuePhase.EVICTED):
        pass
    seen_at = epoch_seconds(PREEMPTED["lastTransitionTime"]) or 0.0
    later = await state_of(task, Handover(metrics=state.metrics, handed_over_at=seen_at + 60))
    async with following(task, later, QueuePhase.EVICTED) as follower:
        assert (later.metrics["queue.evictions"], later.metrics["queue.preemptions"]) == (1, 1)
        again = {**PREEMPTED, "reason": "PodsReadyTimeout", "lastTransitionTime": "2026-11-22T03:00:00Z"}
        await set_conditions(task, RESERVED, again)
        await until(lambda: _evictions(follower, later, 2))
        assert later.metrics["queue.preemptions"] == 1
    evictions = [line for line in task.log.messages if "lost its admission" in line]
    assert [line.partition("\n")[0].partition("(")[2] for line in evictions] == [
        "1 time so far)", "2 times so far)",
    ]  # fmt: skip


@pytest.mark.parametrize("seen_before", [0, 1])
async def test_eviction_that_the_process_before_did_not_see_is_counted_and_logged(task: Task, seen_before: int) -> None:
    """Its time has no fractions of a second, and the watch may have been behind or refused."""
    state = await state_of(task)
    await write_workload(task.api, state.known_job, [RESERVED, PREEMPTED])
    path = requests.workloads_path("v1beta2", task.namespace, workload_name(task))
    evictions = [{"reason": "Preempted", "count": seen_before + 1}]
    await task.api.request("PATCH", f"{path}/status", body={"status": {"schedulingStats": {"evictions": evictions}}})
    at = epoch_seconds(PREEMPTED["lastTransitionTime"]) or 0.0
    before = {"log.lines": 1.0, **({"queue.evictions": float(seen_before)} if seen_before else {})}
    later = await state_of(task, Handover(metrics=before, handed_over_at=at + 0.5))
    async with following(task, later, QueuePhase.EVICTED):
        pass
    assert later.metrics["queue.evictions"] == seen_before + 1
    times = "1 time" if not seen_before else "2 times"
    assert sum(f"is queued again ({times} so far)" in line for line in task.log.messages) == 1


async def _evictions(follower: QueueFollower, state: JobState, number: int) -> bool:
    await follower.update()
    return state.metrics["queue.evictions"] == number


async def test_workloads_are_watched_as_soon_as_the_right_is_granted(server: ApiServer, task: Task) -> None:
    state = await state_of(task)
    await write_workload(task.api, state.known_job, [NEVER_FITS])
    server.fail("GET", "/workloads", 403, math.inf)
    async with follower_of(task.api, state, task) as follower:
        await until(lambda: _refused(follower, task))
        assert follower.status is None
        assert follower.due is not None
        server.clear_failures()
        began = timing.now()
        await until(lambda: _sees(follower), 1000)
        assert timing.now() - began == pytest.approx(queueing.FORBIDDEN_RETRY_SECONDS, abs=1)
    assert sum("Can't read Kueue's Workloads" in line for line in task.log.messages) == 1


async def test_missing_right_is_logged_by_the_first_process(server: ApiServer, task: Task) -> None:
    state = await state_of(task, Handover(handed_over_at=timing.epoch()))
    server.fail("GET", "/workloads", 403, math.inf)
    async with follower_of(task.api, state, task) as follower:
        for _ in range(20):
            await _step(follower)
        assert follower.due is not None
    assert not any("Can't read Kueue's Workloads" in line for line in task.log.messages)


async def test_right_that_is_lost_later_is_logged_by_the_next_process(server: ApiServer, task: Task) -> None:
    state = await state_of(task, Handover(handed_over_at=timing.epoch()))
    await write_workload(task.api, state.known_job, [NEVER_FITS])
    async with follower_of(task.api, state, task) as follower:
        await until(lambda: _sees(follower))
        server.fail("GET", "/workloads", 403, math.inf)
        server.cut()
        await until(lambda: _refused(follower, task), 1000)
    assert sum("Can't read Kueue's Workloads" in line for line in task.log.messages) == 1


async def _refused(follower: QueueFollower, task: Task) -> bool:
    await _step(follower)
    return any("Can't read Kueue's Workloads" in line for line in task.log.messages)


async def _sees(follower: QueueFollower) -> bool:
    await _step(follower)
    return follower.status is not None


async def _step(follower: QueueFollower) -> None:
    """What the observer does: wait for a change, and look at it."""
    await asyncio.sleep(0.1)
    await follower.update()


UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
}  # fmt: skip
CRASHED = {
    "name": "pytorch", "restartCount": 3, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 3, "reason": "Error", "finishedAt": "2026-11-22T02:00:00Z"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "category", "why", "detail"),
    [
        ({"phase": "Pending", "conditions": [UNSCHEDULABLE]}, Category.SCHEDULING,
         "was given up by Kueue, its pods were not ready: Master 0 can't be scheduled: 0/1 nodes are available",
         "nodeSelector gpu=a100"),
        ({"phase": "Running", "containerStatuses": [CRASHED]}, Category.USER_CODE,
         "was given up by Kueue, its pods were not ready: Master 0 failed with exit code 3", "RequeuingLimit"),
        ({"phase": "Running"}, Category.QUEUE,
         "can't run: Kueue gave up on the job: DeactivatedDueToRequeuingLimitExceeded: The workload", "RequeuingLimit"),
    ],
)  # fmt: skip
async def test_the_job_whose_pods_were_never_ready_fails_with_what_kept_them(
    task: Task, status: Any, category: Category, why: str, detail: str
) -> None:
    state = await state_of(task)
    labels = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    meta = {"name": f"{task.name}-master-0", "uid": "p-1", "creationTimestamp": "2026-11-22T01:00:00Z"}
    pod = {"metadata": {**meta, "labels": labels}, "spec": {"nodeSelector": {"gpu": "a100"}}, "status": status}
    state.pods.update({"p-1": pod}, (), timing.utc_now())
    state.pods.mark_deleted({**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-11-22T02:05:00Z"}})
    gave_up = {**EVICTED_FOR_GOOD, "message": "The workload is deactivated due to RequeuingLimit"}
    await write_workload(task.api, state.known_job, [gave_up], active=False)
    async with following(task, state, QueuePhase.GIVEN_UP) as follower:
        await asyncio.sleep(61)
        cause = await follower.find_failure()
    assert cause is not None
    assert cause.category == category
    assert cause.summary.startswith(f"{state.ref} {why}")
    assert detail in cause.detail


async def test_a_sensor_waits_for_a_job_that_kueue_gave_up_on(server: ApiServer, task: Task) -> None:
    """The job isn't the sensor's: somebody may activate its Workload."""
    ref = (await task.submit(queue="team-a")).ref
    await write_workload(task.api, (await task.job()) or {}, [EVICTED_FOR_GOOD], active=False)
    async with operated(server, task):
        waiting = asyncio.create_task(task.follow(ref, release=False, conditions=("Running",)))
        await until_logged(task, "Kueue gave up on the job")
        await asyncio.sleep(3600)
        admit(server, task)
        outcome = await waiting
    assert isinstance(outcome, Outcome)
    assert outcome.succeeded


@of_each_kind
async def test_a_job_of_multikueue_is_refused_with_the_reason(task: Task) -> None:
    """Kueue's webhook sets `managedBy` if an admission check of the ClusterQueue is MultiKueue's."""
    multikueue = {"managedBy": "kueue.x-k8s.io/multikueue"}
    ref = (await task.submit(queue="team-a", run_policy=multikueue)).ref
    outcome = await task.ended(ref)
    assert outcome.cause is not None
    assert outcome.cause["summary"] == f"{ref} can't be followed: MultiKueue runs it in another cluster"
    assert outcome.cause["category"] == "queue"
    assert await task.job() is None


async def test_a_sensor_waits_for_a_job_of_multikueue(task: Task) -> None:
    ref = (await task.submit(queue="team-a", run_policy={"managedBy": "kueue.x-k8s.io/multikueue"})).ref
    waiting = asyncio.create_task(task.follow(ref, release=False))
    await asyncio.sleep(3600)
    assert not waiting.done()
    assert await task.job() is not None
    waiting.cancel()


async def test_the_time_in_the_queue_counts_as_queued_gpu_time(server: ApiServer, task: Task) -> None:
    ref = (await task.submit(queue="team-a", gpus=2)).ref
    async with operated(server, task):
        waiting = asyncio.create_task(task.ended(ref))
        await until_logged(task, "is Queued")
        await asyncio.sleep(100)
        admit(server, task)
        await until_logged(task, "is Running")
        await asyncio.sleep(50)
        end(server, task)
        outcome = await waiting
    assert outcome.metrics["seconds.queued"] == pytest.approx(100, abs=1)
    assert outcome.usage["queued"] == pytest.approx(200, abs=2)
    assert outcome.usage["requested"] == pytest.approx(outcome.usage["queued"] + outcome.usage["held"], abs=0.01)


async def test_the_time_in_the_queue_is_known_while_pods_still_end(task: Task) -> None:
    state = await state_of(task)
    (span,) = state.spans_in(Phase.QUEUED)
    state.enter(Phase.PENDING)
    assert state.spans_in(Phase.QUEUED)[0][0] == span[0]
    assert state.spans_in(Phase.QUEUED)[0][1] >= span[1]


async def test_the_gpus_of_a_workload_count_those_of_a_runtime(api: Api, task: Task) -> None:
    state = await state_of(task)
    assert state.requested == {GPU: 1}
    gpus = {"limits": {"nvidia.com/gpu": "4"}}
    await write_workload(api, state.known_job, [NEVER_FITS], resources=gpus, count=3)
    async with following(task, state, QueuePhase.NEVER_FITS):
        assert state.requested == {GPU: 12}


async def test_a_job_without_a_workload_is_reported(task: Task) -> None:
    """Kueue doesn't know the kind, or the priority class doesn't exist: then it never creates a Workload."""
    state = await state_of(task, workload_priority_class="urgent")
    async with follower_of(task.api, state, task) as follower:
        await until(lambda: _reports(follower, task, "no Workload"))
        await follower.update()
        late = follower.explain(Cause(Category.QUEUE, "it was queued for 60 s (queue_timeout)"))
    assert [line for line in task.log.messages if "no Workload" in line] == [
        f"{state.ref} stays suspended: Kueue has created no Workload for it.\n"
        "Ask an administrator: is Kueue's integration for PyTorchJobs enabled and does WorkloadPriorityClass urgent "
        "exist? The log of Kueue's controller contains the reason."
    ]
    assert late.summary == "it was queued for 60 s (queue_timeout): Kueue has created no Workload for it"


async def test_a_job_that_runs_although_it_names_a_queue_is_reported(task: Task) -> None:
    """Kueue 0.19 and newer don't manage PyTorchJobs by default: the label has no effect then."""
    state = await state_of(task)
    state.enter(Phase.RUNNING)
    async with follower_of(task.api, state, task) as follower:
        await until(lambda: _reports(follower, task, "names a queue"))
        await follower.update()
        assert follower.due is None
    assert sum("names a queue, but Kueue doesn't manage it" in line for line in task.log.messages) == 1


async def test_a_workload_that_was_just_deleted_is_not_reported(task: Task) -> None:
    """It is deleted before its job, and Kueue may replace it."""
    state = await state_of(task)
    state.phase_since -= 600
    await write_workload(task.api, state.known_job, [NEVER_FITS])
    async with following(task, state, QueuePhase.NEVER_FITS) as follower:
        path = requests.workloads_path("v1beta2", task.namespace, workload_name(task))
        await task.api.request("DELETE", path)
        await until(lambda: _forgets(follower))
        assert follower.due is not None
    assert not any("no Workload" in line for line in task.log.messages)


async def _forgets(follower: QueueFollower) -> bool:
    await follower.update()
    return follower.status is None


async def _reports(follower: QueueFollower, task: Task, text: str) -> bool:
    await follower.update()
    return any(text in line for line in task.log.messages)


async def test_a_retry_names_the_label_that_the_adopted_job_keeps(task: Task) -> None:
    """Kueue refuses another queue while the job runs (recording 74c)."""
    await task.submit(queue="team-a", workload_priority_class="low")
    await task.submit(2, queue="team-b", workload_priority_class="low")
    (warning,) = [line for line in task.log.messages if "keeps the old one" in line]
    assert "Changed: $.metadata.labels['kueue.x-k8s.io/queue-name']." in warning
