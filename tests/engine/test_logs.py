"""Logs: every line once and in order, for each container, whatever happens to the connection or the container."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.logs import reader
from airflow_provider_ktrain.engine.logs.budget import StreamBudget
from airflow_provider_ktrain.engine.logs.container_run import Run, run_of
from airflow_provider_ktrain.engine.logs.emitter import LogLine, RateLimit
from airflow_provider_ktrain.engine.logs.follower import LogFollower

from .fakekube import PODS, FakeKube, LogFile, Record, cutter, serving, stamp, until


class Sink:
    """Collects the lines of the containers and the notes of the follower separately."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self.notes: list[str] = []

    def __call__(self, line: LogLine) -> None:
        if line.note:
            self.notes.append(line.text)
        else:
            self.lines.append(line)

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def by_run(self) -> dict[tuple[str, str, int], list[str]]:
        found = defaultdict(list)
        for line in self.lines:
            found[line.pod, line.container, line.restart].append(line.text)
        return dict(found)


@contextlib.asynccontextmanager
async def following(kube: FakeKube, sink: Sink, **options: Any) -> AsyncIterator[LogFollower]:
    async with serving(kube) as api:
        follower = LogFollower(api, sink, **{"kind": PYTORCHJOB, **options})
        for pod in list(kube.objects.values()):
            follower.observe(pod)
        try:
            yield follower
        finally:
            await follower.close()


def write(log: LogFile, start: int, stop: int, rate: float = 100, begin: float = 0) -> None:
    """Write numbered lines with `rate` timestamps a second."""
    for n in range(start, stop):
        log.write(stamp(begin + n / rate), f"line {n}")


def numbered(start: int, stop: int) -> list[str]:
    return [f"line {n}" for n in range(start, stop)]


async def test_lines_come_live_and_as_they_were_written() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    log.write("2026-11-21T10:06:08.6Z", "first")
    async with following(kube, sink) as follower:
        await until(lambda: sink.texts == ["first"])
        odd = ["", "  indented\ttab", "progress 1\rprogress 2", "\x1b[31mred\x1b[0m", "héllo ✓", "a\x85b\u2028c"]
        for n, text in enumerate(odd):
            log.write(stamp(1000 + n), text)
        log.write(stamp(2000), b"bytes \xff\xfe")
        await until(lambda: len(sink.lines) == 8)
        assert sink.texts[1:] == [*odd, "bytes \ufffd\ufffd"]
        assert sink.lines[0] == LogLine("p", "main", "Worker", 0, 0, "2026-11-21T10:06:08.600000000Z", "first")
        report = await follower.drain(5)
    assert (report.lines, report.dropped, report.gaps, report.unread) == (8, 0, {}, [])
    assert sink.notes == []


