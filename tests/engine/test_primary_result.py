"""The result of the primary, and how it is read from its log if nobody has read it there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import zlib
from collections.abc import AsyncIterator, Mapping
from time import thread_time
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.logs.result import PART_BYTES, PART_MARKER, keep_result_line
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.primary_result import LAST_LINES, MAX_READ_BYTES, PrimaryResult
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget
from tests.engine.tasks import Lines

FROM = {"pod": "train-master-0", "container": "pytorch", "time": "2026-11-22T08:40:04.500000000Z"}
SOURCE = LogLine("train-master-0", "pytorch", "Master", 0, 0, "", "")
LEFT_OUT = Handover(result_from=FROM)
FORBIDDEN = ApiStatusError(403, "Forbidden", "no right to read logs")
NEVER_FOLLOWED, READ_TO_THE_END, END_UNREAD = "never followed", "read to the end", "end unread"


class Logs:
    """An API server that has the logs of one container: of the newest run, and of the one before it.

    :param newest: its text, or what a request for it raises.
    :param failures: number of requests that it can't answer at first.
    """

    def __init__(self, newest: str | Exception, previous: str | None = None, failures: int = 0) -> None:
        self.newest, self.previous, self.queries = newest, previous, list[Mapping[str, str]]()
        self._failures = failures

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, query: Mapping[str, str], **_: Any) -> AsyncIterator[Any]:
        assert path == "/api/v1/namespaces/ns/pods/train-master-0/log"
        self.queries.append(query)
        if len(self.queries) <= self._failures:
            raise ApiStatusError(503, "ServiceUnavailable", "the API server restarts")
        text = self.previous if "previous" in query else self.newest
        if text is None:
            raise ApiStatusError(400, "BadRequest", "previous terminated container not found")
        if isinstance(text, Exception):
            raise text
        lines = text.splitlines(keepends=True)
        text = "".join(lines[-int(query.get("tailLines", len(lines))) :])
        yield SimpleNamespace(content=SimpleNamespace(iter_any=lambda: self.chunks(text.encode())))

    async def chunks(self, text: bytes) -> AsyncIterator[bytes]:
        size = 7 if len(text) < 10_000 else 1 << 20
        for start in range(0, min(len(text), MAX_READ_BYTES), size):
            yield text[start : start + size]


def printed_lines(value: Any) -> list[str]:
    """The numbered lines that a function under mpirun prints."""
    text = json.dumps({"returned": value})
    parts = [text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES)]
    rest = [f"{n}/{len(parts)} {zlib.crc32(text.encode()):08x} {part}" for n, part in enumerate(parts, 1)]
    return [f"{PART_MARKER}{zlib.crc32(line.encode()):08x} {line}" for line in rest]


def result_of(
    logs: Any, handover: Handover = LEFT_OUT, log: str = READ_TO_THE_END, pods: int = 1, job: Any = None
) -> PrimaryResult:
    """The result of a PyTorchJob.

    :param log: how much of the log of the Master's newest pod was read.
    :param pods: how many Masters there were, one after the other.
    """
    state, cursor = JobState(JobRef("PyTorchJob", "v1", "ns", "train", "uid"), handover), Cursor({})
    state.job = job
    labels = {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}
    for number in range(pods):
        created = {"uid": str(number), "creationTimestamp": f"2026-11-22T08:4{number}:00Z"}
        metadata = {"name": "train-master-0", "labels": labels, **created}
        pod = {"metadata": metadata, "spec": {"containers": [{"name": "pytorch"}]}, "status": {}}
        state.pods.update({str(number): pod}, (), timing.utc_now())
        cursor.position(str(number), "pytorch").complete = log != NEVER_FOLLOWED
    return PrimaryResult(FollowContext(logs, state, Lines(), cursor=cursor), StreamBudget())


async def completed(result: PrimaryResult, log: str = READ_TO_THE_END) -> tuple[Any, str, bool]:
    await result.complete({("train-master-0", "pytorch")} if log == END_UNREAD else ())
    return result.find()


async def test_line_is_read_again_from_its_second_on() -> None:
    logs = Logs("before\nKTRAIN_RESULT 1\nKTRAIN_RESULT broken\nafter")
    result = result_of(logs)
    assert await completed(result) == (1, "", True)
    assert result.origin == FROM
    (query,) = logs.queries
    assert (query["container"], query["sinceTime"]) == ("pytorch", "2026-11-22T08:40:04Z")


async def test_line_of_the_run_before_is_read_again() -> None:
    assert await completed(result_of(Logs("second run\n", "KTRAIN_RESULT 1\n"))) == (1, "", True)


async def test_numbered_lines_are_read_again() -> None:
    lines = printed_lines({"text": "x" * 5000})
    expected = {"returned": {"text": "x" * 5000}}
    assert await completed(result_of(Logs("\n".join(lines)))) == (expected, "", True)


async def test_newer_line_wins() -> None:
    result = result_of(Logs("KTRAIN_RESULT 1\n"), pods=2)
    result.take(SOURCE, "KTRAIN_RESULT 2", "2026-11-22T08:41:00.000000000Z")
    assert await completed(result) == (2, "", True)


async def test_line_of_a_master_after_the_end_does_not_count() -> None:
    """The operator may create one just after it has reported the end (recordings 103, 105c, 107c)."""
    ended = {"type": "Failed", "status": "True", "lastTransitionTime": "2026-11-22T08:40:30Z"}
    job = {"kind": "PyTorchJob", "metadata": {"name": "train", "uid": "uid"}, "status": {"conditions": [ended]}}
    result = result_of(Logs(""), Handover(), pods=2, job=job)
    for uid in ("0", "1"):
        result.take(dataclasses.replace(SOURCE, pod_uid=uid), f"KTRAIN_RESULT {uid}", "")
    assert result.find() == (0, "", True)


async def test_newer_line_without_json_does_not_win() -> None:
    result = result_of(Logs("KTRAIN_RESULT 1\n"))
    result.take(SOURCE, "KTRAIN_RESULT broken", "2026-11-22T08:41:00.000000000Z")
    assert await completed(result) == (1, "", True)


async def test_log_is_read_when_the_api_server_answers_again() -> None:
    assert await completed(result_of(Logs("KTRAIN_RESULT 1\n", failures=1))) == (1, "", True)


@pytest.mark.parametrize(
    ("logs", "handover", "log"),
    [
        pytest.param(Logs("", None), LEFT_OUT, READ_TO_THE_END, id="left-out"),
        pytest.param(Logs(FORBIDDEN), Handover(), NEVER_FOLLOWED, id="never-followed"),
        pytest.param(Logs(FORBIDDEN), Handover(), END_UNREAD, id="end-unread"),
        pytest.param(Logs("unable to retrieve container logs for x"), Handover(), NEVER_FOLLOWED, id="no-log"),
    ],
)
async def test_result_that_is_lost_is_reported(logs: Logs, handover: Handover, log: str) -> None:
    value, error, reported = await completed(result_of(logs, handover, log), log)
    assert (value, reported) == (None, False)
    assert error.startswith("Its result is unknown: the log of ")


METRICS = 'KTRAIN_METRIC {"loss": 1, "x": 1}\nKTRAIN_METRIC {"loss": 0.5}\n'
NOT_READ = "Its metrics are unknown: the log of Master 0 could not be read to its end"


@pytest.mark.parametrize(
    ("text", "log", "expected", "error"),
    [
        (METRICS, NEVER_FOLLOWED, 0.5, ""),
        (METRICS, END_UNREAD, 0.5, ""),
        (METRICS, READ_TO_THE_END, None, ""),
        ("", NEVER_FOLLOWED, None, ""),
        (FORBIDDEN, NEVER_FOLLOWED, None, NOT_READ),
        (METRICS + "x\n" * LAST_LINES[-1], END_UNREAD, None, "Its metrics are unknown: the last 100,000 lines of"),
    ],
    ids=["never followed", "end unread", "followed", "none", "forbidden", "too long"],
)
async def test_metrics_of_a_log_that_nobody_has_read_are_read(
    text: str | Exception, log: str, expected: float | None, error: str
) -> None:
    result = result_of(Logs(text), Handover(), log)
    result.take(SOURCE, "KTRAIN_RESULT 1", "")
    await result.read_metrics({"loss"}, {("train-master-0", "pytorch")} if log == END_UNREAD else set())
    assert {name: one["last"] for name, one in result.metrics.items()} == (
        {} if expected is None else {"loss": expected}
    )
    assert result.find()[1].startswith(error)
    assert bool(result.find()[1]) is bool(error)


async def test_metrics_of_a_primary_without_pods_are_unknown() -> None:
    result = result_of(Logs(""), Handover(), pods=0)
    await result.read_metrics({"loss"}, ())
    assert NOT_READ in result.find()[1]


async def test_result_of_a_primary_without_pods_is_unknown() -> None:
    value, error, reported = await completed(result_of(Logs(""), Handover(), pods=0))
    assert (value, reported) == (None, False)
    assert error == "Its result is unknown: the log of Master 0 could not be read to its end"


@pytest.mark.parametrize("log", [NEVER_FOLLOWED, END_UNREAD])
@pytest.mark.parametrize(("text", "expected"), [("a\nKTRAIN_RESULT 1\nb", (1, "", True)), ("", (None, "", False))])
async def test_end_of_a_log_that_nobody_has_read_is_read(log: str, text: str, expected: tuple[Any, str, bool]) -> None:
    logs = Logs(text)
    assert await completed(result_of(logs, Handover(), log), log) == expected
    assert [query["tailLines"] for query in logs.queries] == [str(LAST_LINES[0])]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (LAST_LINES[0], (1, "", True)),
        (
            LAST_LINES[1],
            (None, "Its result is unknown: the last 100,000 lines of the log of Master 0 have none", False),
        ),
    ],
)
async def test_result_before_many_lines_is_found_or_missed_in_words(
    after: int, expected: tuple[Any, str, bool]
) -> None:
    logs = Logs("KTRAIN_RESULT 1\n" + "a\n" * (after - 1) + "a")
    assert await completed(result_of(logs, Handover(), NEVER_FOLLOWED)) == expected
    assert [query["tailLines"] for query in logs.queries] == [str(number) for number in LAST_LINES]


async def test_later_result_wins() -> None:
    result = result_of(Logs("KTRAIN_RESULT 2\n"), Handover(result_line="KTRAIN_RESULT 1"))
    assert await completed(result, END_UNREAD) == (2, "", True)


@pytest.mark.parametrize("handover", [Handover(), Handover(result_line="KTRAIN_RESULT 3", result_from=FROM)])
async def test_nothing_is_read_again_without_need(handover: Handover) -> None:
    logs = Logs("KTRAIN_RESULT 1\n")
    result = result_of(logs, handover)
    await completed(result)
    assert result.line == handover.result_line
    assert not logs.queries


async def test_origin_is_the_line_that_is_held() -> None:
    result = result_of(Logs(""), Handover())
    times = [f"2026-11-22T08:40:0{second}.000000000Z" for second in range(5)]
    for text, time in zip(("a", "KTRAIN_RESULT 1", "KTRAIN_RESULT {}", "KTRAIN_RESULT x", "b"), times, strict=True):
        result.take(SOURCE, text, time)
    assert (result.line, result.origin["time"]) == ("KTRAIN_RESULT {}", times[2])


async def test_origin_of_numbered_lines_is_the_first_one() -> None:
    result = result_of(Logs(""), Handover())
    lines = printed_lines({"text": "x" * 5000})
    for number, line in enumerate(lines):
        result.take(dataclasses.replace(SOURCE, role="Launcher"), line, f"2026-11-22T08:40:0{number}.000000000Z")
    assert result.origin["time"].startswith("2026-11-22T08:40:00")
    assert keep_result_line(result.line, lines[0]) == result.line


async def test_result_of_an_earlier_line_does_not_replace_a_later_one() -> None:
    """After a takeover, lines since the handover are read beside the new ones."""
    result = result_of(Logs(""), Handover(result_line="KTRAIN_RESULT 1"))
    result.take(SOURCE, "KTRAIN_RESULT 2", "2026-11-22T08:41:00.000000000Z", earlier=True)
    assert result.line == "KTRAIN_RESULT 2"
    result.take(SOURCE, "KTRAIN_RESULT 4", "2026-11-22T08:43:00.000000000Z")
    result.take(SOURCE, "KTRAIN_RESULT 3", "2026-11-22T08:42:00.000000000Z", earlier=True)
    assert result.line == "KTRAIN_RESULT 4"
    assert result.origin["time"] == "2026-11-22T08:43:00.000000000Z"


async def test_result_before_a_takeover_is_searched_if_the_lines_were_not_read() -> None:
    logs = Logs("KTRAIN_RESULT 5\nafter")
    result = result_of(logs, Handover(handed_over_at=1_790_000_000.0))
    await result.complete((), {("train-master-0", "pytorch")})
    assert result.find() == (5, "", True)
    assert logs.queries[0]["sinceTime"].startswith("2026-09-21T")
    assert "tailLines" not in logs.queries[0]


async def test_result_after_a_takeover_is_not_searched() -> None:
    logs = Logs("KTRAIN_RESULT 5")
    result = result_of(logs, Handover(handed_over_at=1_790_000_000.0))
    result.take(SOURCE, "KTRAIN_RESULT 6", "2026-11-22T08:41:00.000000000Z")
    await result.complete((), {("train-master-0", "pytorch")})
    assert (result.find(), logs.queries) == ((6, "", True), [])


@pytest.mark.parametrize(
    ("line_size", "expected"),
    [
        (1024, (3, "", True)),
        (
            40 * 1024,
            (2, "Its result may be an earlier one: the log of Master 0 could not be read to its end", True),
        ),
    ],
    ids=["found in the last lines", "not found"],
)
async def test_result_in_a_part_of_the_log_does_not_replace_a_later_one(
    line_size: int, expected: tuple[Any, str, bool]
) -> None:
    """The API server sends the first 32 MiB of 40."""
    filler = f"{'x' * (line_size - 1)}\n" * (40 * 1024 * 1024 // line_size)
    result = result_of(Logs(f"KTRAIN_RESULT 1\n{filler}KTRAIN_RESULT 3\n"), Handover(handed_over_at=1.0))
    for line in ("KTRAIN_RESULT 1", "KTRAIN_RESULT 2"):  # the late reader came that far
        result.take(SOURCE, line, "", earlier=True)
    await result.complete((), {("train-master-0", "pytorch")})
    assert result.find() == expected


LONG = json.dumps([1] * 15_000)


@pytest.mark.parametrize("lines", [[f"KTRAIN_RESULT {LONG}"], printed_lines([1] * 15_000)], ids=["line", "parts"])
@pytest.mark.parametrize("handed_over", [False, True])
async def test_short_lines_with_a_marker_cost_little_while_a_large_result_is_held(
    lines: list[str], handed_over: bool
) -> None:
    held = functools.reduce(keep_result_line, lines, "")
    result = result_of(Logs(""), Handover(result_line=held) if handed_over else Handover())
    for line in lines:
        result.take(SOURCE, line, "")
    began = thread_time()
    for _ in range(200):
        result.take(SOURCE, "KTRAIN_RESULT x", "")
    assert thread_time() - began < 0.2, "each of them read the whole one that is held: 5 ms"
    assert result.line == held
