"""The way into Airflow's log: nothing blocks the event loop, nothing is lost without being counted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.engine.logs import log_socket as module
from airflow_provider_ktrain.engine.logs.line_logger import LineLogger
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import LineQueue, json_size, log_socket, parts, record_cost
from tests.apiserver import PodServer, log_time
from tests.until import until

from .log_following import following, numbered, write
from .log_wire import Loop, Wire, turns, wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what is unread")
MANY = 10_000  # short lines, more than a queue takes, which is a whole chunk of a response: up to some 3,000
TASK: ContextVar[str] = ContextVar("TASK", default="")


def line(text: str, **changed: Any) -> LogLine:
    return LogLine("p", "main", "Worker", 0, 0, log_time(0), text, **changed)


@pytest.fixture
def supervisor() -> Iterator[Wire]:
    with wire() as made:
        yield made


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Loop]:
    loop = Loop()
    watching = asyncio.ensure_future(loop.watch())
    try:
        yield loop
    finally:
        watching.cancel()


def queue_to(supervisor: Wire, lost: list[int] | None = None) -> LineQueue:
    supervisor.connect()
    return LineQueue(LineLogger(supervisor, PYTORCHJOB), (lambda count: None) if lost is None else lost.append)


def admitted(supervisor: Wire, text: str, **kw: Any) -> bool:
    """Log a message of the trigger itself, as its logger does."""
    if now := log_socket().admit(supervisor.info, text, kw):
        supervisor.info(text, **kw)
    return now


@pytest.mark.parametrize("size", [1, 100, 200, 700, 1000, 1500, 1800, 3500, 4096, 6000, 8200, 16384, 20_000])
def test_cost_of_a_record_is_not_higher_than_expected(supervisor: Wire, size: int) -> None:
    os.write(supervisor._writer.fileno(), b"x" * size)
    assert supervisor.unread() <= record_cost(size)


TEXTS = st.text(alphabet=st.one_of(st.characters(), st.sampled_from('\r\0\ud800"\\\U0001f600x')), max_size=300)


@given(TEXTS, st.integers(min_value=64, max_value=200))
def test_parts_have_the_whole_text_and_are_short(text: str, size: int) -> None:
    found = parts(text, size)
    if len(found) == 1:
        assert found == [text]
        return
    marks = [f" (part {number} of {len(found)})" for number in range(1, len(found) + 1)]
    assert all(part.endswith(mark) for part, mark in zip(found, marks, strict=True))
    assert "".join(part.removesuffix(mark) for part, mark in zip(found, marks, strict=True)) == text
    assert all(json_size(part) <= size for part in found)


async def test_parts_of_a_line_are_not_split_again(supervisor: Wire) -> None:
    queue = queue_to(supervisor)
    queue.add(line("x" * (4 * (log_socket()._piece - 2))))
    queue.add(line("y" * 3 * log_socket()._piece, notice=True, lines=0))
    await supervisor.read_until(lambda: not queue and not supervisor.unread())
    assert {record["event"].count("(part ") for record in supervisor.records} == {1}
    assert queue.written == 1


async def test_no_write_blocks_the_loop_and_every_line_comes_once(supervisor: Wire) -> None:
    queue = queue_to(supervisor)
    texts = [f"{number} {'x' * (number % 7000)}" for number in range(300)]
    async with watched() as loop:
        for text in texts:
            queue.add(line(text))
        await turns(loop, 100)  # nobody reads
        assert queue
        await supervisor.read_until(lambda: not queue and not supervisor.unread())
    assert supervisor.lines == [f"[Worker 0] {text}" for text in texts]


async def test_lines_are_joined_only_while_much_is_unread(supervisor: Wire) -> None:
    queue = queue_to(supervisor)
    for number in range(20):
        queue.add(line(f"line {number}"))
    await supervisor.read_until(lambda: not queue and not supervisor.unread())
    assert len(supervisor.records) == 20
    for number in range(20, 2000):
        queue.add(line(f"line {number}"))
    await supervisor.read_until(lambda: not queue and not supervisor.unread())
    assert supervisor.lines == [f"[Worker 0] line {number}" for number in range(2000)]
    assert len(supervisor.records) < 500


async def test_containers_take_turns(supervisor: Wire) -> None:
    queues = [queue_to(supervisor), queue_to(supervisor)]
    for number in range(200):
        queues[0].add(line(f"first {number}"))
    queues[1].add(line("second"))
    await supervisor.read_until(lambda: not any(queues) and not supervisor.unread())
    assert supervisor.lines[1] == "[Worker 0] second"


async def test_repeated_lines_come_after_all_others(supervisor: Wire) -> None:
    queue = queue_to(supervisor)
    again = LineQueue(LineLogger(supervisor, PYTORCHJOB), lambda count: None, again=True)
    for number in range(1000):
        again.add(line(f"again {number}", again=True))
    for number in range(300):
        queue.add(line(f"line {number}"))
    assert not again.has_room_again
    await supervisor.read_until(lambda: not queue and not again and not supervisor.unread())
    assert [text for text in supervisor.lines if "line" in text] == supervisor.lines[:300]
    assert "[Worker 0] (again, after a takeover)" in supervisor.lines
    assert [text for text in supervisor.lines if "0] again" in text] == [f"[Worker 0] again {n}" for n in range(1000)]


async def test_an_error_costs_one_line(supervisor: Wire) -> None:
    supervisor.connect()
    lost: list[int] = []

    def log(record: LogLine) -> None:
        if record.text == "bad":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        supervisor.info(record.text)

    queue = LineQueue(log, lost.append)
    for text in ("first", "bad", "last"):
        queue.add(line(text))
    await supervisor.read_until(lambda: supervisor.lines == ["first", "last"])
    assert lost == [1]
    assert queue.written == 2


async def test_lines_that_are_discarded_are_counted(supervisor: Wire) -> None:
    lost: list[int] = []
    queue = queue_to(supervisor, lost)
    supervisor.fill()
    queue.add(line("x" * 100_000))
    queue.add(line("y"))
    queue.add(line("a notice", notice=True, lines=0))
    async with watched() as loop:
        await turns(loop, 100)
    queue.discard()
    assert (sum(lost), bool(queue)) == (2, False)


async def test_message_of_a_trigger_is_written_at_once_while_it_fits(supervisor: Wire) -> None:
    supervisor.connect()
    assert admitted(supervisor, "a message")
    supervisor.fill()
    TASK.set("first")
    assert not admitted(supervisor, "another one", logger="job")
    TASK.set("second")
    await supervisor.read_until(lambda: not supervisor.unread() and len(supervisor.records) == 2)
    assert supervisor.records[1]["event"] == "another one"
    assert supervisor.records[1]["logger"] == "job"
    assert supervisor.records[1]["timestamp"].endswith("Z")


async def test_long_message_comes_in_parts_and_no_message_overtakes_another(supervisor: Wire) -> None:
    supervisor.connect()
    assert not admitted(supervisor, "\r" * 400_000)
    assert not admitted(supervisor, "short")
    await supervisor.read_until(lambda: supervisor.lines[-1:] == ["short"])
    assert sum(text.count("\r") for record in supervisor.records if (text := record["event"])) == 400_000
    assert supervisor.records[0]["event"].endswith(f"(part 1 of {len(supervisor.records) - 1})")


async def test_held_message_keeps_its_context() -> None:
    tasks: list[str] = []
    log_socket().connect(lambda: unread, 1000)
    unread = 1000
    for task in ("first", "second"):
        TASK.set(task)
        assert not log_socket().admit(lambda text, **kw: tasks.append(TASK.get()), "text", {})
    unread = 0
    await until(lambda: tasks == ["first", "second"])


async def test_thread_without_a_loop_may_block(supervisor: Wire) -> None:
    supervisor.connect()
    supervisor.fill()
    found: list[bool] = []
    socket = log_socket()
    thread = threading.Thread(target=lambda: found.append(socket.admit(supervisor.info, "text", {})))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert found == [True]


async def test_worker_writes_at_once() -> None:
    written: list[LogLine] = []
    queue = LineQueue(written.append, lambda count: None)
    queue.add(line("a line"))
    assert [each.text for each in written] == ["a line"]


async def test_log_is_read_although_other_lines_follow(supervisor: Wire) -> None:
    """A trigger that ends doesn't wait until the log of all others has been read, too."""
    queue = queue_to(supervisor)
    supervisor.fill()
    queue.add(line("the last one"))
    reading = asyncio.ensure_future(log_socket().read(240))
    others = queue_to(supervisor)
    async with watched() as loop:
        await turns(loop, 50)
        assert not reading.done()
        async with asyncio.timeout(240):
            while not reading.done():
                others.add(line("of another trigger" + "x" * 3000))
                if supervisor.unread() > 20_000:
                    supervisor.read_some()
                await asyncio.sleep(0.001)
    assert reading.result()
    assert "[Worker 0] the last one" in supervisor.lines
    assert supervisor.unread()


