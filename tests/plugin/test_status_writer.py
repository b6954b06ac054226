"""The writer of statuses: its budget, its order, and that it never disturbs a training."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.execution_time.comms import SetXCom, XComResult

from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.status_writer import (
    CONCLUSION_SECONDS,
    TRIGGER,
    WORKER,
    StatusWriter,
    TaskStatusSink,
    question,
    refresh_seconds,
)
from tests.operators.task_instance import Supervisor, supervised

ONE, TWO, THREE = (TaskInstanceId("dag", "run", task, -1) for task in ("one", "two", "three"))


class Writes:
    """What was written. `allow` lets one write after another go on."""

    def __init__(self, *, blocked: bool = False) -> None:
        self.done: list[tuple[str, Any]] = []
        self.began = 0  # how many writes
        self.allow = threading.Semaphore(0 if blocked else 1000)
        self.running = self.most = 0

    def offer(self, writer: StatusWriter, key: TaskInstanceId, n: Any, *, urgent: bool) -> None:
        writer.offer(key, lambda: lambda: {"n": n}, functools.partial(self.write, key), urgent=urgent)

    def write(self, key: TaskInstanceId, status: Mapping[str, Any]) -> None:
        self.began += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.allow.acquire()
        self.running -= 1
        self.done.append((key.task_id, status["n"]))
        if status["n"] == "fails":
            raise OSError("the supervisor is gone")

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for the writing thread."""
        async with asyncio.timeout(240):
            while not condition():  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.01)


async def test_urgent_statuses_go_first_and_the_latest_one_wins() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0)
    writes.offer(writer, ONE, 1, urgent=False)
    await writes.wait_for(lambda: writes.running > 0)
    writes.offer(writer, TWO, 1, urgent=False)
    writes.offer(writer, TWO, 2, urgent=False)
    writes.offer(writer, THREE, 1, urgent=True)
    writes.offer(writer, THREE, 2, urgent=False)
    for _ in range(3):
        writes.allow.release()
    await writes.wait_for(lambda: len(writes.done) == 3)
    assert writes.done == [("one", 1), ("three", 2), ("two", 2)]
    assert writes.most == 1, "one write in flight"


@pytest.mark.virtual_time
async def test_writes_keep_their_interval() -> None:
    writer, built, offered = StatusWriter(interval=30), list[float](), timing.now()

    def build() -> Callable[[], dict[str, Any]]:
        built.append(timing.now())
        return dict

    for key in (ONE, TWO):
        writer.offer(key, build, lambda status: None, urgent=True)
    await Writes().wait_for(lambda: len(built) == 2)
    assert [at - offered for at in built] == pytest.approx([0, 30])


@pytest.mark.virtual_time
async def test_status_has_the_time_at_which_the_next_one_is_due() -> None:
    """It is offered after a minute, and waits until those of the other tasks are written."""
    writer, written = StatusWriter(interval=5), dict[TaskInstanceId, Any]()
    for key in (ONE, TWO, THREE):
        writer.offer(key, lambda: dict, functools.partial(written.__setitem__, key), urgent=False)
    began = timing.epoch()
    await Writes().wait_for(lambda: len(written) == 3)
    assert [written[key]["next_due"] - began for key in (ONE, THREE)] == pytest.approx([60 + 2 * 5, 60 + 2 * 5])


async def test_failed_write_is_logged_once_and_the_next_one_follows(caplog: pytest.LogCaptureFixture) -> None:
    writes = Writes()
    writer = StatusWriter(interval=0)
    for number, text in enumerate(("fails", "fails", "works"), 1):
        writes.offer(writer, ONE, text, urgent=True)
        await writes.wait_for(functools.partial(lambda n: len(writes.done) == n, number))
    assert [n for _, n in writes.done] == ["fails", "fails", "works"]
    assert [r.getMessage().splitlines()[1] for r in caplog.records] == ["the supervisor is gone"]


