"""Logs across handovers and recreated pods: a cursor resumes where the previous process stopped."""

from __future__ import annotations

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB, Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from tests.apiserver import PodServer, log_time, serving
from tests.until import until

from .log_following import Sink, following, gaps_of, numbered, of_each_kind, write

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("handed_over", [False, True])
async def test_pod_deleted_before_it_is_followed_is_reported_as_a_gap(handed_over: bool) -> None:
    kube, sink, cursor = PodServer(), Sink(), Cursor()
    old = kube.pod("p")
    if handed_over:
        write(kube.log("p"), 0, 5)
        async with following(kube, sink) as follower:
            await until(lambda: len(sink.lines) == 5)
            cursor = Cursor.from_dict(follower.cursor.to_dict())
    kube.delete_pod("p")
    kube.pod("p")  # recreated
    write(kube.log("p"), 5, 10, begin=50)
    async with following(kube, sink, cursor=cursor) as follower:
        await until(lambda: sink.texts[-1:] == ["line 9"])
        if not handed_over:
            follower.observe(old, deleted=True)
        report = await follower.drain(240)
    (gap,) = gaps_of(report)["p", "main"]
    assert ("could be resumed" if handed_over else "was read to the end") in gap
    assert (log_time(0.04) in gap) is handed_over
    assert report.total.lines == 5


async def test_handover_resumes_at_the_cursor() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 50)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 50)
        saved = follower.cursor.to_dict()
    write(log, 50, 100)
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        await until(lambda: len(sink.lines) == 100)
        await follower.drain(60)
    assert sink.texts == numbered(0, 100)
    assert sink.notes == []


async def test_a_late_handover_reads_all_lines_since_the_cursor() -> None:
    kube, sink = PodServer(), Sink()
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
        assert len([query for query in kube.queries if "follow" in query]) == 2  # one per process
        report = await follower.drain(60)
    assert sink.texts == numbered(0, 14_010)
    assert (sink.notes, gaps_of(report)) == ([], {})


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
    assert (sink.notes, gaps_of(report)) == ([], {})


@pytest.mark.parametrize("status_lags", [False, True])
async def test_restart_during_a_handover_is_not_read_as_the_same_run(status_lags: bool) -> None:
    """The watch lags behind the pod; if `status_lags`, the pod also lags behind its container."""
    kube, sink = PodServer(), Sink()
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
        asked = kube.verbs["get"]
        follower.observe(behind)
        if status_lags:
            await until(lambda: kube.verbs["get"] > asked + 1)
            assert len(sink.lines) == 10
            kube.pod("p", restart=1)
        await until(lambda: len(sink.lines) >= 25)
        report = await follower.drain(240)
    assert sink.by_run() == {("p", "main", 0): numbered(0, 20), ("p", "main", 1): numbered(0, 5)}
    assert gaps_of(report) == {}


async def test_complete_container_is_not_read_again_after_a_handover() -> None:
    kube, sink = PodServer(), Sink()
    kube.pod("p", state="terminated", phase="Succeeded")
    write(kube.log("p"), 0, 5)
    kube.log("p").end()
    async with following(kube, sink) as follower:
        await follower.drain(60)
        saved = follower.cursor.to_dict()
    asked = kube.verbs["log"]
    async with following(kube, sink, cursor=Cursor.from_dict(saved)) as follower:
        report = await follower.drain(60)
    assert kube.verbs["log"] == asked
    assert report.unread == []


def held(follower: LogFollower) -> int:
    """Number of containers and pods in memory."""
    return len(follower._followed) + len(follower._observed) + len(follower.cursor.positions)


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
    assert sink.notes == []
    assert handed_over or report.total.lines == 1500
    assert report.unread == []
