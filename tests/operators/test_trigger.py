"""The trigger: one event and no sooner than Airflow bears it; a kill that reaches only what was killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time import task_runner
from airflow.triggers.base import TriggerEvent

from airflow_provider_ktrain.core.identity import OWNER_ANNOTATION
from airflow_provider_ktrain.exceptions import TrainingJobError
from airflow_provider_ktrain.triggers.training import EARLIEST_EVENT, TrainingJobTrigger
from tests.engine.tasks import until
from tests.operators.instance import Instance, Supervisor


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """What Airflow's supervisor process would answer to a trigger."""
    before = getattr(task_runner, "SUPERVISOR_COMMS", None)
    task_runner.SUPERVISOR_COMMS = answers = Supervisor(TaskInstanceState.DEFERRED)
    yield answers
    if before is None:
        del task_runner.SUPERVISOR_COMMS
    else:
        task_runner.SUPERVISOR_COMMS = before


def trigger_of(deferred: Any, instance: Instance) -> TrainingJobTrigger:
    """As the triggerer has it: built from what was serialized."""
    _, arguments = deferred.trigger.serialize()
    trigger = TrainingJobTrigger(**arguments)
    trigger.task_instance = SimpleNamespace(
        dag_id=instance.key.dag_id, run_id=instance.run_id, task_id="train", map_index=-1
    )
    return trigger


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (TaskInstanceState.FAILED, False),
        (TaskInstanceState.SUCCESS, False),
        (None, False),
        (TaskInstanceState.QUEUED, False),
        (TaskInstanceState.DEFERRED, True),
        (RuntimeError("no answer"), True),
    ],
    ids=["failed", "success", "cleared", "the next try", "deferred: another triggerer has it", "nobody can tell"],
)
def test_a_kill_asks_whether_there_was_one(instance: Instance, supervisor: Supervisor, state: Any, kept: bool) -> None:
    trigger = trigger_of(instance.execute(), instance)
    supervisor.state = state
    asyncio.run(trigger.on_kill())
    assert bool(instance.jobs()) is kept


def test_a_kill_without_a_task_is_none(instance: Instance) -> None:
    trigger = trigger_of(instance.execute(), instance)
    trigger.task_instance = None
    asyncio.run(trigger.on_kill())
    assert instance.jobs()


def test_a_late_kill_does_not_reach_the_next_try(instance: Instance, supervisor: Supervisor) -> None:
    """A clear: the next try has taken the job over before the old trigger is killed."""
    trigger = trigger_of(instance.execute(number=1, retries=1), instance)
    instance.execute(number=2, retries=1)
    supervisor.state = TaskInstanceState.RUNNING
    asyncio.run(trigger.on_kill())
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]
    assert instance.ti is not None
    assert instance.ti.id in job["metadata"]["annotations"][OWNER_ANNOTATION]


def test_a_kill_is_not_cut_off_by_the_next_ones(instance: Instance, supervisor: Supervisor) -> None:
    """A triggerer cancels what it has cancelled again and again."""
    trigger = trigger_of(instance.execute(), instance)
    supervisor.state = TaskInstanceState.FAILED

    async def kill() -> None:
        killing = asyncio.ensure_future(asyncio.wait_for(trigger.on_kill(), 240))
        while not killing.done():
            await asyncio.sleep(0.01)
            killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await trigger.cleanup()

    asyncio.run(kill())
    assert not instance.jobs()


async def stopped(trigger: TrainingJobTrigger, capsys: pytest.CaptureFixture[str]) -> None:
    """Cancelled while it follows."""
    capsys.readouterr()  # the worker's words
    running = asyncio.ensure_future(anext(aiter(trigger.run())))

    async def followed() -> bool:
        return "is Running" in capsys.readouterr().out

    await until(followed)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await trigger.cleanup()


def test_a_triggerer_that_stops_deletes_nothing(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """It cancels its triggers and calls `cleanup`, not `on_kill`."""
    asyncio.run(stopped(trigger_of(instance.execute(), instance), capsys))
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]


def test_an_interrupted_dags_test_leaves_no_job(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs triggers inline, without a task instance, and Ctrl-C ends all of it."""
    trigger = trigger_of(instance.execute(), instance)
    trigger.task_instance = None
    asyncio.run(stopped(trigger, capsys))
    assert not [job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]


def test_its_one_event_comes_no_sooner_than_airflow_bears_it(instance: Instance) -> None:
    deferred = instance.execute(command=["sh", "-c", "sleep 1"])
    trigger = trigger_of(deferred, instance)

    async def events() -> list[TriggerEvent]:
        return [event async for event in trigger.run()]

    began = time.monotonic()
    (event,) = asyncio.run(events())
    assert time.monotonic() - began >= EARLIEST_EVENT
    assert event.payload["succeeded"]
    assert instance.resume(event.payload) is None
    assert not instance.jobs()


def test_a_training_is_not_repeated_because_its_worker_died_at_the_event(instance: Instance) -> None:
    """Between the event and `execute_complete`: the next try takes what the job says, and deletes it."""
    deferred = instance.execute(command=["sh", "-c", "sleep 1"], retries=1)
    trigger = trigger_of(deferred, instance)

    async def first() -> TriggerEvent:
        return await anext(aiter(trigger.run()))

    assert asyncio.run(first()).payload["succeeded"]
    uid = deferred.trigger.job["uid"]
    assert [job["metadata"]["uid"] for job in instance.jobs()] == [uid]
    again = instance.execute(command=["sh", "-c", "sleep 1"], number=2, retries=1)
    assert again is None, "it ends at once"
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["uid"] == uid
    assert not instance.jobs()


def test_what_goes_wrong_in_it_is_an_event(instance: Instance) -> None:
    """A trigger that raises would leave the GPUs to nobody."""
    trigger = trigger_of(instance.execute(), instance)
    trigger.job["kind"] = "NoJob"

    async def first() -> TriggerEvent:
        return await anext(aiter(trigger.run()))

    event = asyncio.run(first()).payload
    assert "NoJob" in event["error"]
    event["trigger"]["job"]["kind"] = "PyTorchJob"
    with pytest.raises(TaskDeferred) as again:  # a training that goes on is no worse for it
        instance.resume(event)
    assert again.value.trigger.failures == 1
    assert len(instance.jobs()) == 1
    with pytest.raises(TrainingJobError, match="NoJob"):
        instance.resume({**event, "trigger": {**event["trigger"], "failures": 3}})
    assert not instance.jobs()