async def test_messages_are_read_although_lines_of_other_jobs_wait(supervisor: Wire) -> None:
    others = queue_to(supervisor)
    supervisor.fill()
    assert not admitted(supervisor, "the last message")
    others.add(line("of another job"))
    reading = asyncio.ensure_future(log_socket().read(240, lines=False))
    async with asyncio.timeout(240):
        while not reading.done():
            others.add(line("of another job" + "x" * 3000))
            if supervisor.unread() > 20_000:
                supervisor.read_some()
            await asyncio.sleep(0.001)
    assert reading.result()
    assert "the last message" in supervisor.lines
    assert others


async def test_messages_that_nobody_reads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGES_BYTES", 100)
    written: list[str] = []
    log_socket().connect(lambda: unread, 10_000)
    unread = 10_000
    texts = [f"{number:050}" for number in range(5)]
    for text in texts:
        assert not log_socket().admit(lambda text, **kw: written.append(text), text, {})
    unread = 0
    await until(lambda: len(written) == 3)
    missing = "3 messages of triggers in this process are missing here: Airflow did not read the log in time."
    assert written == [*texts[:2], missing]
    assert log_socket().admit(print, "next", {})


async def test_log_that_nobody_reads_is_not_waited_for(supervisor: Wire) -> None:
    queue_to(supervisor).add(line("a line"))
    assert not await log_socket().read(0.3)