async def test_a_thousand_cut_streams_lose_and_repeat_no_line() -> None:
    kube, sink, rng = FakeKube(), Sink(), random.Random(5)
    kube.pod("p", containers="abcd")
    logs = [kube.log("p", container) for container in "abcd"]
    kube.cut_after = cutter(rng, 8000, 1000)
    total = 0
    async with following(kube, sink) as follower, asyncio.timeout(240):
        while kube.cuts < 1000:
            for log in logs:
                for n in range(total, total + 20):
                    text = f"line {n} " + "é✓x"[n % 3] * rng.randrange(1, 40)
                    log.write(stamp(n // 3), text)
            total += 20
            await until(lambda wanted=4 * total - 1600: len(sink.lines) >= wanted)
        for log in logs:
            log.end()
        kube.pod("p", containers="abcd", state="terminated", phase="Succeeded")
        follower.observe(kube.objects["p"])
        report = await follower.drain(20)
    for container in "abcd":
        texts = sink.by_run()["p", container, 0]
        assert [int(text.split()[1]) for text in texts] == list(range(total))
    assert report.unread == []
    assert sink.notes == []


@pytest.mark.parametrize("seed", range(20))
async def test_every_line_of_every_run_is_read_once_in_random_container_lives(seed: int) -> None:
    """Restarts, cuts, responses that only look complete, an unreachable server, pods that join late."""
    rng = random.Random(seed)
    kube, sink = FakeKube(), Sink()
    kube.clean_cuts = seed % 2 == 0
    written: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    time = 0.0

    def say(pod: str, restart: int, ends: bool = False) -> None:
        nonlocal time
        log = kube.log(pod, restart=restart)
        for _ in range(rng.randrange(1, 30)):
            time += rng.choice([0, 0, 1e-6, 0.01, 0.4, 1.3])
            text = f"{pod} {restart} {len(written[pod, 'main', restart])} " + "z" * rng.choice([5, 50, 20_000])
            written[pod, "main", restart].append(text)
            for at in range(0, len(text), 16384):
                log.write(stamp(time), text[at : at + 16384], partial=at + 16384 < len(text) or (ends and at < 0))
        if ends:
            log.end()

    async with following(kube, sink) as follower, asyncio.timeout(240):

        def observe(pod: str, **state: Any) -> None:
            follower.observe(kube.pod(pod, **state))

        pods: dict[str, int] = {}
        for _ in range(25):
            kube.cut_after = cutter(rng, 40_000, rng.randrange(3))
            pod = f"p{rng.randrange(4)}"
            if pod not in pods:
                pods[pod] = 0
                kube.pod(pod)
                say(pod, 0)
                observe(pod)
            elif rng.random() < 0.3:
                restart, key = pods[pod], Cursor.key(kube.objects[pod]["metadata"]["uid"], "main")
                pods[pod] += 1
                await until(lambda p=pod, r=restart: (p, "main", r) in sink.by_run())
                kube.away = rng.random() < 0.5  # the restart is seen, or only found later
                if kube.away:
                    kube.turned_away.clear()
                    kube.cut()
                    await until(lambda p=pod: kube.turned_away[f"{PODS}/{p}"])
                say(pod, restart, ends=True)
                if not kube.away:
                    observe(pod, restart=restart, state="waiting", last=True)
                    await until(lambda p=pod, r=restart: len(sink.by_run()[p, "main", r]) == len(written[p, "main", r]))
                kube.pod(pod, restart=pods[pod])
                say(pod, pods[pod])
                if not kube.away or rng.random() < 0.5:
                    follower.observe(kube.objects[pod])
                kube.away = False
                # until the new run is read: of two that are missed, the kubelet would keep one
                await until(lambda k=key, r=restart: follower.cursor.positions[k].restart > r)
            else:
                say(pod, pods[pod])
            for _ in range(rng.choice([0, 5, 50])):
                await asyncio.sleep(0)
        for pod, restart in pods.items():
            say(pod, restart, ends=True)
            observe(pod, restart=restart, state="terminated", phase="Succeeded")
        report = await follower.drain(30)
    read = {run: [text.rstrip("z") for text in texts] for run, texts in sink.by_run().items()}
    for run, texts in written.items():
        assert read.get(run) == [text.rstrip("z") for text in texts], run
    assert len(read) == len(written)
    assert {len(line.text) for line in sink.lines} == {len(text) for texts in written.values() for text in texts}
    assert report.unread == []
    assert report.gaps == {}


async def test_last_line_without_line_end_is_emitted() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    log.write(stamp(1), "first")
    log.write(stamp(2), "no newline at the end", partial=True)
    async with following(kube, sink) as follower:
        await until(lambda: sink.texts == ["first"])
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(5)
    assert sink.texts == ["first", "no newline at the end"]
    assert report.unread == []


async def test_response_that_only_looks_complete_does_not_end_a_run() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 100)
    log.end()
    kube.clean_cuts = True
    kube.cut_after = cutter(random.Random(1), 1500, 3)
    async with following(kube, sink) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Failed"))
        await follower.drain(5)
    assert kube.cuts >= 2
    assert sink.texts == numbered(0, 100)


async def test_tail_check_avoids_a_second_download_of_a_burst() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    for n in range(20_000):
        log.write(stamp(1, nanos=n), f"line {n}")
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 20_000)
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(5)
    assert sink.texts == numbered(0, 20_000)
    assert [{"follow", "tailLines"} & query.keys() for query in kube.queries] == [{"follow"}, {"tailLines"}]
    assert report.unread == []


