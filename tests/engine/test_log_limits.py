"""Limits of log following: rate limit, stream budget, long lines, and pauses after a stall."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Position, Replay
from airflow_provider_ktrain.engine.logs import emitter, log_socket, stream_budget
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget
from tests.apiserver import PodServer, log_time
from tests.until import until
from tests.virtual import passes

from .log_following import Sink, following, numbered, of_each_kind, write

pytestmark = pytest.mark.virtual_time


def limit_rate(monkeypatch: pytest.MonkeyPatch, *, bytes_per_second: int, burst_bytes: int) -> None:
    monkeypatch.setattr(emitter, "BYTES_PER_SECOND", bytes_per_second)
    monkeypatch.setattr(emitter, "BURST_BYTES", burst_bytes)


def limit_streams(monkeypatch: pytest.MonkeyPatch, streams: int, turn: float) -> None:
    monkeypatch.setattr(stream_budget, "STREAMS", streams)
    monkeypatch.setattr(stream_budget, "TURN_SECONDS", turn)


async def test_rate_limit_drops_and_counts_a_flood_and_spares_other_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rate(monkeypatch, bytes_per_second=1000, burst_bytes=100_000)
    kube, sink = PodServer(), Sink()
    kube.pod("flood")
    kube.pod("quiet")
    for n in range(5000):
        kube.log("flood").write(log_time(n / 1000), f"line {n} " + "x" * 1000)
    write(kube.log("quiet"), 0, 100)
    for pod in ("flood", "quiet"):
        kube.log(pod).end()
    async with following(kube, sink) as follower:
        for pod in ("flood", "quiet"):
            follower.observe(kube.pod(pod, state="terminated", phase="Succeeded"))
        report = await follower.drain(60)
    runs = sink.by_run()
    assert runs["quiet", "main", 0] == numbered(0, 100)
    flood = report.containers["flood", "main"]
    assert 90 < flood.lines < 200
    assert flood.lines + flood.dropped == 5000
    notice = next(notice for notice in sink.notices if f"{flood.dropped:,} lines" in notice)
    assert " MiB) here: over the limit of 1,000 bytes/s" in notice
    assert report.unread == []


async def test_endless_line_is_cut() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    for n in range(40):
        log.write(log_time(n / 100), "x" * 16384, partial=True)
    log.write(log_time(1), "end")
    log.write(log_time(2), "next")
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 2)
        report = await follower.drain(60)
    assert sink.lines[0].text.startswith("xxx")
    assert sink.lines[0].text.endswith("bytes cut)")
    assert len(sink.lines[0].text) < 270_000
    assert sink.lines[1].text == "next"
    assert report.containers["p", "main"].dropped_bytes > 390_000


async def test_streams_over_the_budget_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_streams(monkeypatch, 3, turn=0.2)
    kube, sink = PodServer(), Sink()
    names = [f"p{n}" for n in range(12)]
    for name in names:
        kube.pod(name)
        write(kube.log(name), 0, 5)
    most_open = 0
    async with following(kube, sink) as follower, asyncio.timeout(240):
        for turn in range(1, 4):
            await until(lambda t=turn: len(sink.lines) == len(names) * 5 * t)
            most_open = max(most_open, kube.open)
            for name in names:
                write(kube.log(name), 5 * turn, 5 * turn + 5)
        report = await follower.drain(60)
    assert most_open <= 3
    assert sink.by_run() == {(name, "main", 0): numbered(0, 20) for name in names}
    assert report.unread == []


async def test_turn_begins_with_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine, a request may take longer than a turn. The turn must not be over before it reads a line."""
    limit_streams(monkeypatch, 1, turn=0.05)
    budget, ended = StreamBudget(), asyncio.Event()

    async def wait_for_a_slot() -> None:
        async with budget.slot():
            pass

    async with budget.slot() as slot:
        waiting = asyncio.ensure_future(wait_for_a_slot())
        await asyncio.sleep(0.15)
        slot.on_revoke(ended.set)
        assert not ended.is_set()
        await until(ended.is_set)
        assert slot.revoked
    await waiting


async def test_every_line_is_inspected_before_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_rate(monkeypatch, bytes_per_second=1, burst_bytes=100)
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    seen: list[str] = []
    sources: list[LogLine] = []

    def inspector(source: LogLine) -> Any:
        sources.append(source)
        return lambda text, *_: seen.append(text)

    write(kube.log("p"), 0, 1000)
    kube.log("p").end()
    async with following(kube, sink, inspector=inspector) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(240)
    assert report.total.dropped > 900
    assert seen == numbered(0, 1000)
    assert [(source.pod, source.role, source.index) for source in sources] == [("p", "Worker", 0)]


