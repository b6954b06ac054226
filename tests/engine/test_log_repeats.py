"""Init containers that wait: of their repeated lines, a few are logged, and the others are counted."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, Replay
from airflow_provider_ktrain.engine.logs import emitter
from airflow_provider_ktrain.engine.logs.emitter import MAX_REPETITIONS, Inspect, LogLine, RateLimitedEmitter
from airflow_provider_ktrain.engine.logs.log_gate import LogGate

from .fakekube import FakeKube, LogFile, stamp, until
from .log_following import Sink, following, gaps_of

LOOKUP = "server can't find train-master-0: NXDOMAIN"
LEFT_OUT = re.compile(r"\(([\d,]+) repeated lines? left out here\)")


def wait(log: LogFile, start: int, stop: int) -> None:
    """Write two lines every two seconds, as the init container of a Worker does."""
    for n in range(start, stop):
        log.write(stamp(2 * n), LOOKUP)
        log.write(stamp(2 * n, 1000), "waiting for master")


class Inspected:
    """Counts the lines that were read, logged or not."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, source: LogLine) -> Inspect:
        def inspect(text: str, time: str, run: int) -> None:
            self.lines += 1

        return inspect


async def test_repeated_lines_are_counted_before_the_next_line() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", init=["init-pytorch"], containers=[])
    log = kube.log("p", "init-pytorch")
    async with following(kube, sink) as follower:
        wait(log, 0, 91)
        log.write(stamp(182), "Name: train-master-0")
        await until(lambda: len(sink.lines) == 10)
        report = await follower.drain(60)
    assert sink.texts == [
        *[LOOKUP, "waiting for master"] * 4,
        "(174 repeated lines left out here)",
        "Name: train-master-0",
    ]
    assert sink.notes == []
    assert all(line.init for line in sink.lines)
    assert (report.total.lines, report.total.dropped, gaps_of(report)) == (183, 0, {}), (
        "lines that are left out are counted"
    )


async def test_repeated_lines_of_the_training_are_all_logged() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    async with following(kube, sink):
        wait(kube.log("p"), 0, 10)
        await until(lambda: sink.texts == [LOOKUP, "waiting for master"] * 10)


async def test_lines_before_and_after_a_handover_are_counted() -> None:
    kube, sink, inspected = FakeKube(), Sink(), Inspected()
    kube.pod("p", init=["init-pytorch"], containers=[])
    log = kube.log("p", "init-pytorch")
    wait(log, 0, 20)
    async with following(kube, sink, inspector=inspected) as worker:
        await until(lambda: inspected.lines == 40)
    cursor = Cursor.from_dict(worker.cursor.to_dict())
    wait(log, 20, 50)
    async with following(kube, sink, cursor=cursor, inspector=inspected) as triggerer:
        await until(lambda: inspected.lines == 100)
        await triggerer.drain(60)
    some = [LOOKUP, "waiting for master"] * 4
    assert sink.texts == [
        *some,
        "(32 repeated lines left out here)",
        *some,
        "(52 repeated lines left out here)",
    ]


async def test_runs_of_an_init_container_are_not_mixed() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", init=["prepare"], containers=[])
    first = kube.log("p", "prepare")
    async with following(kube, sink) as follower:
        wait(first, 0, 5)
        first.end()
        follower.observe(kube.pod("p", init=["prepare"], containers=[], restart=1))
        kube.log("p", "prepare", 1).write(stamp(60), "waiting for master")
        await until(lambda: len(sink.by_run()) == 2)
    assert [len(texts) for texts in sink.by_run().values()] == [9, 1]


def logged(*lines: str) -> tuple[list[str], int]:
    """What is logged of lines of an init container, and how many lines the report counts."""
    sink = Sink()

    async def emit() -> int:
        position = Position()
        source = LogLine("p", "prepare", "Worker", 0, 0, "", "", init=True)
        emitting = RateLimitedEmitter(sink, LogGate(), source)
        block = "\n".join(f"{stamp(n)} {text}" for n, text in enumerate(lines))
        await emitting.emit(block.encode(), Replay(position))
        emitting.finish(position)
        return emitting.tally.lines

    count = asyncio.run(emit())
    assert sink.notes == []
    return sink.texts, count


@pytest.mark.parametrize("form", ["2026-11-21T10:00:{}.123Z", "2026/11/21 10:00:{}", "[10:00:{},5]"])
def test_times_do_not_distinguish_lines(form: str) -> None:
    lines = [f"{form.format(10 + n)} waiting for master" for n in range(20)]
    assert logged(*lines) == ([*lines[:7], "(13 repeated lines left out here)"], 20)


def test_other_numbers_distinguish_lines() -> None:
    lines = [f"fetched shard {n} of 20" for n in range(20)]
    assert logged(*lines) == (lines, 20)


def test_lines_that_differ_are_all_logged() -> None:
    lines = [f"step {name}" for name in "abcdefghijklm"] * 3
    assert logged(*lines) == (lines, 39), "a cycle of more lines than are compared"


def test_a_line_that_recurs_between_others_is_logged() -> None:
    lines = [line for n in range(20) for line in (f"package {n}", "-----")]
    assert logged(*lines) == (lines, 40)


def test_repetitions_are_logged_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter, "REPETITION_SECONDS", 0.0)
    lines = ["waiting for master"] * 20
    assert logged(*lines) == (lines, 20)


TEXTS = st.one_of(
    st.sampled_from(["waiting", "waiting 10:00:01", "waiting 10:00:22", LOOKUP, "\tName: m"]),
    st.sampled_from("abcdefghijkl"),
)


@given(st.lists(TEXTS, min_size=1, max_size=80))
def test_no_line_is_left_out_without_being_counted(lines: list[str]) -> None:
    texts, count = logged(*lines)
    read = 0
    for text in texts:
        if found := LEFT_OUT.fullmatch(text):
            assert int(found[1]) > 0
            read += int(found[1])
        else:
            assert text == lines[read], "each line in its place"
            read += 1
    assert read == count == len(lines)
    assert len(texts) >= min(len(lines), MAX_REPETITIONS)