@pytest.mark.parametrize("text", ["the same", "line {n}"])
async def test_tail_check_rejects_ambiguous_last_lines(text: str) -> None:
    """A response ends after 20 of 40 lines as if it were complete, and the last lines may look like these."""
    kube, sink = FakeKube(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    log = kube.log("p")
    texts = [text.format(n=n) for n in range(40)]
    for line in texts:
        log.write(stamp(1), line)
    log.end()
    kube.clean_cuts = True
    sizes = iter([sum(len(f"{stamp(1)} {line}\n") for line in texts[:20])])
    kube.cut_after = lambda: next(sizes, None)
    async with following(kube, sink) as follower:
        report = await follower.drain(5)
    assert kube.cuts == 1
    assert sink.texts == texts
    assert report.unread == []


@pytest.mark.parametrize("rotated", [False, True])
async def test_rotation_under_an_open_stream_is_reported_as_a_gap(rotated: bool) -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    for n in range(1200):
        log.write(stamp(n / 100), f"line {n} ".ljust(1000, "x"))
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 1200)
        if rotated:
            log.rotate()
        write(log, 1200, 1210)
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(5)
    assert len(sink.lines) == 1210
    assert len(sink.notes) == rotated
    if rotated:
        assert sink.notes == list(report.gaps["p", "main"])
        assert f"lines before {stamp(12)} may be missing" in sink.notes[0]


async def test_container_that_ended_before_it_was_observed_is_read() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded", init=["init"])
    for container in ("init", "main"):
        write(kube.log("p", container), 0, 10)
        kube.log("p", container).end()
    async with following(kube, sink) as follower:
        await follower.drain(5)
    assert sink.by_run() == {("p", "init", 0): numbered(0, 10), ("p", "main", 0): numbered(0, 10)}


async def test_run_that_ended_while_the_server_was_away_is_read() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        write(kube.log("p"), 5, 10)
        kube.log("p").end()
        kube.pod("p", restart=1)
        write(kube.log("p", restart=1), 0, 3, begin=50)
        kube.away = False
        await until(lambda: len(sink.lines) == 13)
        assert sink.by_run() == {("p", "main", 0): numbered(0, 10), ("p", "main", 1): numbered(0, 3)}
        assert kube.requests["get"] >= 1  # no watch has told: the pod was read before the log was asked for again
        assert (await follower.drain(5)).gaps == {}


async def test_lines_of_a_run_that_the_status_does_not_show_yet_are_not_mixed_in() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        write(kube.log("p"), 5, 10)
        kube.log("p").end()
        write(kube.log("p", restart=1), 0, 3, begin=50)  # served from now on, though the status says run 0
        asked = kube.requests["log"]
        kube.away = False
        await until(lambda: kube.requests["log"] > asked and kube.requests["get"] > 1)
        assert len(sink.lines) == 5
        kube.pod("p", restart=1)
        await until(lambda: len(sink.lines) == 13)
        report = await follower.drain(5)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 10), ("p", "main", 1): numbered(0, 3)}
    assert report.gaps == {}


async def test_run_before_the_last_one_is_reported_as_a_gap_during_a_back_off() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        write(kube.log("p", restart=1), 0, 3, begin=50)
        kube.log("p", restart=1).end()
        kube.pod("p", restart=1, state="waiting")
        kube.away = False
        await until(lambda: len(sink.lines) == 8)
        report = await follower.drain(5)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 5), ("p", "main", 1): numbered(0, 3)}
    assert report.gaps == {("p", "main"): ("lines of run 0 may be missing: the kubelet no longer has its log",)}


async def test_runs_that_the_kubelet_does_not_keep_are_reported_as_a_gap() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", restart=3)
    for restart in (2, 3):
        write(kube.log("p", restart=restart), 0, 3, begin=10 * restart)
    kube.log("p", restart=2).end()
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 6)
        report = await follower.drain(5)
    assert list(sink.by_run()) == [("p", "main", 2), ("p", "main", 3)]
    assert "the kubelet keeps one previous run" in report.gaps["p", "main"][0]
    assert sink.notes == list(report.gaps["p", "main"])


async def test_log_that_the_kubelet_has_deleted_is_reported_as_a_gap() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", restart=1)
    kube.log("p").write("", b"unable to retrieve container logs for containerd://5541b231", partial=True)
    write(kube.log("p", restart=1), 0, 3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 3)
        report = await follower.drain(5)
    assert report.gaps == {("p", "main"): ("lines of run 0 may be missing: the kubelet no longer has its log",)}