async def test_slow_write_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0, slow_after=0.05)
    for number in (1, 2):
        writes.offer(writer, ONE, number, urgent=True)
        await writes.wait_for(lambda: writes.running > 0)
        await writes.wait_for(lambda: bool(caplog.records))
        writes.allow.release()
        await writes.wait_for(functools.partial(lambda n: len(writes.done) == n, number))
    assert ["takes over" in record.getMessage() for record in caplog.records] == [True]


async def test_no_write_begins_while_a_kill_waits_for_the_state_of_its_task() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0)
    writes.offer(writer, ONE, 1, urgent=True)
    await writes.wait_for(lambda: writes.running > 0)
    writes.offer(writer, TWO, 1, urgent=True)
    with writer.question(), writer.question():
        writes.allow.release(10)
        await writer.written(ONE)
        for _ in range(20):
            await asyncio.sleep(0)
        assert writes.began == 1
    await writes.wait_for(lambda: writes.done == [("one", 1), ("two", 1)])


async def test_nothing_is_written_after_the_withdrawal() -> None:
    writes = Writes(blocked=True)
    writer = StatusWriter(interval=0)
    writes.offer(writer, ONE, 1, urgent=True)
    await writes.wait_for(lambda: writes.running > 0)
    writes.offer(writer, ONE, 2, urgent=True)
    writer.withdraw(ONE)
    waiting = asyncio.ensure_future(writer.written(ONE))
    await asyncio.sleep(0)
    assert not waiting.done(), "a write in flight would replace the last status"
    writes.allow.release()
    await waiting
    assert writes.done == [("one", 1)]


async def test_worker_does_not_wait_for_a_write_in_flight() -> None:
    """A worker that waits would not react to a kill."""
    started, allow = threading.Event(), threading.Event()

    class Ti:
        dag_id, run_id, task_id, map_index, try_number = "dag", "run", "task", -1, 1

        def xcom_pull(self, task_ids: str, key: str, map_indexes: int) -> None: ...

        def xcom_push(self, key: str, value: Any) -> None:
            started.set()
            allow.wait(60)

    sink = TaskStatusSink(Ti(), WORKER)
    sink.offer(lambda: lambda: {"n": 1}, urgent=True)
    await Writes().wait_for(started.is_set)
    leaving = asyncio.ensure_future(sink.__aexit__(None))
    for _ in range(5):
        await asyncio.sleep(0)
    assert leaving.done()
    allow.set()


@pytest.mark.parametrize(("error", "waits"), [(None, True), (KeyError, False)])
async def test_trigger_waits_for_its_write_in_flight_unless_it_fails(
    error: type[BaseException] | None, waits: bool
) -> None:
    started, allow = threading.Event(), threading.Event()

    class Slow(Supervisor):
        def send(self, message: Any) -> Any:
            started.set()
            allow.wait(60)

    key: Any = SimpleNamespace(dag_id="dag", run_id="run", task_id="task", map_index=None, try_number=1)
    with supervised(Slow(None)):
        sink = TaskStatusSink(key, TRIGGER)
        sink.offer(lambda: lambda: {"n": 1}, urgent=True)
        await Writes().wait_for(started.is_set)
        leaving = asyncio.ensure_future(sink.__aexit__(error))
        for _ in range(5):
            await asyncio.sleep(0)
        assert leaving.done() is not waits
        allow.set()
        await leaving


@pytest.mark.parametrize(("trainings", "seconds"), [(1, 10.0), (30, 30.0), (300, 60.0)])
async def test_trigger_refreshes_a_status_less_often_with_more_trainings(trainings: int, seconds: float) -> None:
    async with contextlib.AsyncExitStack() as followed:
        for n in range(trainings):
            ti: Any = SimpleNamespace(dag_id="dag", run_id="run", task_id="task", map_index=n, try_number=1)
            await followed.enter_async_context(TaskStatusSink(ti, TRIGGER))
        assert refresh_seconds() == seconds
    assert refresh_seconds() == 10.0, "the others have ended"


# conclusions


