"""The trigger: one event, not earlier than Airflow can handle it; a kill affects only the killed try."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred
from airflow.sdk.execution_time.comms import GetTaskStates, GetXCom, SetXCom, XComResult
from airflow.secrets.environment_variables import EnvironmentVariablesBackend
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.compat import EARLIEST_EVENT
from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM
from airflow_provider_ktrain.core.identity.names import OWNER_ANNOTATION
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingJobError
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger
from tests.clusters import TestCluster
from tests.engine.tasks import until
from tests.operators.task_instance import DefersSoon, Instance, Supervisor, first_event, of_each_kind, supervised
from tests.operators.virtual_instance import VirtualInstance

ANSWER_SECONDS = 20.0  #: How long a supervisor is busy.
MINUTES = pytest.mark.embedded("takes minutes outside of virtual time")


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """The answers of Airflow's supervisor process to a trigger."""
    with supervised(Supervisor(TaskInstanceState.DEFERRED)) as answers:
        yield answers


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("states", "kept"),
    [
        ([TaskInstanceState.FAILED], False),
        ([TaskInstanceState.SUCCESS], False),
        ([None], False),
        ([TaskInstanceState.DEFERRED], True),
        ([TaskInstanceState.RUNNING], True),
        ([TaskInstanceState.UP_FOR_RETRY], True),
        pytest.param([TaskInstanceState.QUEUED], True, marks=MINUTES),
        ([TaskInstanceState.SCHEDULED, TaskInstanceState.QUEUED, TaskInstanceState.RUNNING], True),
        ([TaskInstanceState.QUEUED, TaskInstanceState.FAILED], False),
        ([RuntimeError("no answer"), TaskInstanceState.FAILED], False),
        pytest.param([RuntimeError("no answer")], True, marks=MINUTES),
    ],
    ids=[
        "failed", "success", "cleared", "deferred: another triggerer has it", "running: a worker has it",
        "a retry is coming", "queued for ever", "queued, then a worker has it", "queued, then failed",
        "Airflow is away for a moment", "Airflow cannot be asked",
    ],
)  # fmt: skip
def test_on_kill_reads_the_state_of_the_task(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str], states: list[Any], kept: bool
) -> None:
    trigger = instance.trigger(instance.execute())
    supervisor.states = states
    began = instance.clock
    asyncio.run(trigger.on_kill())
    assert bool(instance.jobs()) is kept
    if states == [TaskInstanceState.QUEUED]:
        assert instance.clock - began == pytest.approx(TrainingJobTrigger.state_patience, abs=10)
    assert ("Releasing PyTorchJob" in capsys.readouterr().out) is not kept


def test_on_kill_is_ignored_without_task_instance(instance: Instance) -> None:
    trigger = instance.trigger(instance.execute())
    trigger.task_instance = None
    asyncio.run(trigger.on_kill())
    assert instance.jobs()


@pytest.mark.parametrize("answer", [TaskInstanceState.DEFERRED, RuntimeError("no answer")])
def test_triggerer_requests_the_state_once_before_any_kill(
    instance: Instance, supervisor: Supervisor, answer: Any
) -> None:
    """The first request takes the triggerer's supervisor 7 s: no kill should have to wait for it."""
    supervisor.states = [answer]
    deferred = instance.execute(command=["sh", "-c", "sleep 5"])

    async def run_twice() -> list[TriggerEvent]:
        return list(await asyncio.gather(*(anext(aiter(instance.trigger(deferred).run())) for _ in range(2))))

    assert all(event.payload["outcome"]["succeeded"] for event in asyncio.run(run_twice()))
    assert supervisor.asked == 1


class BusySupervisor(Supervisor):
    """Loads Airflow's API at the first request for a state, and answers no request for ANSWER_SECONDS."""

    def __init__(self, instance: Instance, state: TaskInstanceState) -> None:
        super().__init__(state)
        self._instance, self._busy_until = instance, 0.0

    def send(self, message: Any) -> Any:
        if isinstance(message, GetTaskStates) and not self.asked:
            self._busy_until = self._instance.clock + ANSWER_SECONDS
        answer = super().send(message)
        if (seconds := self._busy_until - self._instance.clock) > 0:
            self._instance.block(seconds)
        return answer

    async def asend(self, message: Any) -> Any:
        return await asyncio.to_thread(self.send, message)


