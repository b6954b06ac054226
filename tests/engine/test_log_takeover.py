"""After a takeover, new lines are followed at once. Those since the handover are logged again beside them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterable

import pytest

from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, Replay
from airflow_provider_ktrain.engine.logs import follower as module
from airflow_provider_ktrain.engine.logs.emitter import (
    COUNTED_LINES,
    EarlierEmitter,
    EndReached,
    Inspect,
    RateLimitedEmitter,
)
from airflow_provider_ktrain.engine.logs.follower import LogFollower, Takeover
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from tests.apiserver import PodServer, log_time
from tests.until import until

from .log_following import Sink, following, gaps_of, numbered, write

pytestmark = pytest.mark.virtual_time

AT = 60.0  # seconds: when the other triggerer took over
BEFORE, AFTER = numbered(0, 600), numbered(600, 700)  # ten lines a second


class Seen:
    """Inspects lines before or after the takeover."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, source: LogLine) -> Inspect:
        return lambda text, *_: self.texts.append(text)


async def handed_over(kube: PodServer, lines: int = 10) -> Cursor:
    """The cursor of a worker that has read that many lines of pod p."""
    sink = Sink()
    async with following(kube, sink) as worker:
        await until(lambda: len(sink.lines) == lines)
    return Cursor.from_dict(json.loads(json.dumps(worker.cursor.to_dict())))


class Taken:
    """A follower after a takeover, and what became of the lines."""

    def __init__(self, kube: PodServer, follower: LogFollower, sink: Sink, live: Seen, earlier: Seen) -> None:
        self.kube, self.follower, self.sink, self.live, self.earlier = kube, follower, sink, live, earlier

    @property
    def new(self) -> list[str]:
        return [line.text for line in self.sink.lines if not line.again]

    @property
    def again(self) -> list[str]:
        """Joined lines are several."""
        return [text for line in self.sink.lines if line.again for text in line.text.split("\n")]


@contextlib.asynccontextmanager
async def taken_over(kube: PodServer, cursor: Cursor, unread: int = 0, at: float = AT) -> AsyncIterator[Taken]:
    """
    :param unread: bytes that the supervisor has not read.
    """
    sink, live, earlier = Sink(), Seen(), Seen()
    log_socket().connect(lambda: unread, 200_000)
    takeover = Takeover(cursor, log_time(at), earlier)
    async with following(kube, sink, cursor=Cursor(), inspector=live, takeover=takeover) as follower:
        yield Taken(kube, follower, sink, live, earlier)


@pytest.fixture
async def kube() -> PodServer:
    kube = PodServer()
    kube.pod("p")
    write(kube.log("p"), 0, 10, rate=10)
    return kube


async def test_each_line_is_logged_once_and_new_ones_are_not_marked(kube: PodServer) -> None:
    cursor = await handed_over(kube)
    write(kube.log("p"), 10, 650, rate=10)
    async with taken_over(kube, cursor) as taken:
        await until(lambda: len(taken.new) == 50 and len(taken.again) == 590)
        write(kube.log("p"), 650, 700, rate=10)
        kube.log("p").end()
        taken.follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        await taken.follower.drain(60)
        report = await taken.follower.log_remainder(60, 60, 60)
        earlier = taken.follower.earlier_report()
    assert (taken.new, taken.again) == (AFTER, BEFORE[10:])
    assert (taken.live.texts, taken.earlier.texts) == (AFTER, BEFORE[10:])
    assert (report.total.lines, report.unread, gaps_of(report)) == (100, [], {})
    assert (earlier.total.lines, earlier.unread, gaps_of(earlier)) == (590, [], {})


async def test_lines_of_one_time_at_the_takeover_are_not_split(kube: PodServer) -> None:
    cursor = await handed_over(kube)
    log = kube.log("p")
    for time in (AT - 0.5, AT, AT, AT - 0.25, AT + 0.5):  # one of another stream of the container came late
        log.write(log_time(time), str(time))
    async with taken_over(kube, cursor) as taken:
        await until(lambda: len(taken.sink.lines) == 5)
        await until(lambda: not taken.follower.earlier_report().unread)
    assert (taken.again, taken.new) == ([str(AT - 0.5)], [str(AT), str(AT), str(AT - 0.25), str(AT + 0.5)])


