"""A status that can't be written, or only slowly, never holds up or fails a training, a kill or an event."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState

from airflow_provider_ktrain.core.formats import STATUS_XCOM
from airflow_provider_ktrain.exceptions import TrainingKilledError
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.operators.task_instance import Instance, Supervisor, Ti, of_each_kind, supervised

RESULT = ["sh", "-c", """sleep 2; echo 'KTRAIN_RESULT {"loss": 0.5}'"""]
EVENT_SECONDS = 60.0  # for the event of a training that has ended, on a loaded machine; a write that hangs takes longer


class Statuses(Supervisor):
    """Airflow's supervisor. Writes of statuses fail, or hang until `over` is set."""

    def __init__(self, state: TaskInstanceState, *, hang: bool) -> None:
        super().__init__(state)
        self.hang, self.over, self.writes = hang, threading.Event(), 0

    def write(self) -> None:
        self.writes += 1
        if self.hang:
            self.over.wait(600)
        raise RuntimeError("no database")

    def send(self, message: Any) -> Any:
        return self.write() if getattr(message, "key", "") == STATUS_XCOM else super().send(message)


@contextlib.contextmanager
def statuses(state: TaskInstanceState, *, hang: bool) -> Iterator[Statuses]:
    with supervised(answers := Statuses(state, hang=hang)):
        try:
            yield answers
        finally:
            answers.over.set()


of_each_problem = pytest.mark.parametrize("hang", [False, True], ids=["fails", "hangs"])


# the worker


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, hang: bool) -> Iterator[Statuses]:
    """The worker's supervisor. The operator itself pushes the last status; only those before it are disturbed."""
    with statuses(TaskInstanceState.FAILED, hang=hang) as answers:
        push = Ti.xcom_push

        def pushed(ti: Ti, key: str, value: Any) -> None:
            if key == STATUS_XCOM and threading.current_thread() is not threading.main_thread():
                answers.write()
            push(ti, key, value)

        monkeypatch.setattr(Ti, "xcom_push", pushed)  # a part of these tests, not of the code
        yield answers


@of_each_kind
@of_each_problem
def test_worker_returns_the_result(instance: Instance, worker: Statuses) -> None:
    assert instance.execute(command=RESULT, deferrable=False) == {"loss": 0.5}
    assert worker.writes
    assert not instance.jobs()


@of_each_problem
def test_kill_of_a_worker_releases_the_job(instance: Instance, worker: Statuses) -> None:
    over, killed = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        assert instance.operator
        instance.operator.on_kill()

    def kill() -> None:
        while not over.wait(0.05):
            if worker.writes and instance.running():
                killed.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    before, killing = signal.signal(signal.SIGUSR1, on_signal), threading.Thread(target=kill)
    killing.start()
    try:
        with pytest.raises(TrainingKilledError, match=r"The task was killed \(failed\)"):
            instance.execute(deferrable=False, retries=1)
    finally:
        over.set()
        killing.join()
        signal.signal(signal.SIGUSR1, before)
    assert killed.is_set()
    assert worker.asked
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


# the triggerer


def trigger_of(deferred: Any, instance: Instance) -> TrainingJobTrigger:
    trigger = TrainingJobTrigger(**deferred.trigger.serialize()[1])
    ti: Any = SimpleNamespace(
        dag_id=instance.key.dag_id, run_id=instance.run_id, task_id="train", map_index=-1, try_number=1
    )
    trigger.task_instance = ti
    return trigger


@of_each_problem
def test_trigger_fires_its_event(instance: Instance, hang: bool) -> None:
    deferred = instance.execute(command=RESULT)

    async def fire() -> Any:
        return (await anext(aiter(trigger_of(deferred, instance).run()))).payload

    with statuses(TaskInstanceState.DEFERRED, hang=hang) as answers:
        began = time.monotonic()
        event = asyncio.run(fire())
        assert time.monotonic() - began < EVENT_SECONDS
        assert answers.writes
    assert event["outcome"]["result"] == {"loss": 0.5}
    assert event["outcome"]["status"]["ended"]


@of_each_problem
def test_kill_of_a_trigger_releases_the_job(instance: Instance, hang: bool) -> None:
    deferred = instance.execute()

    async def run_and_kill(answers: Statuses) -> None:
        trigger = trigger_of(deferred, instance)
        running = asyncio.ensure_future(anext(aiter(trigger.run())))
        while not answers.writes:  # noqa: ASYNC110 - a thread writes
            await asyncio.sleep(0.05)
        answers.states = [TaskInstanceState.FAILED]
        running.cancel()
        await asyncio.wait([running])
        await trigger.on_kill()

    with statuses(TaskInstanceState.DEFERRED, hang=hang) as answers:
        asyncio.run(run_and_kill(answers))
        assert not answers.over.is_set()
    assert not instance.jobs()
