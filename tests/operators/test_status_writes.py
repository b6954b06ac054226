"""A status that can't be written, or only slowly, never holds up or fails a training, a kill or an event."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState

from airflow_provider_ktrain.core.formats import STATUS_XCOM
from airflow_provider_ktrain.exceptions import TrainingKilledError
from tests.operators.task_instance import Instance, Supervisor, Ti, of_each_kind, supervised

RESULT = ["sh", "-c", """sleep 2; echo 'KTRAIN_RESULT {"loss": 0.5}'"""]
WRITE_SECONDS = 600.0  #: Duration of a write that hangs.
EVENT_SECONDS = 30.0  #: Time until the event of a training of 2 s.


class Statuses(Supervisor):
    """Airflow's supervisor. Writes of statuses fail, at once or after WRITE_SECONDS."""

    def __init__(self, instance: Instance, state: TaskInstanceState, *, hang: bool) -> None:
        super().__init__(state)
        self._instance, self._hang, self.writes = instance, hang, 0

    def write(self) -> None:
        self.writes += 1
        if self._hang:
            self._instance.block(WRITE_SECONDS)
        raise RuntimeError("no database")

    def send(self, message: Any) -> Any:
        return self.write() if getattr(message, "key", "") == STATUS_XCOM else super().send(message)


MINUTES = pytest.mark.embedded("takes minutes outside of virtual time")
of_each_problem = pytest.mark.parametrize(
    "hang", [pytest.param(False, id="fails"), pytest.param(True, id="hangs", marks=MINUTES)]
)


# the worker


@pytest.mark.embedded("takes minutes outside of virtual time")
def test_worker_refreshes_the_status_every_15_seconds(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    push, written = Ti.xcom_push, list[float]()

    def pushed(ti: Ti, key: str, value: Any) -> None:
        if key == STATUS_XCOM and value["phase"] == "Running":
            written.append(instance.clock)
        push(ti, key, value)

    monkeypatch.setattr(Ti, "xcom_push", pushed)  # a part of these tests, not of the code
    instance.execute(command=["sh", "-c", "sleep 100"], deferrable=False)
    assert {round(after - before) for before, after in itertools.pairwise(written[1:-1])} == {15}
    assert len(written) >= 7


@pytest.fixture
def worker(instance: Instance, monkeypatch: pytest.MonkeyPatch, hang: bool) -> Iterator[Statuses]:
    """The worker's supervisor. The operator itself pushes the last status; only those before it are disturbed."""
    with supervised(Statuses(instance, TaskInstanceState.FAILED, hang=hang)) as answers:
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
    instance.kill_when(lambda: worker.writes and instance.running())
    with pytest.raises(TrainingKilledError, match=r"The task was killed \(failed\)"):
        instance.execute(deferrable=False, retries=1)
    assert worker.asked
    assert all("deletionTimestamp" in job["metadata"] for job in instance.jobs())


# the triggerer


@of_each_problem
def test_trigger_fires_its_event(instance: Instance, hang: bool) -> None:
    deferred = instance.execute(command=RESULT)

    with supervised(Statuses(instance, TaskInstanceState.DEFERRED, hang=hang)) as answers:
        began = instance.clock
        event = instance.event(deferred)
        assert instance.clock - began < EVENT_SECONDS
        assert answers.writes
    assert event["outcome"]["result"] == {"loss": 0.5}
    assert event["outcome"]["status"]["ended"]


@of_each_problem
def test_kill_of_a_trigger_releases_the_job(instance: Instance, hang: bool) -> None:
    deferred = instance.execute()

    async def run_and_kill(answers: Statuses) -> None:
        trigger = instance.trigger(deferred)
        running = asyncio.ensure_future(anext(aiter(trigger.run())))
        while not answers.writes:  # noqa: ASYNC110 - a thread writes
            await asyncio.sleep(0.05)
        answers.states = [TaskInstanceState.FAILED]
        running.cancel()
        await asyncio.wait([running])
        await trigger.on_kill()

    with supervised(Statuses(instance, TaskInstanceState.DEFERRED, hang=hang)) as answers:
        began = instance.clock
        asyncio.run(run_and_kill(answers))
        assert instance.clock - began < WRITE_SECONDS
    assert not instance.jobs()
