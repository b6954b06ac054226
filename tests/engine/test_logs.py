"""Logs: every line once and in order, for each container, also if its connection is cut or it restarts."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from tests.apiserver import PODS, PodServer, cutter, log_time, serving
from tests.until import until

from .log_following import Sink, following, gaps_of, numbered, of_each_kind, write

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
    assert sink.notices == []


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
    assert sink.notices == []


@pytest.mark.sampled(7)
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
    assert len(sink.notices) == rotated
    if rotated:
        assert sink.notices == list(gaps_of(report)["p", "main"])
        assert f"lines before {log_time(12)} may be missing" in sink.notices[0]


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


async def test_containers_without_a_position_are_read_from_the_common_time() -> None:
    kube, sink = PodServer(), Sink()
    old, new = kube.pod("old"), kube.pod("new")
    old["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = log_time(0)
    new["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = log_time(280)
    write(kube.log("old"), 0, 50, rate=0.1)  # until 490 s
    write(kube.log("new"), 0, 5, begin=280)
    cursor = Cursor(since=log_time(300), omitted=1)
    async with following(kube, sink, cursor=cursor) as follower:
        await until(lambda: len(sink.lines) == 25)
        report = await follower.drain(60)
    assert sink.by_run() == {("old", "main", 0): numbered(30, 50), ("new", "main", 0): numbered(0, 5)}
    assert (sink.notices, gaps_of(report)) == ([], {})


def held(follower: LogFollower) -> int:
    """Number of containers and pods in memory."""
    return len(follower._followed) + len(follower._observed) + len(follower.cursor.positions)


@pytest.mark.thorough
@of_each_kind
@pytest.mark.parametrize("handed_over", [False, True])
async def test_recreated_pods_do_not_grow_the_memory(handed_over: bool, kind: Kind) -> None:
    """With ExitCode, an operator deletes each failed pod and creates another one with its name."""
    kube, sink, cursor = PodServer(), Sink(), Cursor()
    async with serving(kube) as api:
        follower = LogFollower(api, sink, kind=kind, cursor=cursor)
        for n in range(300):
            follower.observe(kube.pod("p"))
            log = kube.log("p")
            write(log, 5 * n, 5 * n + 5)
            await until(lambda n=n: len(sink.lines) == 5 * n + 5)
            log.end()
            ended = kube.pod("p", state="terminated", phase="Failed")
            follower.observe(ended)
            if handed_over and n % 100 == 99:  # while the pod exists
                saved = follower.cursor.to_dict()
                await follower.close()
                follower = LogFollower(api, sink, kind=kind, cursor=Cursor.from_dict(saved))
                follower.observe(ended)
            await until(lambda f=follower: f.report().containers["p", "main"].complete)
            follower.observe(kube.delete_pod("p"), deleted=True)
            assert held(follower) <= 6
        report = await follower.drain(240)
        await follower.close()
    assert sink.texts == numbered(0, 1500)
    assert held(follower) == 0
    assert sink.notices == []
    assert handed_over or report.total.lines == 1500
    assert report.unread == []
