"""After a takeover, the lines that are logged and those that are counted as not logged are all that were printed."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.logs import emitter, follower
from airflow_provider_ktrain.engine.logs.log_socket import log_socket
from tests.engine.staged import Staged, staged
from tests.engine.tasks import Lines
from tests.virtual import VirtualLoop

pytestmark = pytest.mark.virtual_time

BEFORE = 3_000  #: Lines that were written before the takeover.
AGE = 3600.0  #: Seconds since the handover.
LINE = re.compile(r"\[\w+ \d+\] line (\d+)")
COUNT = re.compile(
    r"^(?:Missing: )?([\d,]+) lines? of |^The rate limit dropped ([\d,]+) lines? |^([\d,]+) lines? between "
)
INEXACT = re.compile(r"^at least|^Some lines|^Missing: (?:the last|all) lines")


@dataclass
class Supervisor(Lines):
    """The log of a trigger, of which Airflow's supervisor reads so many bytes a second."""

    bytes_per_second: float = 100_000.0
    messages: list[str] = field(default_factory=list)
    _unread: float = 0.0
    _at: float = 0.0

    def connect(self) -> None:
        """Let the running loop log through it."""
        log_socket().connect(self.unread, 200_000)

    def unread(self) -> int:
        now = timing.now()
        self._unread = max(self._unread - (now - self._at) * self.bytes_per_second, 0.0)
        self._at = now
        return int(self._unread)

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        super().info(event)
        self._unread = self.unread() + len(str(event)) + 300

    warning = error = info

    @property
    def logged(self) -> Counter[str]:
        """How often each line was logged."""
        return Counter(LINE.findall(str(self)))

    @property
    def counted(self) -> int:
        """Lines that are reported as not logged."""
        found = (one for text in str(self).split("\n") if (one := COUNT.match(text)))
        return sum(int((one[1] or one[2] or one[3]).replace(",", "")) for one in found)

    @property
    def is_exact(self) -> bool:
        return not any(INEXACT.search(text) for text in str(self).split("\n"))


def taken_over(supervisor: Supervisor, training: Staged) -> Handover:
    """Another triggerer takes over a training that was handed over before its first line."""
    training.log = supervisor
    supervisor.connect()
    return Handover(handed_over_at=timing.epoch() - AGE)


def wrote(training: Staged, lines: int = BEFORE) -> None:
    """The training has written lines since the handover."""
    training.start(since=AGE)
    for number in range(lines):
        training.line(f"line {number}", since=AGE - 1 - number * (AGE - 2) / lines)


def writes(training: Staged, seconds: float, every: float = 0.01) -> int:
    """It writes on for so many seconds, and ends."""
    lines = int(seconds / every)
    training.prints((f"line {BEFORE + number}" for number in range(lines)), every=every)
    training.after(seconds + 1, training.end)
    return BEFORE + lines


@pytest.fixture(autouse=True)
def few_lines_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "AGAIN_LINES", 2_000)


def check(supervisor: Supervisor, printed: int) -> None:
    assert supervisor.is_exact, [text for text in supervisor.messages if INEXACT.search(text)]
    assert set(supervisor.logged.values()) <= {1}
    assert len(supervisor.logged) + supervisor.counted == printed


@pytest.mark.parametrize("rate", [10_000.0, 10_000_000.0], ids=["slow", "fast"])
@pytest.mark.parametrize("seconds", [0.0, 15.0])
async def test_lines_are_logged_or_counted(seconds: float, rate: float) -> None:
    """The training writes on for so many seconds after the takeover; the supervisor may be behind."""
    supervisor = Supervisor(rate)
    async with staged(since=AGE) as training:
        wrote(training)
        handover = taken_over(supervisor, training)
        printed = writes(training, seconds)
        outcome = await training.follow(None, handover, began_at=timing.epoch())
        assert outcome.succeeded
    check(supervisor, printed)


@pytest.mark.parametrize("rate", [10_000.0, 10_000_000.0], ids=["slow", "fast"])
async def test_second_takeover_counts_as_the_first_one(rate: float) -> None:
    """What the first triggerer has logged in 11 s is lost with it."""
    first, second = Supervisor(rate), Supervisor(rate)
    async with staged(since=AGE) as training:
        wrote(training)
        handover = taken_over(first, training)
        printed = writes(training, 15.0)
        async with training.owner(began_at=timing.epoch()) as owner:
            owner.handover = handover
            following = asyncio.ensure_future(owner.follow(training.ref, Options()))
            await asyncio.sleep(11)
            following.cancel()
            await asyncio.wait([following])
        taken_over(second, training)
        outcome = await training.follow(None, handover, began_at=timing.epoch())
        assert outcome.succeeded
    assert first.logged
    assert not first.counted
    check(second, printed)


async def test_lines_over_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the last ones before the takeover, so no later line is logged after them."""
    monkeypatch.setattr(emitter, "BYTES_PER_SECOND", 1)
    monkeypatch.setattr(emitter, "BURST_BYTES", 2_000)
    supervisor = Supervisor(10_000_000.0)
    async with staged(since=AGE) as training:
        wrote(training)
        handover = taken_over(supervisor, training)
        printed = writes(training, 15.0)
        assert (await training.follow(None, handover, began_at=timing.epoch())).succeeded
    check(supervisor, printed)


async def test_lines_that_the_node_has_removed_are_a_gap() -> None:
    """It has removed all lines from before the takeover."""
    supervisor = Supervisor(10_000_000.0)
    async with staged(since=AGE) as training:
        wrote(training, 100)
        worker = await training.hand_over(1.0)
        for number in range(100, BEFORE):
            training.line(f"line {number}", since=0)
        await asyncio.sleep(60)
        training.api.log(training.pod_name()).rotate()
        handover = replace(worker, handed_over_at=timing.epoch() - 60)
        taken_over(supervisor, training)
        writes(training, 5.0)
        assert (await training.follow(None, handover, began_at=timing.epoch())).succeeded
    assert "may be missing: the node rotated the log" in str(supervisor)
    assert not supervisor.is_exact


async def test_lines_of_a_removed_file_are_not_said_to_be_counted() -> None:
    """The node's newest file has no line yet."""
    supervisor = Supervisor(10_000_000.0)
    async with staged(since=AGE) as training:
        wrote(training, 100)
        worker = await training.hand_over(1.0)
        training.line("line 100")
        await asyncio.sleep(60)
        training.api.log(training.pod_name()).rotate()
        handover = replace(worker, handed_over_at=timing.epoch() - 60)
        taken_over(supervisor, training)
        training.after(10.0, training.end)
        assert (await training.follow(None, handover, began_at=timing.epoch())).succeeded
    assert not supervisor.is_exact


@pytest.mark.parametrize("ahead", [5.0, -5.0])
async def test_clock_of_the_host_differs_from_that_of_the_node(ahead: float) -> None:
    supervisor = Supervisor(10_000_000.0)
    async with staged(since=AGE) as training:
        wrote(training, 100)
        worker = await training.hand_over(1.0)
        await asyncio.sleep(60)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.ahead = ahead
        handover = replace(worker, handed_over_at=timing.epoch() - 60)
        taken_over(supervisor, training)
        training.prints((f"line {100 + number}" for number in range(100)), every=0.1)
        training.after(15, training.end)
        assert (await training.follow(None, handover, began_at=timing.epoch())).succeeded
    check(supervisor, 100)