async def test_rotation_between_two_requests_is_reported_as_a_gap() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 10)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 10)
        await until(lambda: kube.streams)
        kube.away = True
        kube.cut()
        write(log, 10, 20)
        log.rotate()
        write(log, 20, 30)
        kube.away = False
        await until(lambda: len(sink.lines) == 20)
        report = await follower.drain(5)
    assert sink.texts == numbered(0, 10) + numbered(20, 30)
    assert "may be missing" in report.gaps["p", "main"][0]
    assert stamp(0.09) in sink.notes[0]


async def test_recreated_pod_with_the_same_name_is_read_as_another_pod() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5, begin=100)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        kube.delete("p")
        kube.pod("p")
        write(kube.log("p"), 0, 5)  # on another node, whose clock is behind
        kube.away = False
        await until(lambda: sink.notes)
        assert len(sink.lines) == 5
        follower.observe(kube.objects["p"])
        await until(lambda: len(sink.lines) == 10)
        report = await follower.drain(5)
    assert sink.texts == numbered(0, 5) * 2
    assert report.unread == [("p", "main")] or len(report.containers) == 1


async def test_pod_deleted_while_followed_is_read_to_the_end() -> None:
    kube, sink = FakeKube(), Sink()
    pod = kube.pod("p")
    log = kube.log("p")
    write(log, 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.delete("p")
        follower.observe(pod, deleted=True)
        write(log, 5, 10)
        log.end()
        report = await follower.drain(5)
    assert sink.texts == numbered(0, 10)
    assert report.unread == []


@pytest.mark.parametrize("handed_over", [False, True])
async def test_pod_deleted_before_it_is_followed_is_reported_as_a_gap(handed_over: bool) -> None:
    kube, sink, cursor = FakeKube(), Sink(), Cursor()
    old = kube.pod("p")
    if handed_over:
        write(kube.log("p"), 0, 5)
        async with following(kube, sink) as follower:
            await until(lambda: len(sink.lines) == 5)
            cursor = Cursor.from_dict(follower.cursor.to_dict())
    kube.delete("p")
    kube.pod("p")  # made anew
    write(kube.log("p"), 5, 10, begin=50)
    async with following(kube, sink, cursor=cursor) as follower:
        await until(lambda: sink.texts[-1:] == ["line 9"])
        if not handed_over:
            follower.observe(old, deleted=True)
        report = await follower.drain(240)
    (gap,) = report.gaps["p", "main"]
    assert ("could be resumed" if handed_over else "was read to the end") in gap
    assert (stamp(0.04) in gap) is handed_over
    assert report.lines == 5


async def test_last_line_without_line_end_is_emitted_after_the_pod_was_deleted() -> None:
    kube, sink = FakeKube(), Sink()
    pod = kube.pod("p")
    log = kube.log("p")
    log.write(stamp(1), "first")
    log.write(stamp(2), "no newline at the end", partial=True)
    async with following(kube, sink) as follower:
        await until(lambda: sink.texts == ["first"])
        kube.delete("p")
        follower.observe(pod, deleted=True)
        log.end()
        report = await follower.drain(240)
    assert sink.texts == ["first", "no newline at the end"]
    assert (report.gaps, report.unread) == ({}, [])


async def test_deleted_pod_that_was_read_or_never_started_leaves_no_gap() -> None:
    kube, sink = FakeKube(), Sink()
    pods = [kube.pod("read", state="terminated", phase="Succeeded"), kube.pod("waits", state="waiting")]
    write(kube.log("read"), 0, 5)
    kube.log("read").end()
    async with following(kube, sink) as follower:
        await follower.drain(240)
        saved = follower.cursor.to_dict()
    kube.objects.clear()
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        for pod in pods:
            follower.observe(pod, deleted=True)
        report = await follower.drain(240)
    assert (report.gaps, sink.notes) == ({}, [])


async def test_drain_reads_a_running_container_up_to_now() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 50)
    async with following(kube, sink) as follower:
        await until(lambda: sink.lines)
        write(log, 50, 100)
        report = await follower.drain(5)
    assert sink.texts == numbered(0, 100)
    assert report.unread == []


