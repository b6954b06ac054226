"""The result of the primary, and how it is read again if the handover had no room for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import zlib
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.logs.result import PART_BYTES, PART_MARKER, keep_result_line
from airflow_provider_ktrain.engine.api import ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.messages import Handover
from airflow_provider_ktrain.engine.follow.primary_result import PrimaryResult
from airflow_provider_ktrain.engine.logs.emitter import LogLine
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget

FROM = {"pod": "train-master-0", "container": "pytorch", "time": "2026-11-22T08:40:04.500000000Z"}
SOURCE = LogLine("train-master-0", "pytorch", "Master", 0, 0, "", "")
LEFT_OUT = Handover(result_from=FROM)


class Logs:
    """An API server that has the logs of one container: of the newest run, and of the one before it.

    :param newest: its text, or what a request for it raises.
    """

    def __init__(self, newest: str | Exception, previous: str | None = None) -> None:
        self.newest, self.previous, self.queries = newest, previous, list[Mapping[str, str]]()

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], **_: Any) -> AsyncIterator[Any]:
        assert path == "/api/v1/namespaces/ns/pods/train-master-0/log"
        self.queries.append(query)
        text = self.previous if "previous" in query else self.newest
        if text is None:
            raise ApiStatusError(400, "BadRequest", "previous terminated container not found")
        if isinstance(text, Exception):
            raise text
        yield SimpleNamespace(content=SimpleNamespace(iter_any=lambda: self.chunks(text.encode())))

    async def chunks(self, text: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(text), 7):
            yield text[start : start + 7]


def printed_lines(value: Any) -> list[str]:
    """The numbered lines that a function under mpirun prints."""
    text = json.dumps({"returned": value})
    parts = [text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES)]
    rest = [f"{n}/{len(parts)} {zlib.crc32(text.encode()):08x} {part}" for n, part in enumerate(parts, 1)]
    return [f"{PART_MARKER}{zlib.crc32(line.encode()):08x} {line}" for line in rest]


def result_of(logs: Any, handover: Handover = LEFT_OUT) -> PrimaryResult:
    return PrimaryResult(logs, "ns", StreamBudget(), handover)


def found(result: PrimaryResult) -> tuple[Any, str]:
    return result.find(PYTORCHJOB, {}, ())


async def test_line_is_read_again_from_its_second_on() -> None:
    logs = Logs("before\nKTRAIN_RESULT 1\nKTRAIN_RESULT broken\nafter")
    result = result_of(logs)
    result.start()
    await result.complete()
    assert found(result) == (1, "")
    assert result.origin == FROM, "for the next process"
    (query,) = logs.queries
    assert (query["container"], query["sinceTime"]) == ("pytorch", "2026-11-22T08:40:04Z")


async def test_line_of_the_run_before_is_read_again() -> None:
    result = result_of(Logs("second run\n", "KTRAIN_RESULT 1\n"))
    await result.complete()
    assert found(result) == (1, "")


async def test_numbered_lines_are_read_again() -> None:
    lines = printed_lines({"text": "x" * 5000})
    result = result_of(Logs("\n".join(lines)))
    await result.complete()
    assert found(result) == ({"returned": {"text": "x" * 5000}}, "")


async def test_newer_line_wins() -> None:
    result = result_of(Logs("KTRAIN_RESULT 1\n"))
    result.take(SOURCE, "KTRAIN_RESULT 2", "2026-11-22T08:41:00.000000000Z")
    await result.complete()
    assert found(result) == (2, "")


async def test_newer_line_without_json_does_not_win() -> None:
    result = result_of(Logs("KTRAIN_RESULT 1\n"))
    result.take(SOURCE, "KTRAIN_RESULT broken", "2026-11-22T08:41:00.000000000Z")
    await result.complete()
    assert found(result) == (1, "")


async def test_log_that_could_not_be_read_is_read_again_at_the_end() -> None:
    logs = Logs(ApiStatusError(403, "Forbidden", "the API server restarts"))
    result = result_of(logs)
    result.start()
    result.start()
    while len(logs.queries) < 2:  # noqa: ASYNC110 - both runs were tried
        await asyncio.sleep(0)
    logs.newest = "KTRAIN_RESULT 1\n"
    await result.complete()
    assert found(result) == (1, "")


async def test_result_that_is_lost_is_reported() -> None:
    result = result_of(Logs("", None))
    await result.complete()
    value, error = found(result)
    assert value is None
    assert error.startswith("Its result is left out: it was too large for the trigger, and the log of train-master-0")


async def test_reading_ends_with_the_following() -> None:
    result = result_of(Logs(ApiUnavailable("no route")))
    result.start()
    await asyncio.sleep(0)
    await result.close()
    assert result.origin == FROM, "the next process reads it"


@pytest.mark.parametrize("handover", [Handover(), Handover(result_line="KTRAIN_RESULT 3", result_from=FROM)])
async def test_nothing_is_read_again_without_need(handover: Handover) -> None:
    logs = Logs("KTRAIN_RESULT 1\n")
    result = result_of(logs, handover)
    result.start()
    await result.complete()
    assert result.line == handover.result_line
    assert not logs.queries


def test_origin_is_the_line_that_is_held() -> None:
    result = result_of(Logs(""), Handover())
    times = [f"2026-11-22T08:40:0{second}.000000000Z" for second in range(5)]
    for text, time in zip(("a", "KTRAIN_RESULT 1", "KTRAIN_RESULT {}", "KTRAIN_RESULT x", "b"), times, strict=True):
        result.take(SOURCE, text, time)
    assert (result.line, result.origin["time"]) == ("KTRAIN_RESULT {}", times[2])


def test_origin_of_numbered_lines_is_the_first_one() -> None:
    result = result_of(Logs(""), Handover())
    lines = printed_lines({"text": "x" * 5000})
    for number, line in enumerate(lines):
        result.take(dataclasses.replace(SOURCE, role="Launcher"), line, f"2026-11-22T08:40:0{number}.000000000Z")
    assert result.origin["time"].startswith("2026-11-22T08:40:00")
    assert keep_result_line(result.line, lines[0]) == result.line