class Airflow:
    """Task instances of a worker whose XComs take some time of the running virtual loop."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.loop: Any = asyncio.get_running_loop()
        self.seconds, self.xcoms, self.order, self.fails = seconds, dict[str, Any](), list[str](), False
        self.unreadable = False
        self.answers_reads = threading.Event()
        self.answers_reads.set()

    def sink(self, task: str = "task") -> TaskStatusSink:
        return TaskStatusSink(Ti(self, task), WORKER)


class Ti:
    dag_id, run_id, map_index, try_number = "dag", "run", -1, 1

    def __init__(self, airflow: Airflow, task_id: str) -> None:
        self.airflow, self.task_id = airflow, task_id

    def xcom_push(self, key: str, value: Any) -> None:
        if self.airflow.seconds:
            self.airflow.loop.call_soon_threadsafe(self.airflow.loop.advance, self.airflow.seconds)
        if self.airflow.fails:
            raise OSError("no database")
        self.airflow.order.append(self.task_id)
        self.airflow.xcoms[self.task_id] = value

    def xcom_pull(self, task_ids: str, key: str, map_indexes: int) -> Any:
        self.airflow.answers_reads.wait(60)
        if self.airflow.fails or self.airflow.unreadable:
            raise OSError("no database")
        return self.airflow.xcoms.get(task_ids)


@pytest.mark.virtual_time
async def test_conclusion_is_written_first_and_without_the_interval() -> None:
    airflow, writes, began = Airflow(), Writes(), timing.now()
    others = [airflow.sink(name) for name in ("one", "two")]
    for sink in others:
        sink.offer(lambda: lambda: {"n": 1}, urgent=True)
    await writes.wait_for(lambda: airflow.order == ["one"])
    sinks = [airflow.sink(f"concludes {n}") for n in range(20)]
    assert all(await asyncio.gather(*(sink.store_conclusion({"uid": "u"}) for sink in sinks)))
    assert len(airflow.order) >= 21
    assert airflow.order[1:21] == [f"concludes {n}" for n in range(20)]
    await writes.wait_for(lambda: airflow.order[-1] == "two")
    assert timing.now() - began < 3, "without the interval of a second"


async def test_conclusion_has_the_latest_status_beside_it() -> None:
    airflow = Airflow()
    sink = airflow.sink()
    states = iter(["Running", "Suspended"])
    sink.offer(lambda: functools.partial(dict, phase=next(states)), urgent=True)
    await Writes().wait_for(lambda: airflow.order == ["task"])
    assert await sink.store_conclusion({"uid": "u"})
    stored = airflow.xcoms["task"]
    assert (stored["phase"], stored["conclusion"]) == ("Suspended", {"uid": "u"})


async def test_conclusion_without_a_status_can_be_shown() -> None:
    def fails() -> Callable[[], dict[str, Any]]:
        raise KeyError("metadata")

    airflow = Airflow()
    sink = airflow.sink()
    assert await sink.store_conclusion({"uid": "u"})
    assert airflow.xcoms["task"].keys() == {"version", "try_number", "written_at", "host", "next_due", "conclusion"}
    sink.offer(fails, urgent=True)
    assert await sink.store_conclusion({"uid": "u"}), "although the status can't be made"


@pytest.mark.virtual_time
async def test_later_statuses_contain_the_conclusion_until_it_is_retracted() -> None:
    airflow = Airflow()
    sink = airflow.sink()
    assert await sink.store_conclusion({"uid": "u"})
    for number, concluded in ((1, True), (2, False)):
        if not concluded:
            sink.retract()
        sink.offer(functools.partial(lambda n: lambda: {"n": n}, number), urgent=True)
        await Writes().wait_for(functools.partial(lambda n: airflow.xcoms["task"].get("n") == n, number))
        assert ("conclusion" in airflow.xcoms["task"]) is concluded


@pytest.mark.virtual_time
async def test_next_process_reads_the_conclusion_and_keeps_it() -> None:
    airflow = Airflow()
    sink = airflow.sink()
    sink.offer(lambda: lambda: {"phase": "Running"}, urgent=True)
    assert await sink.store_conclusion({"uid": "u"})
    following = airflow.sink()
    assert await following.stored_conclusion() == {"uid": "u"}
    assert await following.store_conclusion({"uid": "v"})
    assert airflow.xcoms["task"]["phase"] == "Running", "the status that was read"
    sink = airflow.sink()
    assert await sink.stored_conclusion() == {"uid": "v"}
    sink.offer(lambda: lambda: {"n": 1}, urgent=True)
    await Writes().wait_for(lambda: "n" in airflow.xcoms["task"])
    assert airflow.xcoms["task"]["conclusion"] == {"uid": "v"}


def with_earlier(sink: TaskStatusSink) -> Callable[[], Callable[[], Mapping[str, Any]]]:
    """Builds a status from what is known of an earlier process's when it is built."""

    def build() -> Callable[[], Mapping[str, Any]]:
        earlier = sink.earlier
        return lambda: {"try_number": 1, "earlier": None if earlier is None else earlier.get("n")}

    return build