async def test_text_without_a_time_is_not_a_line_to_log_later() -> None:
    """A kubelet may add it to one response and not to the next one."""
    live = emitter.RateLimitedEmitter(lambda line: None, LogLine("p", "main", "Worker", 0, 0, "", ""))
    at = Position()
    live.fall_behind(at)
    block = f"{log_time(1)} a\n{log_time(2)} b\nfailed to create fsnotify watcher: too many open files".encode()
    await live.emit(block, Replay(at))
    assert live.backlog is not None
    assert live.tally.unlogged == live.backlog.total == 2
    with pytest.raises(emitter.EndReached):
        await live.log_again(block, Replay(live.backlog.logged))
    assert live.has_caught_up()
    assert (live.tally.unlogged, live.tally.lines) == (0, 2)


@of_each_kind
async def test_no_line_is_logged_right_after_a_stall(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow needs time to cancel a trigger that it has reassigned to another triggerer. Reading goes on."""
    kube, sink, seen = PodServer(), Sink(), []
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 5)
    log_socket.log_socket().connect(lambda: 0, 100_000)
    monkeypatch.setattr(log_socket, "STALL_SECONDS", 3600)
    monkeypatch.setattr(log_socket, "SETTLE_SECONDS", 3600)
    inspector = lambda source: lambda text, *_: seen.append(text)  # noqa: E731
    async with following(kube, sink, kind=kind, inspector=inspector):
        await until(lambda: len(sink.lines) == 5)
        await asyncio.sleep(2)
        # only now, because the process may stall on a loaded machine
        monkeypatch.setattr(log_socket, "STALL_SECONDS", 0.2)
        passes(0.3)  # the stall
        write(log, 5, 10)
        await until(lambda: len(seen) == 10)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(sink.lines) == 5


async def test_trigger_that_is_canceled_after_a_stall_logs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another triggerer logs these lines."""
    kube, sink, seen = PodServer(), Sink(), list[str]()
    kube.pod("p")
    socket = log_socket.log_socket()
    socket.connect(lambda: 0, 100_000)
    monkeypatch.setattr(log_socket, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(log_socket, "SETTLE_SECONDS", 3600)
    inspector = lambda source: lambda text, *_: seen.append(text)  # noqa: E731
    async with following(kube, sink, inspector=inspector) as follower:
        await asyncio.sleep(0.1)
        passes(0.3)  # the stall
        write(kube.log("p"), 0, 5)
        await until(lambda: len(seen) == 5)
        monkeypatch.setattr(log_socket, "STALL_SECONDS", 3600)
        assert socket.waiting_bytes
        assert await follower.close() == 5
    assert not socket.waiting_bytes
    assert (follower.report().total.lines, follower.report().total.unlogged, sink.texts) == (0, 5, [])


async def test_start_of_a_trigger_is_no_stall_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many triggers that start at once keep the loop busy."""
    monkeypatch.setattr(log_socket, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(log_socket, "SETTLE_SECONDS", 3600)
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    log_socket.log_socket().connect(lambda: 0, 100_000)
    async with following(kube, sink):
        passes(0.3)
        await until(lambda: len(sink.lines) == 5)


async def test_lines_continue_after_a_stall_without_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_socket, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(log_socket, "SETTLE_SECONDS", 0.2)
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    log_socket.log_socket().connect(lambda: 0, 100_000)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        passes(0.3)  # the stall
        write(kube.log("p"), 5, 10)
        await until(lambda: len(sink.lines) == 10)
        await follower.drain(240)
    assert sink.texts == numbered(0, 10)


async def test_limit_of_an_init_container_is_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits repeats the same few lines."""
    monkeypatch.setattr(emitter, "INIT_BURST_BYTES", 10_000)
    kube, sink = PodServer(), Sink()
    kube.pod("p", init=["init-pytorch"], containers=["main"])
    for container in ("init-pytorch", "main"):
        for n in range(1000):
            kube.log("p", container).write(log_time(2 * n), f"waiting for master {n:04}")
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.by_run().get(("p", "main", 0), [])) == 1000)
        report = await follower.drain(60)
    init = report.containers["p", "init-pytorch"]
    assert 300 < init.lines < 500
    assert init.lines + init.dropped == 1000
    (notice,) = sink.notices
    assert "over the limit of 16 bytes/s" in notice


async def test_tail_check_requests_few_bytes() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    async with following(kube, sink) as follower:
        for n in range(5):
            log.write(log_time(n), "y" * 100_000)
        log.end()
        await until(lambda: len(sink.lines) == 5)
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(240)
    assert report.unread == []
    assert {int(query["limitBytes"]) for query in kube.queries if "tailLines" in query} == {4097}