async def test_log_to_which_nothing_was_written_counts_as_read(supervisor: Wire) -> None:
    assert await log_socket().read(30)


async def test_single_lines_wait_for_each_other(supervisor: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred streams of a line each cause two bursts: the first line, and all others."""
    monkeypatch.setattr(module, "BURST_INTERVAL", 3600.0)
    queues = [queue_to(supervisor) for _ in range(300)]
    queues[0].add(line("first"))
    await supervisor.read_until(lambda: len(supervisor.lines) == 1)
    queues[1].add(line("second"))
    async with watched() as loop:
        await turns(loop, 50)
    assert queues[1]
    monkeypatch.setattr(module, "BURST_INTERVAL", 0.1)
    admitted(supervisor, "x" * 50_000)  # a message doesn't wait
    await supervisor.read_until(lambda: "[Worker 0] second" in supervisor.lines)


# through a follower

LONG = [1, 10, 1000, 5000, 70_000, 256 * 1024, 2 * 1024 * 1024]
ODD = [b"10%|#   |\r20%|##  |\r", b"\xff\xfe\xfa", b"\0", b"\xed\xa0\x80", "é😀".encode(), b'"\\']


@pytest.mark.thorough
@pytest.mark.parametrize("goes_away", [False, True], ids=["is slow and stops", "goes away"])
async def test_odd_and_long_lines_neither_block_the_loop_nor_get_lost(supervisor: Wire, goes_away: bool) -> None:
    kube, lines = PodServer(), 0
    for pod in ("p0", "p1", "p2"):
        kube.pod(pod)
        log = kube.log(pod)
        for size in LONG:
            for odd in ODD:
                text = odd * (size // len(odd) + 1)
                log.write(
                    log_time(lines / 1000), f"[{lines:05}]".encode() + text[: min(size, 30_000 if lines % 2 else size)]
                )
                lines += 1
        log.end()
    supervisor.connect()
    seen: list[str] = []
    logger = LineLogger(supervisor, PYTORCHJOB)
    async with (
        watched() as loop,
        following(
            kube,
            logger,
            inspector=lambda source: lambda text, *_: seen.append(text[:7]),
        ) as follower,
    ):
        await turns(loop, 200)  # nobody reads
        for pod in ("p0", "p1", "p2"):
            follower.observe(kube.pod(pod, state="terminated", phase="Succeeded"))
        report = await follower.drain(240)
        assert report.unread == []
        assert sorted(seen) == [f"[{number:05}]" for number in range(lines)], "all are inspected while nobody reads"
        if goes_away:
            supervisor.go_away()
            report = await follower.log_remainder(240, 240, 240)
        else:
            reading = asyncio.ensure_future(supervisor.read_until(lambda: False, 0.0))
            report = await follower.log_remainder(240, 240, 240)
            reading.cancel()
            await supervisor.read_until(lambda: not supervisor.unread(), 0.0)
        assert loop.p99 < 0.05
    total = report.total
    assert total.lines + total.unlogged == lines
    logged = supervisor.data.decode()
    counted = Counter(number for number in range(lines) if f"[{number:05}]" in logged)
    if not goes_away:
        assert (total.unlogged, counted.total()) == (0, lines)
    assert all(logged.count(f"[{number:05}]") <= 1 for number in range(lines))


async def test_reading_does_not_wait_for_a_log_that_is_not_read(
    supervisor: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and causes are found while the supervisor is stuck; later, each line is logged once and in order."""
    monkeypatch.setattr(module, "QUEUE_BYTES", 20_000)
    kube, seen = PodServer(), [0]
    kube.pod("p")
    write(kube.log("p"), 0, MANY)
    supervisor.connect()
    supervisor.fill()

    def count(*line: object) -> None:
        seen[0] += 1

    async with (
        watched() as loop,
        following(
            kube,
            LineLogger(supervisor, PYTORCHJOB),
            inspector=lambda source: count,
        ) as follower,
    ):
        await until(lambda: seen[0] == MANY)
        await turns(loop, 50)
        assert follower.report().total.unlogged > 1000
        await supervisor.read_until(lambda: f"[Worker 0] line {MANY - 1}" in supervisor.lines[-1:])
        write(kube.log("p"), MANY, MANY + 10, begin=60)
        await supervisor.read_until(lambda: f"[Worker 0] line {MANY + 9}" in supervisor.lines[-1:])
        report = follower.report()
    assert supervisor.lines == [f"[Worker 0] {text}" for text in numbered(0, MANY + 10)]
    assert (report.total.lines, report.total.unlogged) == (MANY + 10, 0)
    assert seen == [MANY + 10]


async def test_lines_that_are_not_logged_in_time_are_counted(supervisor: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 20_000)
    kube = PodServer()
    kube.pod("p")
    write(kube.log("p"), 0, MANY)
    kube.log("p").end()
    supervisor.connect()
    async with following(kube, LineLogger(supervisor, PYTORCHJOB)) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        assert (await follower.drain(240)).unread == []
        report = await follower.log_remainder(0.3, 240, 240)
    await supervisor.read_until(lambda: not supervisor.unread())
    assert report.total.lines == len(supervisor.lines) < MANY
    assert report.total.lines + report.total.unlogged == MANY


@pytest.mark.parametrize("stuck", [True, False], ids=["are counted", "are waited for"])
async def test_waiting_lines_of_a_deleted_pod(supervisor: Wire, stuck: bool) -> None:
    kube = PodServer()
    kube.pod("p")
    write(kube.log("p"), 0, 50)
    supervisor.connect()
    supervisor.fill()
    async with following(kube, LineLogger(supervisor, PYTORCHJOB)) as follower:
        await until(lambda: follower.report().total.lines == 50)
        kube.log("p").end()
        follower.observe(kube.delete_pod("p"), deleted=True)
        assert (await follower.drain(240)).unread == []
        reading = asyncio.ensure_future(asyncio.sleep(0) if stuck else supervisor.read_until(lambda: False, 0.0))
        report = await follower.log_remainder(0.3 if stuck else 240, 240, 240)
        assert not log_socket().waiting_bytes
        reading.cancel()
    assert (report.total.lines, report.total.unlogged) == ((0, 50) if stuck else (50, 0))
    assert bool(report.containers) == stuck, "a log without gaps is forgotten"


@pytest.mark.parametrize("stuck", [True, False], ids=["is reported", "is in its place"])
async def test_gap_whose_notice_waits(supervisor: Wire, stuck: bool) -> None:
    kube = PodServer()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    supervisor.connect()
    supervisor.fill()
    async with following(kube, LineLogger(supervisor, PYTORCHJOB)) as follower:
        await until(lambda: follower.report().total.lines == 5)
        kube.log("p").end()
        kube.log("p", restart=3).end()
        follower.observe(kube.pod("p", restart=3, state="terminated", phase="Succeeded"))
        await follower.drain(240)
        reading = asyncio.ensure_future(asyncio.sleep(0) if stuck else supervisor.read_until(lambda: False, 0.0))
        report = await follower.log_remainder(0.3 if stuck else 240, 240, 240)
        reading.cancel()
    (tally,) = report.containers.values()
    assert tally.gaps
    assert tally.unsaid == (tally.gaps if stuck else ())


async def test_container_that_restarts_while_its_lines_wait(supervisor: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 20_000)
    kube = PodServer()
    kube.pod("p")
    write(kube.log("p"), 0, MANY)
    supervisor.connect()
    supervisor.fill()
    async with following(kube, LineLogger(supervisor, PYTORCHJOB)) as follower:
        await until(lambda: follower.report().total.unlogged > 500)
        kube.log("p").end()
        follower.observe(kube.pod("p", restart=1))
        write(kube.log("p", restart=1), MANY, MANY + 500, begin=100)
        await supervisor.read_until(lambda: f"[Worker 0] line {MANY + 499}" in supervisor.lines[-1:])
        report = follower.report()
    assert supervisor.lines == [f"[Worker 0] {text}" for text in numbered(0, MANY + 500)]
    assert report.total.unlogged == 0


@pytest.mark.parametrize(("what", "why"), [("rotates", "the node removed them"), ("deletes", "the pod was deleted")])
async def test_lines_that_are_removed_before_there_is_room_are_counted(
    supervisor: Wire, monkeypatch: pytest.MonkeyPatch, what: str, why: str
) -> None:
    """All are inspected; the log names the two times between which they are missing, and their number."""
    monkeypatch.setattr(module, "QUEUE_BYTES", 20_000)
    kube = PodServer()
    kube.pod("p")
    write(kube.log("p"), 0, MANY)
    supervisor.connect()
    supervisor.fill()
    async with following(kube, LineLogger(supervisor, PYTORCHJOB)) as follower:
        await until(lambda: follower.report().total.lines + follower.report().total.unlogged == MANY)
        if what == "rotates":
            kube.log("p").rotate()
            write(kube.log("p"), MANY, MANY + 10, begin=200)
            await until(lambda: follower.report().total.lines + follower.report().total.unlogged == MANY + 10)
        else:
            kube.log("p").end()
            follower.observe(kube.delete_pod("p"), deleted=True)

        def logged() -> list[str]:
            return [line for line in supervisor.lines if line.startswith("[Worker 0] line ")]

        def accounted_for() -> bool:
            total = follower.report().total
            return not total.unlogged and len(logged()) == total.lines

        await supervisor.read_until(accounted_for)
        report = follower.report()
    (gap,) = report.containers["p", "main"].gaps
    new = 10 * (what == "rotates")
    before = len(logged()) - new
    assert logged() == [f"[Worker 0] line {n}" for n in (*range(before), *range(MANY, MANY + new))]
    assert gap.startswith(f"{MANY - before:,} lines between {log_time((before - 1) / 100)} and ")
    assert why in gap
