"""Init containers that wait: their repeated lines are collapsed, and each is either logged or counted."""

from __future__ import annotations

import re

from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.logs.emitter import Inspect, LogLine

from .fakekube import FakeKube, LogFile, stamp, until
from .log_following import Sink, following

LOOKUP = "server can't find train-master-0: NXDOMAIN"


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
        await until(lambda: len(sink.lines) == 4)
        report = await follower.drain(60)
    assert sink.texts == [
        LOOKUP,
        "waiting for master",
        "waiting for master (repeated 90 times in 3 min, with 90 other lines)",
        "Name: train-master-0",
    ]
    assert all(line.init for line in sink.lines)
    assert (report.lines, report.dropped, report.gaps) == (183, 0, {}), "collapsed lines are counted"


async def test_repeated_lines_of_the_training_are_all_logged() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    async with following(kube, sink):
        wait(kube.log("p"), 0, 10)
        await until(lambda: sink.texts == [LOOKUP, "waiting for master"] * 10)


async def test_a_handover_neither_loses_nor_repeats_what_was_held_back() -> None:
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
    again = [LOOKUP, "waiting for master"]
    assert [re.sub(r" in \d+ (s|min)", "", text) for text in sink.texts] == [
        *again,
        "waiting for master (repeated 19 times, with 19 other lines)",
        *again,
        "waiting for master (repeated 29 times, with 29 other lines)",
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
    assert [len(texts) for texts in sink.by_run().values()] == [3, 1]


async def test_lines_that_are_held_back_come_although_nothing_follows() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", init=["prepare"], containers=[])
    async with following(kube, sink):
        for n in range(3):
            kube.log("p", "prepare").write(stamp(n), "waiting for the volume")
        await until(lambda: sink.texts == ["waiting for the volume"] * 3)