async def test_end_does_not_wait_for_earlier_lines(kube: PodServer) -> None:
    """Nothing is read by the supervisor: the end is known at once, and what is not logged again is counted."""
    cursor = await handed_over(kube)
    write(kube.log("p"), 10, 700, rate=10)
    kube.log("p").end()
    async with taken_over(kube, cursor, unread=200_000) as taken:
        taken.follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await taken.follower.drain(60)
        assert (report.unread, taken.live.texts) == ([], AFTER)
        report = await taken.follower.log_remainder(3, 60, 2)
        earlier = taken.follower.earlier_report()
    assert taken.sink.lines == []
    assert (report.total.lines, report.total.unlogged) == (0, 100)
    assert (earlier.total.lines, earlier.total.unlogged, earlier.unread) == (0, 590, [])
    assert taken.earlier.texts == BEFORE[10:], "what they report is read all the same"


async def test_earlier_lines_are_not_given_up_while_the_api_server_does_not_answer(kube: PodServer) -> None:
    """A request that fails says nothing about the log. All lines are counted later."""
    cursor = await handed_over(kube)
    write(kube.log("p"), 10, 700, rate=10)
    kube.refuse(503)
    async with taken_over(kube, cursor) as taken:
        await until(lambda: kube.refused > 30)
        kube.clear_failures()
        await until(lambda: taken.new == AFTER)
        await until(lambda: not taken.follower.earlier_report().unread)
        earlier = taken.follower.earlier_report()
    assert (earlier.total.lines + earlier.total.unlogged, gaps_of(earlier)) == (590, {})


async def test_failed_requests_for_earlier_lines_pause_after_the_container_has_ended(kube: PodServer) -> None:
    """All earlier lines were read by then, except those that the container may have written since."""
    cursor = await handed_over(kube)
    write(kube.log("p"), 10, 600, rate=10)
    async with taken_over(kube, cursor) as taken:
        await until(lambda: taken.again == BEFORE[10:])
        kube.fail("GET", "/log", 503, 20)
        began = asyncio.get_running_loop().time()
        kube.log("p").end()
        taken.follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        await until(lambda: kube.refused == 20)
        assert asyncio.get_running_loop().time() - began > 5
        await until(lambda: not taken.follower.earlier_report().unread)
        assert gaps_of(taken.follower.earlier_report()) == {}


async def test_container_that_starts_after_the_takeover(kube: PodServer) -> None:
    cursor = await handed_over(kube)
    async with taken_over(kube, cursor) as taken:
        kube.pod("q")
        write(kube.log("q"), 0, 5, begin=AT + 1)
        taken.follower.observe(kube.pods["q"])
        await until(lambda: len(taken.new) == 5)
    assert taken.again == []


async def test_pod_that_is_deleted_while_earlier_lines_wait(kube: PodServer) -> None:
    cursor = await handed_over(kube)
    write(kube.log("p"), 10, 700, rate=10)
    async with taken_over(kube, cursor, unread=200_000) as taken:
        await until(lambda: taken.live.texts == AFTER)
        kube.log("p").end()
        taken.follower.observe(kube.delete_pod("p"), deleted=True)
        await taken.follower.drain(60)
        await taken.follower.log_remainder(0.2, 60, 60)
        earlier = taken.follower.earlier_report()
    assert earlier.total.lines + earlier.total.unlogged <= 590
    assert earlier.total.unlogged > 0


