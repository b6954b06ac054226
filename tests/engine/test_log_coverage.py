"""What is certainly read of the followed logs: up to which time, and since when without a gap."""

from __future__ import annotations

from .fakekube import FakeKube, Record, stamp, until
from .log_following import Sink, following, write


async def test_log_is_read_until_a_time_if_a_later_line_was_read() -> None:
    """Nobody has to be asked then, as long as the training logs something."""
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 10)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 10)
        kube.queries.clear()
        assert await follower.has_read_until(stamp(0.09))
        assert kube.queries == []
        assert await follower.has_read_until(stamp(60)), "the server confirms that there is no later line"
        assert [query.get("tailLines") for query in kube.queries] == ["1"]
        kube.log("p").end()


async def test_log_with_an_unread_line_is_not_read_until_now() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", containers="ab")
    logs = [kube.log("p", container) for container in "ab"]
    async with following(kube, sink) as follower:
        assert await follower.has_read_until(stamp(60)), "nothing was written"
        for log in logs:
            write(log, 0, 10)
        await until(lambda: len(sink.lines) == 20)
        logs[1].files[-1].append(Record(stamp(5), b"x" * 16384, partial=True))  # the stream doesn't deliver it
        assert not await follower.has_read_until(stamp(60))
        assert not await follower.has_read_until(stamp(60)), "still unread"
        assert await follower.has_read_until(stamp(0.05)), "the unread line is later"
        for log in logs:
            log.end()


async def test_log_that_cannot_be_read_is_not_read_until_now() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    write(kube.log("p"), 0, 10)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 10)
        kube.refusal = (403, "Forbidden")
        assert not await follower.has_read_until(stamp(60))
        kube.refusal, kube.away = None, True
        kube.cut()
        assert not await follower.has_read_until(stamp(60))
        kube.away = False
        assert await follower.has_read_until(stamp(60))
        kube.log("p").end()


async def test_nothing_is_known_before_a_container_has_started() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p", state="waiting")
    async with following(kube, sink) as follower:
        assert not await follower.has_read_until(stamp(60))
        assert follower.read_since == ""


async def test_log_is_read_since_its_first_line_or_its_last_rotation() -> None:
    kube, sink = FakeKube(), Sink()
    kube.pod("p")
    log = kube.log("p")
    write(log, 0, 10, begin=3)
    async with following(kube, sink) as follower:
        await until(lambda: len(sink.lines) == 10)
        assert follower.read_since == stamp(3)
        await until(lambda: kube.streams)
        kube.away = True
        kube.cut()
        write(log, 10, 20, begin=3)
        log.rotate()
        write(log, 20, 30, begin=40)
        kube.away = False
        await until(lambda: len(sink.lines) == 20)
        assert follower.read_since == stamp(40.2)
        log.end()