@pytest.mark.virtual_time
@pytest.mark.parametrize(("number", "found"), [(1, 5), (2, None)], ids=["this try's", "another try's"])
async def test_first_status_is_made_after_the_one_of_an_earlier_process_was_read(number: int, found: Any) -> None:
    airflow = Airflow()
    airflow.xcoms["task"] = {"try_number": number, "n": 5}
    sink = airflow.sink()
    for _ in range(2):
        airflow.order.clear()
        sink.offer(with_earlier(sink), urgent=True)
        await Writes().wait_for(lambda: bool(airflow.order))
        assert airflow.xcoms["task"]["earlier"] == found
        await asyncio.sleep(40.0)
    await sink.read_earlier()
    assert sink.earlier == ({"try_number": 1, "n": 5} if found else {})


@pytest.mark.virtual_time
async def test_earlier_status_is_read_at_the_end_unless_this_process_has_replaced_it() -> None:
    airflow = Airflow()
    airflow.xcoms["task"] = {"try_number": 1, "n": 5}
    airflow.unreadable = True
    sink, concluded = airflow.sink(), airflow.sink()
    await sink.read_earlier()
    unread: object = sink.earlier
    airflow.unreadable = False
    await sink.read_earlier()
    assert unread is None
    assert sink.earlier == {"try_number": 1, "n": 5}
    assert await concluded.store_conclusion({"uid": "u"})
    await concluded.read_earlier()
    assert concluded.earlier is None, "what is stored is this process's own"


@pytest.mark.virtual_time
async def test_no_conclusion_waits_for_the_status_of_an_earlier_process() -> None:
    airflow = Airflow()
    airflow.answers_reads.clear()
    reading = asyncio.ensure_future(airflow.sink("ended").read_earlier())
    await asyncio.sleep(0)
    try:
        assert await airflow.sink().store_conclusion({"uid": "u"})
    finally:
        airflow.answers_reads.set()
        await reading


@pytest.mark.virtual_time
async def test_conclusion_of_another_process_is_kept_that_was_stored_while_a_status_was_made() -> None:
    """The event loop has stalled meanwhile, so another triggerer has taken over."""
    airflow = Airflow()
    late = airflow.sink()

    def build() -> Callable[[], Mapping[str, Any]]:
        airflow.xcoms["task"] = {"try_number": 1, "conclusion": {"uid": "u"}}
        return lambda: {"n": 1}

    late.offer(build, urgent=True)
    await Writes().wait_for(lambda: airflow.xcoms.get("task", {}).get("n") == 1)
    assert airflow.xcoms["task"]["conclusion"] == {"uid": "u"}


@pytest.mark.virtual_time
async def test_status_of_a_late_process_keeps_the_conclusion_of_another_one() -> None:
    """Its triggerer has stalled, and another one has taken over its trigger and concluded."""
    airflow = Airflow()
    late = airflow.sink()

    async def write(n: int) -> None:
        late.offer(lambda: lambda: {"n": n}, urgent=True)
        await Writes().wait_for(lambda: airflow.xcoms["task"].get("n") == n if airflow.xcoms else False)

    await write(1)
    await asyncio.sleep(40.0)
    assert await airflow.sink().store_conclusion({"uid": "u"})
    for n in (2, 3):
        await write(n)
        assert airflow.xcoms["task"]["conclusion"] == {"uid": "u"}