async def test_drain_ends_in_time_and_reports_unread_containers() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        report = await follower.drain(0.2)
    assert report.unread == [("p", "main")]


class SlowSink(Sink):
    """Needs time for each line, like the logger of a loaded machine."""

    def __call__(self, line: LogLine) -> None:
        time.sleep(0.01)
        super().__call__(line)


async def test_drain_continues_while_lines_come() -> None:
    kube, sink = FakeKube(), SlowSink()
    kube.pod("p")
    write(kube.log("p"), 0, 400)
    kube.log("p").end()
    async with following(kube, sink) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(2, longest=240)
    assert sink.texts == numbered(0, 400)
    assert (report.late, report.unread) == (0, [])


async def test_drain_counts_and_inspects_lines_that_it_has_no_time_to_log() -> None:
    kube, sink, seen = FakeKube(), SlowSink(), []
    kube.pod("p")
    write(kube.log("p"), 0, 2000)
    kube.log("p").end()

    async with following(kube, sink, inspector=lambda source: lambda text, time, run: seen.append(text)) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(2)
    assert report.lines == len(sink.lines) < 2000
    assert report.lines + report.late == 2000
    assert seen == numbered(0, 2000)
    assert report.unread == []


async def test_handover_resumes_at_the_cursor() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 50)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 50)
        saved = follower.cursor.to_dict()
    write(log, 50, 100)
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        await until(lambda: len(sink.lines) == 100)
        await follower.drain(5)
    assert sink.texts == numbered(0, 100)
    assert sink.notes == []


async def test_a_late_handover_reads_all_lines_since_the_cursor() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 50)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 50)
        saved = follower.cursor.to_dict()
    write(log, 50, 14_000)
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        await until(lambda: len(sink.lines) == 14_000)
        write(log, 14_000, 14_010)
        await until(lambda: len(sink.lines) == 14_010)
        assert len([query for query in kube.queries if "follow" in query]) == 2  # one of each process
        report = await follower.drain(5)
    assert sink.texts == numbered(0, 14_010)
    assert (sink.notes, report.gaps) == ([], {})


async def test_containers_without_a_position_are_read_from_the_common_time() -> None:
    kube, sink = FakeKube(), Sink()
    old, new = kube.pod("old"), kube.pod("new")
    old["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = stamp(0)
    new["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = stamp(280)
    write(kube.log("old"), 0, 50, rate=0.1)  # until 490 s
    write(kube.log("new"), 0, 5, begin=280)
    cursor = Cursor(since=stamp(300), omitted=1)
    async with following(kube, sink, cursor=cursor) as follower:
        await until(lambda: len(sink.lines) == 25)
        report = await follower.drain(5)
    assert sink.by_run() == {("old", "main", 0): numbered(30, 50), ("new", "main", 0): numbered(0, 5)}
    assert (sink.notes, report.gaps) == ([], {})


@pytest.mark.parametrize("status_lags", [False, True])
async def test_restart_during_a_handover_is_not_read_as_the_same_run(status_lags: bool) -> None:
    """The watch lags behind the pod; if `status_lags`, the pod also lags behind its container."""
    kube, sink = FakeKube(), Sink()
    behind = kube.pod("p")
    log = kube.log("p")
    write(log, 0, 10)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 10)
        saved = follower.cursor.to_dict()
    write(log, 10, 20)
    log.end()
    write(kube.log("p", restart=1), 0, 5, begin=30)
    if not status_lags:
        kube.pod("p", restart=1)
    async with serving(kube) as api:
        follower = LogFollower(api, sink, kind=PYTORCHJOB, cursor=Cursor.from_dict(saved))
        asked = kube.requests["get"]
        follower.observe(behind)
        if status_lags:
            await until(lambda: kube.requests["get"] > asked + 1)
            assert len(sink.lines) == 10
            kube.pod("p", restart=1)
        await until(lambda: len(sink.lines) >= 25)
        report = await follower.drain(240)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 20), ("p", "main", 1): numbered(0, 5)}
    assert report.gaps == {}


async def test_complete_container_is_not_read_again_after_a_handover() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    write(kube.log("p"), 0, 5)
    kube.log("p").end()
    async with following(kube, sink) as follower:
        await follower.drain(5)
        saved = follower.cursor.to_dict()
    asked = kube.requests["log"]
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        report = await follower.drain(5)
    assert kube.requests["log"] == asked
    assert report.unread == []


