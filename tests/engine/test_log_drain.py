"""The end of following: the final drain, deleted pods, and logs that the API server refuses to return."""

from __future__ import annotations

import asyncio
import time

import pytest

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import SLICE_SECONDS
from tests.apiserver import PodServer
from tests.until import until
from tests.virtual import passes

from .log_following import Sink, following, gaps_of, numbered, of_each_kind, write

pytestmark = pytest.mark.virtual_time


async def test_kept_container_does_not_prolong_the_drain_of_another() -> None:
    kube = PodServer()
    kube.pause("before GET .*/q/log")  # that log is never answered
    kube.pod("q", state="terminated", phase="Succeeded")
    kube.pod("p")
    log = kube.log("p")
    async with following(kube, Sink()) as follower:

        async def chatter() -> None:
            for number in range(100_000):
                write(log, number, number + 1)
                await asyncio.sleep(0.05)

        writing = asyncio.create_task(chatter())
        report = await follower.drain(5, longest=240, keep_open=True)
        writing.cancel()
    assert report.unread == [("q", "main")]


class SlowSink(Sink):
    """A sink that needs time for each line, like the logger on a loaded machine."""

    def __call__(self, line: LogLine) -> None:
        passes(0.025)
        if not len(self.lines) % 20:
            time.sleep(2 * SLICE_SECONDS)  # the slices are of real time
        super().__call__(line)


async def test_drain_continues_while_lines_come() -> None:
    kube, sink = PodServer(), SlowSink()
    kube.pod("p")
    write(kube.log("p"), 0, 400)
    kube.log("p").end()
    async with following(kube, sink) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(8, longest=240)
    assert sink.texts == numbered(0, 400)
    assert (report.total.unlogged, report.unread) == (0, [])


async def test_drain_counts_and_inspects_lines_that_it_has_no_time_to_log() -> None:
    kube, sink, seen = PodServer(), SlowSink(), []
    kube.pod("p")
    write(kube.log("p"), 0, 400)
    kube.log("p").end()

    async with following(kube, sink, inspector=lambda source: lambda text, *_: seen.append(text)) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(6)
    assert report.total.lines == len(sink.lines) < 400
    assert report.total.lines + report.total.unlogged == 400
    assert seen == numbered(0, 400)
    assert report.unread == []


@of_each_kind
async def test_refused_logs_are_retried_with_one_warning(kind: Kind) -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", containers="ab")
    for container in "ab":
        write(kube.log("p", container), 0, 5)
    kube.refuse(403)
    async with following(kube, sink, kind=kind) as follower:
        await until(lambda: kube.refused > 6)
        (notice,) = sink.notices
        assert "403 Forbidden" in notice
        assert "`pods/log`" in notice
        kube.clear_failures()
        await until(lambda: len(sink.lines) == 10)
        report = await follower.drain(60)
    assert len(sink.notices) == 1
    assert (gaps_of(report), report.unread) == ({}, [])


async def test_refused_log_is_retried_in_the_final_drain() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    kube.log("p").end()
    kube.refuse(403)
    async with following(kube, sink) as follower:
        await until(lambda: kube.refused > 3)
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        draining = asyncio.create_task(follower.drain(240))
        refused = kube.refused
        await until(lambda: kube.refused > refused)
        kube.clear_failures()
        report = await draining
    assert sink.texts == numbered(0, 5)
    assert (gaps_of(report), report.unread) == ({}, [])