@pytest.mark.embedded("blocks threads for longer than a test, outside of virtual time")
def test_following_does_not_wait_for_the_first_state_request(
    instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masking the connection's secrets doesn't wait for it either."""
    trigger = instance.trigger(instance.execute(command=["sh", "-c", "sleep 5"]))
    capsys.readouterr()

    async def ended() -> bool:
        return "is Succeeded" in capsys.readouterr().out

    async def run() -> None:
        began = instance.clock
        running = asyncio.ensure_future(anext(aiter(trigger.run())))
        await until(ended, 60)
        assert instance.clock - began < ANSWER_SECONDS
        await running

    with supervised(BusySupervisor(instance, TaskInstanceState.DEFERRED)):
        asyncio.run(run())


@pytest.mark.skipif(not compat.calls_on_kill(), reason="Airflow 3.3 and newer")
def test_kill_while_reading_the_connection_releases_the_job(
    instance: Instance, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow 3.3 calls `on_kill` based on the cancellation's message, which asgiref drops in a thread."""
    trigger = instance.trigger(instance.execute())
    reading, answered = threading.Event(), threading.Event()
    read = EnvironmentVariablesBackend.get_conn_value

    def slow(backend: EnvironmentVariablesBackend, conn_id: str, *more: Any, **others: Any) -> str | None:
        reading.set()
        answered.wait(60)
        return read(backend, conn_id, *more, **others)

    monkeypatch.setattr(EnvironmentVariablesBackend, "get_conn_value", slow)

    async def kill() -> None:
        running = asyncio.ensure_future(anext(aiter(trigger.run())))
        await asyncio.to_thread(reading.wait, 60)
        running.cancel("user-action")
        try:
            with pytest.raises(asyncio.CancelledError, match="user-action"):
                await running
        finally:
            answered.set()

    asyncio.run(kill())


@of_each_kind
def test_late_kill_keeps_the_job_of_the_next_try(instance: Instance, supervisor: Supervisor) -> None:
    """After a clear, the next try has adopted the job before the old trigger is killed."""
    trigger = instance.trigger(instance.execute(number=1, retries=1))
    instance.execute(number=2, retries=1)
    supervisor.states = [TaskInstanceState.RUNNING]
    asyncio.run(trigger.on_kill())
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]
    assert instance.ti is not None
    assert instance.ti.id in job["metadata"]["annotations"][OWNER_ANNOTATION]


@of_each_kind
@pytest.mark.embedded("sets fault switches")
def test_kill_is_retried_while_the_api_server_is_unavailable(instance: Instance, supervisor: Supervisor) -> None:
    trigger = instance.trigger(instance.execute())
    supervisor.states = [TaskInstanceState.FAILED]
    instance.cluster.admin("status", status=503, path=f"/{instance.kind.plural}", count=4)
    try:
        asyncio.run(trigger.on_kill())
    finally:
        instance.cluster.admin("clear")
    assert not instance.jobs()


def test_kill_completes_although_it_is_cancelled_repeatedly(instance: Instance, supervisor: Supervisor) -> None:
    """A triggerer cancels a task repeatedly."""
    trigger = instance.trigger(instance.execute())
    supervisor.states = [TaskInstanceState.FAILED]

    async def kill() -> None:
        killing = asyncio.ensure_future(asyncio.wait_for(trigger.on_kill(), 240))
        while not killing.done():
            await asyncio.sleep(0.01)
            killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        await trigger.cleanup()

    asyncio.run(kill())
    assert not instance.jobs()


async def stopped(
    trigger: TrainingJobTrigger, capsys: pytest.CaptureFixture[str], line: str = "", *, kill: bool = False
) -> None:
    """A task that is cancelled while it follows the job.

    :param line: a line of the job that the worker or the trigger logs before.
    :param kill: whether it is cancelled because of a kill. Default: False, because the triggerer stops.
    """
    by_worker, by_trigger = capsys.readouterr().out, ""
    running = asyncio.ensure_future(anext(aiter(trigger.run())))

    async def followed() -> bool:
        nonlocal by_trigger
        by_trigger += capsys.readouterr().out
        return "is Running" in by_trigger and line in by_worker + by_trigger

    await until(followed)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if kill:
        await trigger.on_kill()
    await trigger.cleanup()