async def test_rate_limit_drops_and_counts_a_flood_and_spares_other_containers() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("flood")
    kube.pod("quiet")
    for n in range(5000):
        kube.log("flood").write(stamp(n / 1000), f"line {n} " + "x" * 1000)
    write(kube.log("quiet"), 0, 100)
    for pod in ("flood", "quiet"):
        kube.log(pod).end()
    async with following(kube, sink, rate_limit=RateLimit(bytes_per_second=1000, burst_bytes=100_000)) as follower:
        for pod in ("flood", "quiet"):
            follower.observe(kube.pod(pod, state="terminated", phase="Succeeded"))
        report = await follower.drain(20)
    runs = sink.by_run()
    assert runs["quiet", "main", 0] == numbered(0, 100)
    flood = report.containers["flood", "main"]
    assert 90 < flood.lines < 200
    assert flood.lines + flood.dropped == 5000
    assert any(f"{flood.dropped:,} lines" in note for note in sink.notes)
    assert report.unread == []


async def test_endless_line_is_cut() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    for n in range(40):
        log.write(stamp(n / 100), "x" * 16384, partial=True)
    log.write(stamp(1), "end")
    log.write(stamp(2), "next")
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 2)
        report = await follower.drain(5)
    assert sink.lines[0].text.startswith("xxx")
    assert sink.lines[0].text.endswith("bytes cut)")
    assert len(sink.lines[0].text) < 270_000
    assert sink.lines[1].text == "next"
    assert report.containers["p", "main"].dropped_bytes > 390_000


async def test_streams_over_the_budget_take_turns() -> None:
    kube, sink = FakeKube(), Sink()
    names = [f"p{n}" for n in range(12)]
    for name in names:
        kube.pod(name)
        write(kube.log(name), 0, 5)
    open_at_once = 0
    async with following(kube, sink, budget=StreamBudget(streams=3, turn=0.01)) as follower, asyncio.timeout(240):
        for turn in range(1, 4):
            await until(lambda t=turn: len(sink.lines) == len(names) * 5 * t)
            open_at_once = max(open_at_once, kube.open)
            for name in names:
                write(kube.log(name), 5 * turn, 5 * turn + 5)
        report = await follower.drain(10)
    assert open_at_once <= 3
    assert sink.by_run() == {(name, "main", 0): numbered(0, 20) for name in names}
    assert report.unread == []


async def test_only_chosen_containers_are_followed() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("launcher", labels={"training.kubeflow.org/job-role": "launcher"})
    kube.pod("worker", labels={"training.kubeflow.org/job-role": "worker", "training.kubeflow.org/replica-index": "3"})
    for name in ("launcher", "worker"):
        write(kube.log(name), 0, 2)
    chosen = {"launcher"}
    async with following(kube, sink, kind=MPIJOB, chosen=lambda pod, _: pod["metadata"]["name"] in chosen) as follower:
        await until(lambda: len(sink.lines) == 2)
        chosen.add("worker")
        follower.observe(dict(kube.objects["worker"]))
        await until(lambda: len(sink.lines) == 4)
    assert [(line.role, line.index) for line in sink.lines] == [("Launcher", 0)] * 2 + [("Worker", 3)] * 2


async def test_unchanged_pod_is_not_examined_again() -> None:
    kube, asked = FakeKube(), 0

    def choose(pod: object, container: str) -> bool:
        nonlocal asked
        asked += 1
        return False

    kube.pod("p")
    async with following(kube, Sink(), chosen=choose) as follower:
        for _ in range(3):
            follower.observe(kube.objects["p"])
        assert asked == 1
        follower.observe(kube.pod("p", restart=1))
        assert asked == 2


async def test_refused_logs_are_retried_with_one_warning() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", containers="ab")
    for container in "ab":
        write(kube.log("p", container), 0, 5)
    kube.refusal = (403, "Forbidden")
    async with following(kube, sink) as follower:
        await until(lambda: kube.refused > 6)
        (note,) = sink.notes
        assert "403 Forbidden" in note
        assert "`pods/log`" in note
        kube.refusal = None
        await until(lambda: len(sink.lines) == 10)
        report = await follower.drain(5)
    assert len(sink.notes) == 1
    assert (report.gaps, report.unread) == ({}, [])