@pytest.mark.parametrize("pods", [("p",), ("p", "q")])
async def test_only_the_last_lines_of_the_job_are_logged_again(
    pods: tuple[str, ...], kube: PodServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are counted."""
    monkeypatch.setattr(module, "AGAIN_LINES", 200)
    cursor = await handed_over(kube)
    write(kube.log("p"), 10, 600, rate=10)
    for pod in pods[1:]:
        kube.pod(pod)
        write(kube.log(pod), 0, 600, rate=10)
    async with taken_over(kube, cursor) as taken:
        await until(lambda: not taken.follower.earlier_report().unread)
        await until(lambda: len(taken.again) == 200)
        earlier = taken.follower.earlier_report()
    written = 600 * len(pods) - 10
    assert (earlier.total.lines, earlier.total.unlogged) == (200, written - 200)
    assert set(taken.again) == set(numbered(600 - 200 // len(pods), 600))


class Counting:
    """An emitter that has counted blocks of lines, none of which is logged again."""

    def __init__(self) -> None:
        self.inspected: list[str] = []
        self.position = Position()
        self.emitter = EarlierEmitter(
            Sink(), LogLine("p", "c", "Master", 0, 0, "", ""), lambda text, *_: self.inspected.append(text),
            until=log_time(AT), restart=0, job=dict, began=0.0,
        )  # fmt: skip
        self.emitter.again_from = log_time(AT / 2)

    async def count(self, blocks: Iterable[list[str]]) -> Counting:
        replay = Replay(self.position)
        with contextlib.suppress(EndReached):
            for block in blocks:
                await self.emitter.emit("\n".join(block).encode(), replay)
        return self


@pytest.mark.parametrize("seed", range(5))
async def test_lines_are_counted_alike_whether_or_not_each_is_inspected(seed: int) -> None:
    """A report in a block lets each of its lines be inspected. Otherwise, only those are that are logged again."""
    draw = random.Random(seed)
    times = [log_time(AT * (n + draw.uniform(-3, 3)) / 1000) for n in range(1, 1100)]
    times += draw.choices(times, k=200)
    times.sort(key=lambda time: time[: draw.choice((19, 21))])
    lines = [f"{time} line {number}" for number, time in enumerate(times)]
    lines[300:300] = ["a text of the kubelet", f"{times[300][:-1]}+00:00 in another format", ""]
    blocks = [lines[start : start + 50] for start in range(0, len(lines), 50)]
    fast = await Counting().count(blocks)
    slow = await Counting().count([*block[:-1], f"{block[-1]} KTRAIN_METRIC {{}}"] for block in blocks)
    assert (fast.position, fast.emitter.ended) == (slow.position, True)
    assert fast.emitter.tally.unlogged == slow.emitter.tally.unlogged > 500
    assert fast.emitter.tally.lines == slow.emitter.tally.lines > 0
    assert len(fast.inspected) < len(slow.inspected) - 400


async def test_new_line_waits_for_one_turn_of_earlier_lines() -> None:
    """However many containers have earlier lines, which are counted at the same time."""
    block = [f"{log_time(n / 10_000)} line {n}" for n in range(100_000)]
    streams = [Counting() for _ in range(10)]
    counting = [asyncio.create_task(stream.count([block])) for stream in streams]

    def counted() -> int:
        return sum(stream.emitter.tally.unlogged for stream in streams)

    while not counted():  # noqa: ASYNC110
        await asyncio.sleep(0)
    inspected: list[str] = []
    emitter = RateLimitedEmitter(
        Sink(), LogLine("q", "c", "Master", 0, 0, "", ""), lambda text, *_: inspected.append(text)
    )
    before = counted()
    await emitter.emit(f"{log_time(AT)} new".encode(), Replay(Position()))
    assert inspected == ["new"]
    assert counted() - before <= 2 * COUNTED_LINES
    await asyncio.gather(*counting)
    assert counted() == 10 * len(block)


async def test_other_tasks_run_after_each_turn_of_a_flood() -> None:
    """However many containers write one."""
    lines = "\n".join(f"{log_time(n / 10_000)} line {n}" for n in range(10_000)).encode()
    emitters = [RateLimitedEmitter(Sink(), LogLine("q", "c", "Worker", n, 0, "", "")) for n in range(10)]
    floods = [asyncio.create_task(emitter.emit(lines, Replay(Position()))) for emitter in emitters]
    while not any(emitter.read for emitter in emitters):  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(20):
        before = [emitter.read for emitter in emitters]
        await asyncio.sleep(0)
        assert sum(emitter.read > read for emitter, read in zip(emitters, before, strict=True)) <= 1
    await asyncio.gather(*floods)


async def test_lines_are_logged_again_for_some_seconds(kube: PodServer) -> None:
    """The supervisor has no room for them. New lines have it all; the others are counted."""
    cursor = await handed_over(kube)
    for number in range(10, 10_000):
        kube.log("p").write(log_time(number / 200), f"line {number} {'x' * 1000}")
    async with taken_over(kube, cursor, unread=200_000) as taken:
        await asyncio.sleep(module.AGAIN_SECONDS + 1)
        earlier = taken.follower.earlier_report()
    assert earlier.unread == []
    assert 100 < earlier.total.lines < 5000
    assert earlier.total.lines + earlier.total.unlogged == 10_000 - 10
