"""Lines go to a triggerer's supervisor in bursts: each of its reads costs queries to Airflow's database."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.core.logs.cursor import Position, Replay
from airflow_provider_ktrain.engine.logs import log_gate
from airflow_provider_ktrain.engine.logs.emitter import LogLine, RateLimitedEmitter
from airflow_provider_ktrain.engine.logs.log_gate import MIN_BURST_BYTES, MIN_BURST_LINES, LogGate


@pytest.fixture(autouse=True)
def long_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_gate, "BURST_INTERVAL", 3600.0)  # seconds: no test waits for it


class Streams:
    """Streams that log single lines through a gate."""

    def __init__(self, gate: LogGate) -> None:
        self.gate = gate
        self.logged: list[tuple[str, float]] = []

    async def log(self, stream: str, lines: int = 1, size: int = 80) -> None:
        async with self.gate.burst(), self.gate.turn():
            self.logged.append((stream, asyncio.get_running_loop().time()))
            self.gate.count(lines, size)

    async def is_held_back(self, lines: int = 1) -> bool:
        """Whether a line isn't logged although nothing else happens in the loop."""
        before = len(self.logged)
        logging = asyncio.ensure_future(self.log("next", lines))
        for _ in range(20):
            await asyncio.sleep(0)
        logging.cancel()
        return len(self.logged) == before


async def test_line_after_a_small_burst_waits() -> None:
    streams = Streams(LogGate(lambda: 0))
    await streams.log("first")
    assert await streams.is_held_back()


async def test_line_after_a_large_burst_is_logged_at_once() -> None:
    streams = Streams(LogGate(lambda: 0))
    await streams.log("first", MIN_BURST_LINES)
    assert not await streams.is_held_back()


async def test_line_after_a_burst_of_long_lines_is_logged_at_once() -> None:
    """The buffer of a response holds fewer than 32 long lines, so that each burst of them would wait."""
    streams = Streams(LogGate(lambda: 0))
    await streams.log("first", 2, MIN_BURST_BYTES)
    assert not await streams.is_held_back()


async def test_only_lines_that_are_logged_count_for_a_burst() -> None:
    """Lines that are known, over the rate limit, or only counted cost the supervisor nothing."""
    gate = LogGate(lambda: 0)
    source = LogLine("pod", "main", "worker", 0, 0, "", "")
    emitter = RateLimitedEmitter(lambda line: None, gate, source)
    emitter.count_only = True
    replay = Replay(Position(restart=0))
    replay.live = True
    await emitter.emit(b"2026-11-23T06:00:00.000000000Z a line", replay)
    assert emitter.tally.late == 1
    assert not await Streams(gate).is_held_back()


async def test_waiting_streams_log_in_one_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred streams of a line each cause two bursts: the first line, and all others."""
    monkeypatch.setattr(log_gate, "BURST_INTERVAL", 0.2)
    streams = Streams(LogGate(lambda: 0))
    await asyncio.gather(streams.log("first"))
    await asyncio.gather(*(streams.log(f"stream {n}") for n in range(299)))
    times = [at for _, at in streams.logged]
    assert len(times) == 300
    assert times[1] - times[0] >= 0.2
    assert {stream for stream, _ in streams.logged[1:]} == {f"stream {n}" for n in range(299)}
    assert not await streams.is_held_back()  # the burst was a large one


async def test_repeated_lines_do_not_delay_a_burst() -> None:
    """A stream that has nothing to log takes part in no burst."""
    streams = Streams(LogGate(lambda: 0))
    await streams.log("first", lines=0)
    assert not await streams.is_held_back()


async def test_worker_logs_each_line_at_once() -> None:
    """A task's supervisor serves one task and sends no queries."""
    streams = Streams(LogGate())
    await streams.log("first")
    assert not await streams.is_held_back()


async def test_cancelled_stream_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_gate, "BURST_INTERVAL", 0.1)
    streams = Streams(LogGate(lambda: 0))
    await streams.log("first")
    cancelled = asyncio.ensure_future(streams.log("cancelled"))
    await asyncio.sleep(0)
    cancelled.cancel()
    await streams.log("second")
    assert [stream for stream, _ in streams.logged] == ["first", "second"]
