"""What is certainly read of a followed log: from when until when, without a gap."""

from __future__ import annotations

import pytest

from tests.apiserver import EPOCH, PodServer
from tests.until import until

from .log_following import Sink, following, write

pytestmark = pytest.mark.virtual_time

START = EPOCH.timestamp()


async def test_nothing_is_read_before_a_container_has_started() -> None:
    kube, sink = PodServer(), Sink()
    made = kube.pod("p", state="waiting")
    async with following(kube, sink) as follower:
        assert follower.read_span(made["metadata"]["uid"], "main", 0) == (0, 0)
        assert follower.read_span("another", "main", 0) == (0, 0)


async def test_log_is_read_since_its_first_line_or_its_last_rotation() -> None:
    kube, sink = PodServer(), Sink()
    uid = kube.pod("p")["metadata"]["uid"]
    log = kube.log("p")
    write(log, 0, 10, rate=10, begin=3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 10)
        assert follower.read_span(uid, "main", 0) == (START + 3, START + 3.9)
        assert follower.read_span(uid, "main", 1) == (0, 0), "another run"
        await until(lambda: kube.streams)
        kube.away = True
        kube.cut()
        write(log, 10, 20, rate=10, begin=3)
        log.rotate()
        write(log, 20, 30, rate=10, begin=40)
        kube.away = False
        await until(lambda: len(sink.lines) == 20)
        assert follower.read_span(uid, "main", 0) == (START + 42, START + 42.9)
        log.end()