@pytest.mark.virtual_time
async def test_status_is_not_written_while_it_is_unknown_whether_it_would_replace_a_conclusion() -> None:
    airflow = Airflow()
    assert await airflow.sink().store_conclusion({"uid": "u"})
    airflow.unreadable = True
    late = airflow.sink()
    late.offer(lambda: lambda: {"n": 1}, urgent=True)
    await asyncio.sleep(5.0)
    assert "n" not in airflow.xcoms["task"]
    airflow.unreadable = False
    late.offer(lambda: lambda: {"n": 2}, urgent=True)
    await Writes().wait_for(lambda: airflow.xcoms["task"].get("n") == 2)
    assert airflow.xcoms["task"]["conclusion"] == {"uid": "u"}


@pytest.mark.parametrize("stored", [None, "text", {}, {"conclusion": None}, {"conclusion": "text"}])
async def test_status_without_a_conclusion_has_none(stored: Any) -> None:
    airflow = Airflow()
    airflow.xcoms["task"] = stored
    assert await airflow.sink().stored_conclusion() == {}


@pytest.mark.virtual_time
async def test_failed_conclusion_is_not_awaited_and_comes_with_a_later_write() -> None:
    airflow = Airflow()
    sink = airflow.sink()
    airflow.fails, began = True, timing.now()
    assert not await sink.store_conclusion({"uid": "u"})
    assert await airflow.sink().stored_conclusion() is None
    assert timing.now() - began < 0.1
    airflow.fails = False
    await Writes().wait_for(lambda: "task" in airflow.xcoms)
    assert airflow.xcoms["task"]["conclusion"] == {"uid": "u"}


@pytest.mark.virtual_time
async def test_many_conclusions_at_the_same_time_wait_for_ten_seconds_at_most() -> None:
    airflow = Airflow(1.0)

    async def store_conclusion(sink: TaskStatusSink) -> tuple[bool, float]:
        began = timing.now()
        return await sink.store_conclusion({"uid": "u"}), timing.now() - began

    answers = await asyncio.gather(*(store_conclusion(airflow.sink(f"task {n}")) for n in range(30)))
    assert max(seconds for _, seconds in answers) == pytest.approx(CONCLUSION_SECONDS, abs=1.0)
    stored = sum(stored for stored, _ in answers)
    assert 9 <= stored <= 10, "they are written one after another"
    assert await airflow.sink("late").store_conclusion({"uid": "u"}), "it doesn't wait for those that nobody awaits"
    await Writes().wait_for(lambda: len(airflow.order) > stored + 1)


async def test_no_conclusion_begins_while_a_kill_waits_for_the_state_of_its_task() -> None:
    airflow = Airflow()
    with question():
        concluding = asyncio.ensure_future(airflow.sink().store_conclusion({"uid": "u"}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not airflow.order
    assert await concluding


async def test_conclusion_in_a_trigger_is_stored_and_read_through_airflow() -> None:
    """A trigger's task instance has neither `xcom_push` nor `xcom_pull`."""
    stored: dict[str, Any] = {}

    class Answers(Supervisor):
        def send(self, message: Any) -> Any:
            if isinstance(message, SetXCom):
                stored[message.key] = message.value
                return None
            return XComResult(key=message.key, value=stored.get(message.key))

    key: Any = SimpleNamespace(dag_id="dag", run_id="run", task_id="task", map_index=None, try_number=1)
    with supervised(Answers(None)):
        assert await TaskStatusSink(key, TRIGGER).stored_conclusion() == {}
        assert await TaskStatusSink(key, TRIGGER).store_conclusion({"uid": "u"})
        assert await TaskStatusSink(key, TRIGGER).stored_conclusion() == {"uid": "u"}


def test_task_instance_that_cannot_be_identified_has_no_sink() -> None:
    assert TaskStatusSink.of(None, WORKER) is None