async def test_refused_log_is_retried_in_the_final_drain() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    kube.log("p").end()
    kube.refusal = (403, "Forbidden")
    async with following(kube, sink) as follower:
        await until(lambda: kube.refused > 3)
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        draining = asyncio.create_task(follower.drain(240))
        refused = kube.refused
        await until(lambda: kube.refused > refused)
        kube.refusal = None
        report = await draining
    assert sink.texts == numbered(0, 5)
    assert (report.gaps, report.unread) == ({}, [])


async def test_drain_gives_up_a_log_that_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "FORBIDDEN_GRACE_SECONDS", 0.5)
    kube, sink = FakeKube(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    kube.refusal = (403, "Forbidden")
    async with following(kube, sink) as follower:
        report = await follower.drain(240)
    assert "403 Forbidden" in report.gaps["p", "main"][0]
    assert report.unread == [("p", "main")]


@pytest.mark.parametrize("handed_over", [False, True])
async def test_recreated_pods_do_not_grow_the_memory(handed_over: bool) -> None:
    """With ExitCode, an operator deletes each failed pod and creates another one with its name."""
    kube, sink, cursor = FakeKube(), Sink(), Cursor()
    async with serving(kube) as api:
        follower = LogFollower(api, sink, kind=PYTORCHJOB, cursor=cursor)
        for n in range(300):
            follower.observe(kube.pod("p"))
            log = kube.log("p")
            write(log, 5 * n, 5 * n + 5)
            await until(lambda n=n: len(sink.lines) == 5 * n + 5)
            log.end()
            ended = kube.pod("p", state="terminated", phase="Failed")
            follower.observe(ended)
            if handed_over and n % 100 == 99:  # while the pod is there
                saved = follower.cursor.to_dict()
                await follower.close()
                follower = LogFollower(api, sink, kind=PYTORCHJOB, cursor=Cursor.from_dict(saved))
                follower.observe(ended)
            await until(lambda f=follower: f.report().containers["p", "main"].complete)
            follower.observe(kube.delete("p"), deleted=True)
            assert follower.held <= 6
        report = await follower.drain(240)
        await follower.close()
    assert sink.texts == numbered(0, 1500)
    assert follower.held == 0
    assert sink.notes == []
    assert handed_over or report.lines == 1500
    assert report.unread == []


async def test_container_that_was_read_is_not_read_again_while_its_pod_exists() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    write(kube.log("p"), 0, 5)
    kube.log("p").end()
    async with following(kube, sink) as follower:
        await until(lambda: follower.report().containers["p", "main"].complete)
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        await follower.drain(240)
    assert sink.texts == numbered(0, 5)


async def test_every_line_is_inspected_before_the_rate_limit() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    seen: list[str] = []
    sources: list[LogLine] = []

    def inspector(source: LogLine) -> Any:
        sources.append(source)
        return lambda text, time, run: seen.append(text)

    write(kube.log("p"), 0, 1000)
    kube.log("p").end()
    rate_limit = RateLimit(bytes_per_second=1, burst_bytes=100)
    async with following(kube, sink, rate_limit=rate_limit, inspector=inspector) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(240)
    assert report.dropped > 900
    assert seen == numbered(0, 1000)
    assert [(source.pod, source.role, source.index) for source in sources] == [("p", "Worker", 0)]


async def test_no_line_is_logged_right_after_a_stall() -> None:
    """Airflow needs time to cancel a trigger that it has assigned to another triggerer."""
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 5)
    budget = StreamBudget(stall=3600, settle=3600)
    async with following(kube, sink, budget=budget) as follower:
        await until(lambda: len(sink.lines) == 5)
        saved = follower.cursor.to_dict()
        budget.stall = 0.2  # only now: a loaded machine stands still by itself
        time.sleep(0.3)  # noqa: ASYNC251 - the stall
        write(log, 5, 10)
        sent = kube.sent
        await until(lambda: kube.sent > sent)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(sink.lines) == 5
        await follower.close()
        assert follower.cursor.to_dict() == saved