def test_kill_does_not_read_the_connection_again(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read takes a turn in Airflow's supervisor, which is single-threaded: kills at once would wait for it."""
    reads: list[str] = []
    before: list[str] = []  # the kill; below Airflow 3.3, the canceled trigger calls `on_kill` itself

    class ForgetsEarlierReads(TrainingJobTrigger):
        async def on_kill(self) -> None:
            if not before:
                before.extend(reads)
                reads.clear()
            await super().on_kill()

    trigger = instance.trigger(instance.execute(), ForgetsEarlierReads)
    supervisor.states = [TaskInstanceState.FAILED]
    read = EnvironmentVariablesBackend.get_conn_value

    def counted(backend: EnvironmentVariablesBackend, conn_id: str, *more: Any, **others: Any) -> str | None:
        reads.append(conn_id)
        return read(backend, conn_id, *more, **others)

    monkeypatch.setattr(EnvironmentVariablesBackend, "get_conn_value", counted)
    asyncio.run(stopped(trigger, capsys, kill=True))
    assert before
    assert reads == []
    assert not instance.jobs()


def test_stopped_triggerer_deletes_nothing(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cancels its triggers and calls `cleanup`, not `on_kill`."""
    asyncio.run(stopped(instance.trigger(instance.execute()), capsys))
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]


class FailingTeardownTrigger(TrainingJobTrigger):
    """Closing its client fails, as it does after a lost connection."""

    async def _follow(self, *args: Any) -> Any:
        try:
            return await super()._follow(*args)
        finally:
            raise OSError("the connection was reset")


def test_a_cancelled_trigger_ends_at_once_although_its_teardown_fails(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """An event would be withheld until 10 s after the trigger's start, and so would its end."""
    asyncio.run(stopped(instance.trigger(instance.execute(), FailingTeardownTrigger), capsys))
    assert "A worker follows it from here." not in capsys.readouterr().out


@of_each_kind
def test_lines_after_a_kill_are_logged_and_counted(
    instance: Instance, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines are logged until the pods are gone; no process follows the job any more."""
    program = "trap 'for i in 1 2 3; do echo dying $i; sleep 0.3; done; exit 143' TERM; echo started; sleep 600 & wait"
    trigger = instance.trigger(instance.execute(command=["sh", "-c", program]))

    async def kill() -> float:
        await stopped(trigger, capsys, f"[{instance.replica}] started")
        supervisor.states = [TaskInstanceState.FAILED]
        began = instance.clock
        await trigger.on_kill()
        return instance.clock - began

    seconds = asyncio.run(kill())
    assert seconds >= 0.9 + TrainingJobTrigger.seconds_after_last_line, "Airflow closes the log at the end"
    output = capsys.readouterr().out
    assert [output.count(f"dying {n}") for n in (1, 2, 3)] == [1, 1, 1]
    late = output.count("started")  # 0, but on a loaded machine nothing has read it before the kill
    assert f"The pods wrote {3 + late} lines between the kill and their end." in output
    assert not instance.jobs()


class Database(Supervisor):
    """Airflow's supervisor, with the XComs of the task."""

    def __init__(self, state: TaskInstanceState, xcoms: dict[str, Any]) -> None:
        super().__init__(state)
        self.xcoms = xcoms

    def send(self, message: Any) -> Any:
        if isinstance(message, SetXCom):
            self.xcoms[message.key] = message.value
            return None
        if isinstance(message, GetXCom):
            return XComResult(key=message.key, value=self.xcoms.get(message.key))
        return super().send(message)


@of_each_kind
@pytest.mark.parametrize(
    ("state", "started", "stored"),
    [
        (TaskInstanceState.FAILED, 1, ("failed", "killed", "The task was killed (failed)")),
        (TaskInstanceState.FAILED, 2, ("running", None, None)),
        (TaskInstanceState.DEFERRED, 1, ("running", None, None)),
    ],
    ids=["killed", "killed, and the next try has begun", "only the triggerer stops"],
)
def test_trigger_stores_how_a_killed_training_ended(
    instance: Instance, capsys: pytest.CaptureFixture[str], state: TaskInstanceState, started: int, stored: Any
) -> None:
    """No worker does: without it, the GPU time since the last status is lost, and the page warns of GPUs held."""
    trigger = instance.trigger(instance.execute())
    assert instance.ti is not None
    xcoms = instance.ti.xcoms
    begun = xcoms[SUMMARY_XCOM] = {**xcoms[SUMMARY_XCOM], "try_number": started}
    with supervised(Database(state, xcoms)):
        asyncio.run(stopped(trigger, capsys, kill=True))
    summary, status = xcoms[SUMMARY_XCOM], xcoms[STATUS_XCOM]
    assert (summary["state"], summary.get("category"), summary.get("cause")) == stored
    assert bool(status["ended"]) is (stored[0] == "failed")
    if status["ended"]:
        assert status["cause"]["summary"] == summary["cause"]
        assert status["job_deleted"] is not bool(instance.jobs())
        assert summary["usage"]["tries"] == 1
        assert summary["usage"]["held"] == pytest.approx(status["usage"]["held"], abs=0.1)
        assert summary["usage"]["held"] > 0
        assert summary["parameters"] == begun["parameters"]


@pytest.mark.sampled(3)
@of_each_kind
@pytest.mark.embedded("counts requests of the scripted API server")
@pytest.mark.parametrize("requests", range(4))
def test_kill_before_the_trigger_follows_the_job_is_stored_too(instance: VirtualInstance, requests: int) -> None:
    """Before the trigger has run, and at each of its first requests. What only following shows stays as it was."""
    deferred = instance.execute()
    instance.wait_running()
    trigger = instance.trigger(deferred)
    assert instance.ti is not None
    xcoms = instance.ti.xcoms
    before = dict(xcoms[STATUS_XCOM])

    async def kill() -> None:
        if requests:
            running = asyncio.ensure_future(anext(aiter(trigger.run())))

            def sent(_: str) -> None:
                if len(instance.api.requests) == requests:
                    running.cancel()

            instance.api.requests.clear()
            instance.api.on_request = sent
            await asyncio.gather(running, return_exceptions=True)
        await asyncio.sleep(5)
        await trigger.on_kill()
        await trigger.cleanup()

    with supervised(Database(TaskInstanceState.FAILED, xcoms)):
        asyncio.run(kill())
    summary, status = xcoms[SUMMARY_XCOM], xcoms[STATUS_XCOM]
    assert (summary["state"], summary["cause"]) == ("failed", "The task was killed (failed)")
    assert status["cause"]["summary"] == summary["cause"]
    assert (status["ended"], status["job_deleted"]) == (True, True)
    assert status["usage"]["held"] >= (5.0 if compat.calls_on_kill() or not requests else 0.5)  # below 3.3, at once
    assert summary["usage"]["held"] == pytest.approx(status["usage"]["held"], abs=0.1)
    assert status["replicas"]["states"] == {"Running": 1}
    assert status["phases"][: len(before["phases"])] == before["phases"]
    assert not instance.jobs()


@of_each_kind
def test_kill_stores_no_gpu_time_of_a_job_that_nobody_has_seen(instance: Instance) -> None:
    deferred = instance.execute()
    instance.delete()
    assert instance.ti is not None
    xcoms = instance.ti.xcoms
    with supervised(Database(TaskInstanceState.FAILED, xcoms)):
        asyncio.run(instance.trigger(deferred).on_kill())
    summary, status = xcoms[SUMMARY_XCOM], xcoms[STATUS_XCOM]
    assert (summary["state"], summary["category"]) == ("failed", "killed")
    assert summary["usage"] == {"tries": 0, "held": 0, "wasted": 0, "at_least": True}
    assert status["ended"]
    assert status["usage"] == {}
    assert status["job"]["name"] == instance.job_name


@of_each_kind
@pytest.mark.parametrize(
    "follows",
    [False, pytest.param(True, marks=pytest.mark.skipif(not compat.calls_on_kill(), reason="Airflow 3.3 and newer"))],
    ids=["stalled before it followed", "has followed"],
)
def test_kill_is_stored_by_the_first_of_two_processes_alone(
    instance: Instance, capsys: pytest.CaptureFixture[str], follows: bool
) -> None:
    """A triggerer that stalled, and goes on after another one has released the job and stored how it ended."""
    deferred = instance.execute()
    behind, other = instance.trigger(deferred), instance.trigger(deferred)
    assert instance.ti is not None
    xcoms = instance.ti.xcoms
    stored: dict[str, Any] = {}

    async def logged() -> bool:
        return "is Running" in capsys.readouterr().out

    async def kill() -> None:
        capsys.readouterr()
        if follows:
            running = asyncio.ensure_future(anext(aiter(behind.run())))
            await until(logged)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await stopped(other, capsys, kill=True)
        stored.update({key: dict(xcoms[key]) for key in (SUMMARY_XCOM, STATUS_XCOM)})
        await behind.on_kill()
        await behind.cleanup()

    with supervised(Database(TaskInstanceState.FAILED, xcoms)):
        asyncio.run(kill())
    assert stored[SUMMARY_XCOM]["state"] == "failed"
    assert xcoms[SUMMARY_XCOM] == stored[SUMMARY_XCOM]
    assert xcoms[STATUS_XCOM] == stored[STATUS_XCOM]


@of_each_kind
@pytest.mark.parametrize("gone", [False, True], ids=["the job runs", "the job is gone"])
def test_kill_keeps_the_gpu_time_that_an_earlier_process_has_stored(instance: Instance, gone: bool) -> None:
    """It had seen pods that were replaced since then."""
    deferred = instance.execute()
    assert instance.ti is not None
    xcoms = instance.ti.xcoms
    xcoms[STATUS_XCOM] = {**xcoms[STATUS_XCOM], "usage": {"held": 36000.0, "wasted": 0.0}, "host": "trigger"}
    if gone:
        instance.delete()
    with supervised(Database(TaskInstanceState.FAILED, xcoms)):
        asyncio.run(instance.trigger(deferred).on_kill())
    assert xcoms[STATUS_XCOM]["usage"] == {"held": 36000.0, "wasted": 0.0, "at_least": True}
    assert xcoms[SUMMARY_XCOM]["usage"] == {"tries": 0, "held": 36000.0, "wasted": 0.0, "at_least": True}


@pytest.mark.sampled(5)
@of_each_kind
@pytest.mark.embedded("waits for half a minute outside of virtual time")
@pytest.mark.parametrize(
    ("status", "seconds", "held", "at_least"),
    [
        ({"usage": {"held": 36000.0, "wasted": 60.0}}, 40, 36000.0, False),
        ({"usage": {"held": 36000.0, "wasted": 60.0, "at_least": True}}, 40, 36000.0, True),
        ({"usage": {"held": 0.5}}, 40, 0.0, False),
        ({"usage": {"held": 36000.0}, "try_number": 7}, 40, 0.0, True),
        ({}, 40, 0.0, True),
        ({}, 0, 0.0, False),
    ],
    ids=[
        "stored", "stored as a bound", "all pods still exist", "of another try", "nothing stored",
        "nothing stored, right after the worker",
    ],
)  # fmt: skip
def test_trigger_counts_what_pods_had_used_that_are_gone(
    instance: Instance, capsys: pytest.CaptureFixture[str],
    status: dict[str, Any], seconds: float, held: float, at_least: bool,
) -> None:  # fmt: skip
    """The triggerer before was killed. It had followed the job for a day, in which pods were replaced."""
    deferred = instance.execute(command=["sh", "-c", "sleep 60"])
    instance.wait_running()
    assert instance.ti is not None
    xcoms, phases = instance.ti.xcoms, [["Queued", 50.0], ["Running", 60.0]]
    written_at = {"written_at": timing.epoch(), "try_number": 1, "phases": phases} if status else {}
    xcoms[STATUS_XCOM] = {**written_at, **status}

    async def run() -> Any:
        await asyncio.sleep(seconds)
        return (await anext(aiter(instance.trigger(deferred).run()))).payload["outcome"]

    with supervised(Database(TaskInstanceState.DEFERRED, xcoms)):
        outcome = asyncio.run(run())
    usage = outcome["usage"]
    assert usage["held"] == pytest.approx(held + 65.0, abs=10.0)
    assert usage.get("at_least", False) is at_least
    assert ("GPU time: at least " in capsys.readouterr().out) is at_least
    shown = xcoms[STATUS_XCOM]
    assert (shown["usage"].get("at_least", False), outcome["status"]["usage"]) == (at_least, usage)
    assert (shown["phases"][:2] == phases) is bool(status and "try_number" not in status)


@of_each_kind
@pytest.mark.skipif(hasattr(BaseTrigger, "on_kill"), reason="this Airflow calls on_kill")
@pytest.mark.parametrize(("state", "kept"), [(TaskInstanceState.FAILED, False), (TaskInstanceState.DEFERRED, True)])
def test_cancelled_trigger_below_airflow_3_3_reads_the_state_of_the_task(
    instance: Instance,
    supervisor: Supervisor,
    capsys: pytest.CaptureFixture[str],
    state: TaskInstanceState,
    kept: bool,
) -> None:
    """Airflow cancels a trigger when its task is killed, when the triggerer stops, and when another one takes over."""
    trigger = instance.trigger(instance.execute())
    supervisor.states = [state]
    asyncio.run(stopped(trigger, capsys))
    assert bool([job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]) is kept


@of_each_kind
def test_interrupted_dags_test_leaves_no_job(instance: Instance, capsys: pytest.CaptureFixture[str]) -> None:
    """`dags test` runs triggers inline, without a task instance, and Ctrl-C ends the whole process."""
    trigger = instance.trigger(instance.execute())
    trigger.task_instance = None
    asyncio.run(stopped(trigger, capsys))
    assert not [job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]


@pytest.mark.programs("signals, and a program that floods its log")
@pytest.mark.parametrize("on_ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_sigterm_ends_dags_test_and_leaves_no_job(
    instance: Instance, capsys: pytest.CaptureFixture[str], on_ctrl_c: Any
) -> None:
    """Airflow's handler of the worker segment is still set, and only calls `on_kill`. The program floods its log.

    A process that a shell has started in the background ignores SIGINT.
    """
    flood = ["sh", "-c", "while :; do echo 'KTRAIN_METRIC {\"step\": 1}'; done"]
    trigger = instance.trigger(instance.execute(command=flood))
    trigger.task_instance = None
    capsys.readouterr()

    async def followed() -> None:
        running = asyncio.ensure_future(anext(aiter(trigger.run())))

        async def logs() -> bool:
            return "is Running" in capsys.readouterr().out

        await until(logs)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(240):
            await running

    before = signal.signal(signal.SIGTERM, lambda *_: None), signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(followed())
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)
    assert not [job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]


def test_an_interruption_before_the_event_of_an_error_leaves_no_job(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trigger has failed and delays its event for some seconds; the job is alive."""
    trigger = instance.trigger(instance.execute())
    trigger.task_instance = None
    config = yaml.safe_load(instance.cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"

    async def interrupted() -> None:
        with monkeypatch.context() as patched:
            connect(patched, kube_config=json.dumps(config))
            running = asyncio.ensure_future(anext(aiter(trigger.run())))

            async def failed() -> bool:
                return "The trigger can't follow" in capsys.readouterr().out

            await until(failed)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(interrupted())
    assert not [job for job in instance.jobs() if "deletionTimestamp" not in job["metadata"]]


@of_each_kind
def test_event_is_withheld_until_airflow_accepts_it(instance: Instance) -> None:
    deferred = instance.execute(command=["sh", "-c", "sleep 5"])
    trigger = instance.trigger(deferred)

    async def events() -> list[TriggerEvent]:
        return [event async for event in trigger.run()]

    began = instance.clock
    (event,) = asyncio.run(events())
    assert instance.clock - began == pytest.approx(EARLIEST_EVENT, abs=0.01)
    assert event.payload["outcome"]["succeeded"]
    assert instance.resume(event.payload) is None
    assert not instance.jobs()


def test_dags_test_gets_the_outcome_when_the_job_has_ended(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the trigger without a scheduler, for which the event of an outcome would be withheld."""
    monkeypatch.setattr("airflow_provider_ktrain.triggers.training.EARLIEST_EVENT", 3600.0)
    trigger = instance.trigger(instance.execute(command=["sh", "-c", "sleep 5"]))
    trigger.task_instance = None

    async def event() -> TriggerEvent:
        async with asyncio.timeout(240):
            return await anext(aiter(trigger.run()))

    assert asyncio.run(event()).payload["outcome"]["succeeded"]


@of_each_kind
def test_worker_lost_after_the_event_does_not_repeat_the_training(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the event and `execute_complete`: the next try reads the outcome from the job, and deletes it."""
    deferred = instance.execute(command=["sh", "-c", "sleep 5"], retries=1)
    assert instance.event(deferred)["outcome"]["succeeded"]
    uid = deferred.trigger.job["uid"]
    assert [job["metadata"]["uid"] for job in instance.jobs()] == [uid]
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "60")
    again = instance.execute(command=["sh", "-c", "sleep 5"], number=2, retries=1)
    assert again is None, "it doesn't defer"
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["uid"] == uid
    assert not instance.jobs()


# the connection is edited


@pytest.fixture
def other(instance: Instance, tmp_path: pathlib.Path) -> TestCluster:
    """Another cluster; a triggerer or a retry doesn't find the first cluster's job there."""
    assert isinstance(instance, VirtualInstance)
    return instance.world.cluster(tmp_path / "other")


def connect(monkeypatch: pytest.MonkeyPatch, **extra: Any) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))


def server(cluster: TestCluster) -> str:
    return str(yaml.safe_load(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


@of_each_kind
@pytest.mark.embedded("starts clusters of its own")
def test_trigger_does_not_search_another_cluster(
    instance: Instance, other: TestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other cluster it would appear to be deleted, and the next try would submit it again."""
    trigger = instance.trigger(instance.execute(number=1, retries=1, operator=DefersSoon))
    connect(monkeypatch, kube_config_path=str(other.kubeconfig))

    event = first_event(trigger)
    assert server(instance.cluster) in event["error"]
    assert server(other) in event["error"]
    with pytest.raises(TaskDeferred):  # this leaves time to restore the connection
        instance.resume(event)
    with pytest.raises(TrainingClusterError, match=f"submitted to {server(instance.cluster)}.*{server(other)}"):
        instance.execute(number=2, retries=1)
    del instance.store["ktrain_job"]  # a worker that was lost at the moment it submitted
    with pytest.raises(TrainingJobError, match=r"^cluster changed since the previous try"):
        instance.execute(number=2, retries=1)
    (job,) = instance.jobs()
    assert "deletionTimestamp" not in job["metadata"]


@pytest.mark.thorough  # 10 s of CPU: a kill makes clients for 300 s
@pytest.mark.embedded("starts clusters of its own")
def test_kill_does_not_search_another_cluster(
    instance: Instance,
    other: TestCluster,
    supervisor: Supervisor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trigger = instance.trigger(instance.execute())
    supervisor.states = [TaskInstanceState.FAILED]
    connect(monkeypatch, kube_config_path=str(other.kubeconfig))
    asyncio.run(trigger.on_kill())
    output = capsys.readouterr().out
    assert f"submitted to {server(instance.cluster)}" in output
    assert "GPUs released" not in output


@of_each_kind
@pytest.mark.embedded("needs an API server on 127.0.0.1")
def test_address_of_the_cluster_can_change(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    instance.execute(number=1, retries=1)
    config = yaml.safe_load(instance.cluster.kubeconfig.read_text())
    address = config["clusters"][0]["cluster"]["server"]
    config["clusters"][0]["cluster"]["server"] = address.replace("127.0.0.1", "localhost")
    assert address != config["clusters"][0]["cluster"]["server"]
    connect(monkeypatch, kube_config=json.dumps(config), namespace=instance.cluster.namespace)
    (before,) = instance.jobs()
    again = instance.execute(number=2, retries=1)
    assert again.trigger.job["uid"] == before["metadata"]["uid"]
    assert again.trigger.job["cluster"].startswith("http://localhost:")


@pytest.mark.embedded("starts clusters of its own")
def test_edited_connection_gets_new_clients(
    instance: Instance, other: TestCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Another trigger in the same triggerer still follows a job with the previous version of the connection."""
    kubeconfig = tmp_path / "config"
    kubeconfig.write_bytes(instance.cluster.kubeconfig.read_bytes())

    async def edit() -> None:
        connect(monkeypatch, kube_config_path=str(kubeconfig))
        async with TrainingHook().api() as before, TrainingHook().api() as same:
            assert same is before
            connect(monkeypatch, kube_config_path=str(other.kubeconfig))
            async with TrainingHook().api() as edited:
                assert (await edited.cluster()).startswith(server(other))
            connect(monkeypatch, kube_config_path=str(kubeconfig))
            kubeconfig.write_bytes(other.kubeconfig.read_bytes())
            async with TrainingHook().api() as switched:
                assert (await switched.cluster()).startswith(server(other))
            assert (await before.cluster()).startswith(server(instance.cluster))

    asyncio.run(edit())
