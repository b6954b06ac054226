"""A kill of a deferred task that Airflow answers slowly, or in a triggerer whose threads are all occupied."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.execution_time.comms import GetTaskStates

from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.engine.tasks import occupied_threads
from tests.operators.task_instance import Instance, Supervisor, supervised


class SlowSupervisor(Supervisor):
    """Answers questions for the task's state later than the trigger expects."""

    def __init__(self, instance: Instance, state: TaskInstanceState) -> None:
        super().__init__(state)
        self._instance = instance

    def send(self, message: Any) -> Any:
        if isinstance(message, GetTaskStates):
            self._instance.block(2 * TrainingJobTrigger.slow_answer)
        return super().send(message)


@pytest.mark.embedded("takes minutes outside of virtual time")
def test_slow_answer_of_airflow_decides_a_kill(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """One request is made. If it was given up and sent again, the next one would wait as long."""
    trigger = instance.trigger(instance.execute())
    with supervised(SlowSupervisor(instance, TaskInstanceState.FAILED)) as answers:
        asyncio.run(trigger.on_kill())
    assert not instance.jobs()
    assert answers.asked == 1
    assert "Airflow has not reported the task's state for" in capsys.readouterr().out


def test_kill_does_not_wait_for_threads_of_others(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """Six threads serve all triggers of a triggerer on two CPUs."""
    trigger = instance.trigger(instance.execute())

    async def follow_and_kill() -> None:
        running = asyncio.ensure_future(anext(aiter(trigger.run())))
        async with asyncio.timeout(240):
            while "is Running" not in capsys.readouterr().out:  # noqa: ASYNC110 - written by the trigger
                await asyncio.sleep(0.05)
        async with occupied_threads(), asyncio.timeout(240):
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await trigger.on_kill()
            await trigger.cleanup()

    with supervised(Supervisor(TaskInstanceState.FAILED)):
        asyncio.run(follow_and_kill())
    assert not instance.jobs()


def test_client_is_built_without_the_threads_of_the_loop(instance: Instance) -> None:
    """In a triggerer that took over, a kill needs a new client."""

    async def ask() -> Any:
        async with occupied_threads(), TrainingHook().api() as api:
            return await api.request("GET", "/version")

    assert asyncio.run(ask())
