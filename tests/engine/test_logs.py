"""Logs: every line once and in order, for each container, also if its connection is cut or it restarts."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.reader import is_of_kubelet
from tests.apiserver import PODS, PodServer, cutter, log_time
from tests.until import until

from .log_following import Sink, following, gaps_of, numbered, write

pytestmark = pytest.mark.virtual_time


async def test_lines_come_live_and_as_they_were_written() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    log.write("2026-11-21T10:06:08.6Z", "first")
    async with following(kube, sink) as follower:
        await until(lambda: sink.texts == ["first"])
        odd = ["", "  indented\ttab", "progress 1\rprogress 2", "\x1b[31mred\x1b[0m", "héllo ✓", "a\x85b\u2028c"]
        for n, text in enumerate(odd):
            log.write(log_time(1000 + n), text)
        log.write(log_time(2000), b"bytes \xff\xfe")
        await until(lambda: len(sink.lines) == 8)
        assert sink.texts[1:] == [*odd, "bytes \ufffd\ufffd"]
        assert sink.lines[0] == LogLine("p", "main", "Worker", 0, 0, "2026-11-21T10:06:08.600000000Z", "first")
        report = await follower.drain(60)
    assert (report.total.lines, report.total.dropped, gaps_of(report), report.unread) == (8, 0, {}, [])
    assert sink.notes == []


@pytest.mark.parametrize("cuts", [150, pytest.param(1000, marks=pytest.mark.thorough)])
async def test_cut_streams_lose_and_repeat_no_line(cuts: int) -> None:
    kube, sink, rng = PodServer(), Sink(), random.Random(5)
    kube.pod("p", containers="abcd")
    logs = [kube.log("p", container) for container in "abcd"]
    kube.cut_after = cutter(rng, 8000, 1000)
    total = 0
    async with following(kube, sink) as follower, asyncio.timeout(240):
        while kube.cuts < cuts:
            for log in logs:
                for n in range(total, total + 20):
                    text = f"line {n} " + "é✓x"[n % 3] * rng.randrange(1, 40)
                    log.write(log_time(n // 3), text)
            total += 20
            await until(lambda expected=4 * total - 1600: len(sink.lines) >= expected)
        for log in logs:
            log.end()
        kube.pod("p", containers="abcd", state="terminated", phase="Succeeded")
        follower.observe(kube.pods["p"])
        report = await follower.drain(60)
    for container in "abcd":
        texts = sink.by_run()["p", container, 0]
        assert [int(text.split()[1]) for text in texts] == list(range(total))
    assert report.unread == []
    assert sink.notes == []


@pytest.mark.parametrize("seed", range(20))
async def test_every_line_of_every_run_is_read_once_in_random_container_lives(seed: int) -> None:
    """Restarts, cuts, responses that only look complete, an unreachable server, pods that join late."""
    rng = random.Random(seed)
    kube, sink = PodServer(), Sink()
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
                log.write(log_time(time), text[at : at + 16384], partial=at + 16384 < len(text) or (ends and at < 0))
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
                restart, key = pods[pod], Cursor.key(kube.pods[pod]["metadata"]["uid"], "main")
                pods[pod] += 1
                await until(lambda p=pod, r=restart: (p, "main", r) in sink.by_run())
                kube.away = rng.random() < 0.5  # the restart is observed, or only detected later
                if kube.away:
                    kube.rejected.clear()
                    kube.cut()
                    await until(lambda p=pod: kube.rejected[f"{PODS}/{p}"])
                say(pod, restart, ends=True)
                if not kube.away:
                    observe(pod, restart=restart, state="waiting", last=True)
                    await until(lambda p=pod, r=restart: len(sink.by_run()[p, "main", r]) == len(written[p, "main", r]))
                kube.pod(pod, restart=pods[pod])
                say(pod, pods[pod])
                if not kube.away or rng.random() < 0.5:
                    follower.observe(kube.pods[pod])
                kube.away = False
                # until the new run is read: if two restarts are missed, the kubelet keeps only one previous log
                await until(lambda k=key, r=restart: follower.cursor.positions[k].restart > r)
            else:
                say(pod, pods[pod])
            for _ in range(rng.choice([0, 5, 50])):
                await asyncio.sleep(0)
        for pod, restart in pods.items():
            say(pod, restart, ends=True)
            observe(pod, restart=restart, state="terminated", phase="Succeeded")
        report = await follower.drain(60)
    read = {run: [text.rstrip("z") for text in texts] for run, texts in sink.by_run().items()}
    for run, texts in written.items():
        assert read.get(run) == [text.rstrip("z") for text in texts], run
    assert len(read) == len(written)
    assert {len(line.text) for line in sink.lines} == {len(text) for texts in written.values() for text in texts}
    assert report.unread == []
    assert gaps_of(report) == {}


async def test_last_line_without_line_end_is_emitted() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    log.write(log_time(1), "first")
    log.write(log_time(2), "no newline at the end", partial=True)
    async with following(kube, sink) as follower:
        await until(lambda: sink.texts == ["first"])
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(60)
    assert sink.texts == ["first", "no newline at the end"]
    assert report.unread == []


async def test_response_that_only_looks_complete_does_not_end_a_run() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 100)
    log.end()
    kube.clean_cuts = True
    kube.cut_after = cutter(random.Random(1), 1500, 3)
    async with following(kube, sink) as follower:
        follower.observe(kube.pod("p", state="terminated", phase="Failed"))
        await follower.drain(60)
    assert kube.cuts >= 2
    assert sink.texts == numbered(0, 100)


async def test_tail_check_avoids_a_second_download_of_a_burst() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    for n in range(20_000):
        log.write(log_time(1, nanos=n), f"line {n}")
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 20_000)
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 20_000)
    assert [{"follow", "tailLines"} & query.keys() for query in kube.queries] == [{"follow"}, {"tailLines"}]
    assert report.unread == []


@pytest.mark.parametrize("text", ["the same", "line {n}"])
async def test_tail_check_rejects_ambiguous_last_lines(text: str) -> None:
    """A response ends after 20 of 40 lines as if it were complete, and the last lines may be equal to these."""
    kube, sink = PodServer(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    log = kube.log("p")
    texts = [text.format(n=n) for n in range(40)]
    for line in texts:
        log.write(log_time(1), line)
    log.end()
    kube.clean_cuts = True
    sizes = iter([sum(len(f"{log_time(1)} {line}\n") for line in texts[:20])])
    kube.cut_after = lambda: next(sizes, None)
    async with following(kube, sink) as follower:
        report = await follower.drain(60)
    assert kube.cuts == 1
    assert sink.texts == texts
    assert report.unread == []


@pytest.mark.parametrize("rotated", [False, True])
async def test_rotation_under_an_open_stream_is_reported_as_a_gap(rotated: bool) -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    for n in range(1200):
        log.write(log_time(n / 100), f"line {n} ".ljust(1000, "x"))
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 1200)
        if rotated:
            log.rotate()
        write(log, 1200, 1210)
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(60)
    assert len(sink.lines) == 1210
    assert len(sink.notes) == rotated
    if rotated:
        assert sink.notes == list(gaps_of(report)["p", "main"])
        assert f"lines before {log_time(12)} may be missing" in sink.notes[0]


async def test_container_that_ended_before_it_was_observed_is_read() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded", init=["init"])
    for container in ("init", "main"):
        write(kube.log("p", container), 0, 10)
        kube.log("p", container).end()
    async with following(kube, sink) as follower:
        await follower.drain(60)
    assert sink.by_run() == {("p", "init", 0): numbered(0, 10), ("p", "main", 0): numbered(0, 10)}


async def test_run_that_ended_while_the_server_was_away_is_read() -> None:
    kube, sink = PodServer(), Sink()
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
        assert kube.verbs["get"] >= 1  # without a watch event, the pod was read before the log was requested again
        assert gaps_of(await follower.drain(60)) == {}


async def test_lines_of_a_run_that_the_status_does_not_show_yet_are_not_mixed_in() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        write(kube.log("p"), 5, 10)
        kube.log("p").end()
        write(kube.log("p", restart=1), 0, 3, begin=50)  # served from now on, although the status still shows run 0
        asked = kube.verbs["log"]
        kube.away = False
        await until(lambda: kube.verbs["log"] > asked and kube.verbs["get"] > 1)
        assert len(sink.lines) == 5
        kube.pod("p", restart=1)
        await until(lambda: len(sink.lines) == 13)
        report = await follower.drain(60)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 10), ("p", "main", 1): numbered(0, 3)}
    assert gaps_of(report) == {}


async def test_run_before_the_last_one_is_reported_as_a_gap_during_a_back_off() -> None:
    kube, sink = PodServer(), Sink()
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
        report = await follower.drain(60)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 5), ("p", "main", 1): numbered(0, 3)}
    assert gaps_of(report) == {("p", "main"): ("lines of run 0 may be missing: the kubelet no longer has its log",)}


async def test_runs_that_the_kubelet_does_not_keep_are_reported_as_a_gap() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", restart=3)
    for restart in (2, 3):
        write(kube.log("p", restart=restart), 0, 3, begin=10 * restart)
    kube.log("p", restart=2).end()
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 6)
        report = await follower.drain(60)
    assert list(sink.by_run()) == [("p", "main", 2), ("p", "main", 3)]
    assert "the kubelet keeps one previous run" in gaps_of(report)["p", "main"][0]
    assert sink.notes == list(gaps_of(report)["p", "main"])


async def test_log_that_the_kubelet_has_deleted_is_reported_as_a_gap() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", restart=1)
    kube.log("p").write("", b"unable to retrieve container logs for containerd://5541b231", partial=True)
    write(kube.log("p", restart=1), 0, 3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 3)
        report = await follower.drain(60)
    assert gaps_of(report) == {("p", "main"): ("lines of run 0 may be missing: the kubelet no longer has its log",)}


async def test_rotation_between_two_requests_is_reported_as_a_gap() -> None:
    kube, sink = PodServer(), Sink()
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
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 10) + numbered(20, 30)
    assert "may be missing" in gaps_of(report)["p", "main"][0]
    assert log_time(0.09) in sink.notes[0]


async def test_recreated_pod_with_the_same_name_is_read_as_another_pod() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 5, begin=100)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        kube.away = True
        kube.cut()
        kube.delete_pod("p")
        kube.pod("p")
        write(kube.log("p"), 0, 5)  # on another node, whose clock is slow
        kube.away = False
        await until(lambda: sink.notes)
        assert len(sink.lines) == 5
        follower.observe(kube.pods["p"])
        await until(lambda: len(sink.lines) == 10)
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 5) * 2
    assert report.unread == [("p", "main")] or len(report.containers) == 1


async def test_only_chosen_containers_are_followed() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("launcher", labels={"training.kubeflow.org/job-role": "launcher"})
    kube.pod("worker", labels={"training.kubeflow.org/job-role": "worker", "training.kubeflow.org/replica-index": "3"})
    for name in ("launcher", "worker"):
        write(kube.log(name), 0, 2)
    chosen = {"launcher"}
    async with following(kube, sink, kind=MPIJOB, chosen=lambda pod, _: pod["metadata"]["name"] in chosen) as follower:
        await until(lambda: len(sink.lines) == 2)
        chosen.add("worker")
        follower.observe(dict(kube.pods["worker"]))
        await until(lambda: len(sink.lines) == 4)
    assert [(line.role, line.index) for line in sink.lines] == [("Launcher", 0)] * 2 + [("Worker", 3)] * 2


async def test_unchanged_pod_is_not_examined_again() -> None:
    kube, asked = PodServer(), 0

    def choose(pod: object, container: str) -> bool:
        nonlocal asked
        asked += 1
        return False

    kube.pod("p")
    async with following(kube, Sink(), chosen=choose) as follower:
        for _ in range(3):
            follower.observe(kube.pods["p"])
        assert asked == 1
        follower.observe(kube.pod("p", restart=1))
        assert asked == 2


NO_WATCHER = b"failed to create fsnotify watcher: too many open files"
NO_FILE = b'failed to try resolving symlinks in path "/var/log/pods/ns_p/main/0.log": lstat: no such file or directory'


async def test_error_of_the_kubelet_is_no_line_and_the_log_is_read_on() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 5)
    log.fail(NO_WATCHER, 3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5 and not log.errors)
        write(log, 5, 10)
        await until(lambda: len(sink.lines) == 10)
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Succeeded"))
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 10)
    assert (report.unread, gaps_of(report), sink.notes) == ([], {}, [])


async def test_log_that_the_kubelet_can_not_read_any_more_is_reported_as_a_gap() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 5)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 5)
        log.fail(NO_FILE)
        log.end()
        follower.observe(kube.pod("p", state="terminated", phase="Failed"))
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 5)
    expected = f"lines of run 0 may be missing: the kubelet can't read its log.\n{NO_FILE.decode()}"
    assert gaps_of(report) == {("p", "main"): (expected,)}


async def test_previous_run_that_the_kubelet_can_not_read_does_not_hold_up_the_next_one() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", restart=1)
    kube.log("p").fail(NO_FILE)
    write(kube.log("p", restart=1), 0, 3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 3)
        report = await follower.drain(60)
    assert sink.by_run() == {("p", "main", 1): numbered(0, 3)}
    (gap,) = gaps_of(report)["p", "main"]
    assert gap.startswith("lines of run 0 may be missing: the kubelet can't read its log.")


async def test_restart_that_the_status_shows_late_is_no_rotation() -> None:
    """A fast crash loop on a loaded node: the next run writes before restartCount shows it (Kubernetes 1.36)."""
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 3)
        kube.log("p").end()
        await until(lambda: kube.verbs["get"] >= 1)  # the status still shows the first run
        write(kube.log("p", restart=1), 0, 3, begin=20)
        before = kube.verbs["get"]
        await until(lambda: kube.verbs["get"] >= before + 4)
        follower.observe(kube.pod("p", restart=1))
        await until(lambda: len(sink.lines) == 6)
        report = await follower.drain(60)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 3), ("p", "main", 1): numbered(0, 3)}
    assert (gaps_of(report), sink.notes) == ({}, [])


@pytest.mark.parametrize(
    ("unended", "expected"),
    [
        (NO_WATCHER, True),
        (NO_FILE, True),
        (b"2026-11-21T10:06:08.600000000Z 37%", False),  # a progress bar without a line end
        (b"2026-11-21T10:06:08.6+01:00 37%", False),
        (b"", False),
    ],
)
def test_unended_line_without_a_timestamp_is_the_kubelets(unended: bytes, expected: bool) -> None:
    assert is_of_kubelet(unended) is expected
