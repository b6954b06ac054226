"""The end of following: the final drain, deleted pods, and logs that the API server refuses to return."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import SLICE_SECONDS
from tests.apiserver import LogFile, PodServer, log_time
from tests.until import until
from tests.virtual import passes

from .log_following import Sink, following, gaps_of, numbered, of_each_kind, write

pytestmark = pytest.mark.virtual_time


class Read(NamedTuple):
    """A pod `p` that runs, and whose first five lines were read."""

    kube: PodServer
    log: LogFile
    sink: Sink
    follower: LogFollower


@contextlib.asynccontextmanager
async def five_lines_read(kube: PodServer | None = None) -> AsyncIterator[Read]:
    """
    :param kube: the cluster, possibly with other pods.
    """
    kube, sink = kube or PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        yield Read(kube, kube.log("p"), sink, follower)


async def test_pod_deleted_while_followed_is_read_to_the_end() -> None:
    async with five_lines_read() as (kube, log, sink, follower):
        pod = kube.delete_pod("p")
        follower.observe(pod, deleted=True)
        write(log, 5, 10)
        log.end()
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 10)
    assert report.unread == []


async def test_last_line_without_line_end_is_emitted_after_the_pod_was_deleted() -> None:
    kube, sink = PodServer(), Sink()
    pod = kube.pod("p")
    log = kube.log("p")
    log.write(log_time(1), "first")
    log.write(log_time(2), "no newline at the end", partial=True)
    async with following(kube, sink) as follower:
        await until(lambda: sink.texts == ["first"])
        kube.delete_pod("p")
        follower.observe(pod, deleted=True)
        log.end()
        report = await follower.drain(240)
    assert sink.texts == ["first", "no newline at the end"]
    assert (gaps_of(report), report.unread) == ({}, [])


async def test_deleted_pod_that_was_read_or_never_started_leaves_no_gap() -> None:
    kube, sink = PodServer(), Sink()
    pods = [kube.pod("read", state="terminated", phase="Succeeded"), kube.pod("waits", state="waiting")]
    write(kube.log("read"), 0, 5)
    kube.log("read").end()
    async with following(kube, sink) as follower:
        await follower.drain(240)
        saved = follower.cursor.to_dict()
    kube.pods.clear()
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        for pod in pods:
            follower.observe(pod, deleted=True)
        report = await follower.drain(240)
    assert (gaps_of(report), sink.notes) == ({}, [])


async def test_drain_reads_a_running_container_up_to_now() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 50)
    async with following(kube, sink) as follower:
        await until(lambda: sink.lines)
        write(log, 50, 100)
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 100)
    assert report.unread == []


async def test_kept_container_is_followed_until_its_pod_is_deleted() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 50)
    async with following(kube, sink) as follower:
        await until(lambda: sink.lines)
        write(log, 50, 100)
        report = await follower.drain(60, keep_open=True)
        assert sink.texts == numbered(0, 100)
        assert report.unread == []
        write(log, 100, 150)
        await until(lambda: len(sink.lines) == 150)
        write(log, 150, 160)
        log.end()
        kube.delete_pod("p")
        report = await follower.drain_deleted(60, 60)
    assert sink.texts == numbered(0, 160)
    assert (report.total.lines, report.unread, gaps_of(report)) == (160, [], {})


async def test_kept_container_with_an_unended_line_has_caught_up() -> None:
    async with five_lines_read() as (kube, log, sink, follower):
        log.write(log_time(1), "50% ", partial=True)
        assert (await follower.drain(60, keep_open=True)).unread == []
        log.write(log_time(1), "100%")
        log.end()
        kube.delete_pod("p")
        await follower.drain_deleted(60, 60)
    assert sink.texts == [*numbered(0, 5), "50% 100%"]


async def test_kept_container_does_not_prolong_the_drain_of_another() -> None:
    kube = PodServer()
    kube.pause("before GET .*/q/log")  # that log is never answered
    kube.pod("q", state="terminated", phase="Succeeded")
    async with five_lines_read(kube) as (_, log, _, follower):

        async def chatter() -> None:
            for number in range(5, 100_000):
                write(log, number, number + 1)
                await asyncio.sleep(0.05)

        writing = asyncio.create_task(chatter())
        report = await follower.drain(5, longest=240, keep_open=True)
        writing.cancel()
    assert report.unread == [("q", "main")]


async def test_kept_container_that_cannot_catch_up_is_drained() -> None:
    async with five_lines_read() as (kube, log, sink, follower):
        kube.away = True
        kube.cut()
        report = await follower.drain(0.2, keep_open=True)
        assert report.unread == [("p", "main")]
        kube.away = False
        write(log, 5, 6)
        report = await follower.drain_deleted(60, 60)
    assert len(sink.lines) == 5
    assert report.unread == [("p", "main")]


async def test_kept_container_whose_stream_was_cut_at_the_end_has_a_gap() -> None:
    async with five_lines_read() as (kube, _, sink, follower):
        assert (await follower.drain(60, keep_open=True)).unread == []
        kube.delete_pod("p")
        kube.cut()
        report = await follower.drain_deleted(60, 60)
    assert sink.notes == list(gaps_of(report)["p", "main"])
    assert "the pod was deleted before its log was read to the end" in sink.notes[0]


async def test_drain_ends_in_time_and_reports_unread_containers() -> None:
    async with five_lines_read() as (kube, _, _, follower):
        kube.away = True
        kube.cut()
        report = await follower.drain(0.2)
    assert report.unread == [("p", "main")]


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

    async with following(kube, sink, inspector=lambda source: lambda text, time, run: seen.append(text)) as follower:
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
        (note,) = sink.notes
        assert "403 Forbidden" in note
        assert "`pods/log`" in note
        kube.clear_failures()
        await until(lambda: len(sink.lines) == 10)
        report = await follower.drain(60)
    assert len(sink.notes) == 1
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


async def test_drain_gives_up_a_log_that_stays_refused() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    kube.refuse(403)
    async with following(kube, sink) as follower:
        report = await follower.drain(240)
    assert "403 Forbidden" in gaps_of(report)["p", "main"][0]
    assert report.unread == [("p", "main")]


async def test_container_that_was_read_is_not_read_again_while_its_pod_exists() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    write(kube.log("p"), 0, 5)
    kube.log("p").end()
    async with following(kube, sink) as follower:
        await until(lambda: follower.report().containers["p", "main"].complete)
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        await follower.drain(240)
    assert sink.texts == numbered(0, 5)