async def test_lines_continue_after_a_stall_without_a_takeover() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink, budget=StreamBudget(stall=0.2, settle=0.2)) as follower:
        await until(lambda: len(sink.lines) == 5)
        time.sleep(0.3)  # noqa: ASYNC251 - the stall
        write(kube.log("p"), 5, 10)
        await until(lambda: len(sink.lines) == 10)
        await follower.drain(240)
    assert sink.texts == numbered(0, 10)


async def test_silence_is_confirmed_by_the_server() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", containers="ab")
    logs = [kube.log("p", container) for container in "ab"]
    async with following(kube, sink) as follower:
        assert await follower.silent()  # nothing was ever written
        for log in logs:
            write(log, 0, 10)
        await until(lambda: len(sink.lines) == 20)
        assert await follower.silent()
        logs[1].files[-1].append(Record(stamp(5), b"x" * 16384, partial=True))  # of which the stream brings nothing
        assert not await follower.silent()
        assert await follower.silent()  # since it was asked
        await until(lambda: kube.open == 2)
        kube.away = True
        kube.cut()
        assert not await follower.silent()
        kube.away, kube.refusal = False, (403, "Forbidden")
        assert not await follower.silent()
        kube.refusal = None
        assert await follower.silent()
        follower.observe(kube.pod("p", containers="ab", state="terminated", phase="Succeeded"))
        assert not await follower.silent()  # nothing runs
        for log in logs:
            log.end()
    asked = [query for query in kube.queries if query.get("tailLines") == "1"]
    assert {query["limitBytes"] for query in asked} == {"64"}


async def test_tail_check_requests_few_bytes() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    async with following(kube, sink) as follower:
        for n in range(5):
            log.write(stamp(n), "y" * 100_000)
        log.end()
        await until(lambda: len(sink.lines) == 5)
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(240)
    assert report.unread == []
    assert {int(query["limitBytes"]) for query in kube.queries if "tailLines" in query} == {4097}


STATES: dict[str, tuple[dict[str, Any], Run]] = {
    "nothing known": ({}, Run()),
    "not started": ({"state": {"waiting": {"reason": "ContainerCreating"}}, "restartCount": 0}, Run()),
    "runs": ({"state": {"running": {}}, "restartCount": 0}, Run(0, started=True)),
    "succeeded": ({"state": {"terminated": {"exitCode": 0}}, "restartCount": 0}, Run(0, started=True, ended=True)),
    "failed": (
        {"state": {"terminated": {"exitCode": 1}}, "restartCount": 0},
        Run(0, started=True, ended=True, restarting=True),
    ),
    "runs again": (
        {"state": {"running": {}}, "lastState": {"terminated": {}}, "restartCount": 1},
        Run(1, started=True),
    ),
    "backs off": (
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": {}}, "restartCount": 1},
        Run(1, started=True, ended=True, backing_off=True),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_run_of_reads_the_newest_run_from_the_status(name: str) -> None:
    status, run = STATES[name]
    for key in ("containerStatuses", "initContainerStatuses"):
        pod = {
            "spec": {"restartPolicy": "OnFailure"},
            "status": {"phase": "Running", key: [{"name": "other"}, {"name": "main", **status}]},
        }
        assert run_of(pod, "main") == run


@pytest.mark.parametrize(
    ("policy", "container", "code", "restarting"),
    [
        ("Never", "main", 1, False),
        ("OnFailure", "main", 0, False),
        ("OnFailure", "main", 1, True),
        ("Always", "main", 0, True),
        ("Always", "init", 0, False),
        ("Always", "init", 1, True),
        ("Never", "init", 1, False),
    ],
)
def test_restarting_depends_on_policy_and_exit_code(policy: str, container: str, code: int, restarting: bool) -> None:
    pod = {
        "spec": {"restartPolicy": policy, "initContainers": [{"name": "init"}], "containers": [{"name": "main"}]},
        "status": {"containerStatuses": [{"name": container, "state": {"terminated": {"exitCode": code}}}]},
    }
    assert run_of(pod, container).restarting is restarting


def test_evicted_pod_has_no_further_run() -> None:
    assert run_of({"status": {"phase": "Failed", "reason": "Evicted"}}, "main") == Run(ended=True, final=True)
