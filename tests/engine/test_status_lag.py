"""The primary's container has ended, and the job's status doesn't show it yet: its own end is taken.

Recordings 01, 31, 41, 50 and 57 show a delay of 1.1 to 2.2 s; on a loaded cluster it is longer. All combinations run at
the same time, because they take as long as the longest delay.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from airflow_provider_ktrain.core.end_rules import Event
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import stamp
from tests.engine.staged import KINDS, NAME, Staged, staged
from tests.until import until

pytestmark = pytest.mark.virtual_time

DELAYS = (0.0, 2.0, 15.0)  # seconds until the job's status shows its end
NEVER = 240.0
LIMIT = 2.0  # seconds from the end of the container at which a limit passes
RESULT = 'KTRAIN_RESULT {"loss": 0.5}'

Set = Callable[[Kind], Options]
#: `make test` runs each combination for one kind, and `make test-all` for each kind
of_combinations = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["part", "all"]
)


def deadline(kind: Kind) -> Options:
    return Options(deadline=timing.epoch() + LIMIT, drain_timeout=0.5)


def log_stall(kind: Kind) -> Options:
    return Options(limits=Limits(log_stall=LIMIT), drain_timeout=0.5)


def progress(kind: Kind) -> Options:
    return Options(limits=Limits(progress=LIMIT), drain_timeout=0.5)


def max_restarts(kind: Kind) -> Options:
    return Options(limits=Limits(max_restarts=0), drain_timeout=0.5)


ENDS: tuple[Set, ...] = (deadline, log_stall, progress, max_restarts)


def container_ended(training: Staged, code: int) -> None:
    """The program has ended, and has restarted once before."""
    phase, state = ("Succeeded", "Completed") if code == 0 else ("Failed", "Error")
    ended = {"terminated": {"exitCode": code, "reason": state, "startedAt": stamp(10), "finishedAt": stamp()}}
    last = {"terminated": {"exitCode": 1, "startedAt": stamp(30), "finishedAt": stamp(20)}}
    training.pod(0, phase, state=ended, restarts=1, last=last)


def start(training: Staged) -> None:
    training.pod(0)
    training.running()
    training.line("started", since=10.0)
    training.line(RESULT, since=1.0)


async def followed(training: Staged, options: Options) -> asyncio.Future[Any]:
    start(training)
    following = asyncio.ensure_future(training.follow(options))
    await until(lambda: following.done() or "loss" in str(training.log), 120)
    return following


async def ends_late(kind: Kind, options: Set, delay: float, code: int) -> str:
    """What is wrong with the reported end of a job; empty if nothing is."""
    async with staged(kind) as training:
        following = await followed(training, options(kind))
        container_ended(training, code)
        return await shows_end(training, following, delay, code)


async def ends_late_for_a_worker(kind: Kind, first: Noticed, delay: float) -> str:
    """What is wrong if a worker begins with an event, after the container has ended; empty if nothing is."""
    async with staged(kind) as training:
        start(training)
        container_ended(training, 0)
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5), first=first))
        return await shows_end(training, following, delay, 0)


async def shows_end(training: Staged, following: asyncio.Future[Any], delay: float, code: int) -> str:
    await asyncio.sleep(delay)
    training.ended("Failed" if code else "Succeeded")
    outcome = await asyncio.wait_for(following, 240)
    if code == 0:
        return "" if outcome.succeeded and outcome.result == {"loss": 0.5} else f"{outcome}\n{training.log}"
    cause = str(outcome.cause)
    return "" if f"exit code {code}" in cause and "timeout" not in cause else f"{cause}\n{training.log}"


def combinations(*values: Sequence[Any], every: bool) -> Iterator[tuple[Any, ...]]:
    """Kinds, each with a combination of values."""
    for number, combination in enumerate(itertools.product(*values)):
        for kind_number, kind in enumerate(KINDS):
            if every or number % len(KINDS) == kind_number:
                yield kind, *combination


@of_combinations
async def test_own_end_is_taken(every: bool) -> None:
    runs = {
        f"{kind.name}, {options.__name__}, {delay} s, exit code {code}": ends_late(kind, options, delay, code)
        for kind, delay, options, code in combinations(DELAYS, ENDS, (0, 3), every=every)
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


async def test_own_end_is_taken_after_a_deferral_timeout() -> None:
    """The worker finds the job after Airflow's timeout of the deferral, or to complete a trigger's release."""
    runs = {
        f"{kind.name}, {event}, {delay} s": ends_late_for_a_worker(kind, event, delay)
        for kind in KINDS
        for event in (Noticed(Event.DEFERRAL_EXPIRED), Noticed(Event.RELEASE_FAILED))
        for delay in DELAYS
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


async def never_ends(kind: Kind, options: Set, code: int) -> str:
    """What is wrong with the end of a job whose status never shows its end; empty if nothing is."""
    async with staged(kind) as training:
        following = await followed(training, options(kind))
        container_ended(training, code)
        ended = timing.now()
        outcome = await asyncio.wait_for(following, NEVER)
        waited = timing.now() - ended
        deleted = NAME not in training.api.objects[kind.plural]
        right = not outcome.succeeded and deleted and waited >= 20 and f"exit code {code}" in str(outcome.cause)
        return "" if right else f"after {waited:.0f} s: {outcome.cause}\n{training.log}"


@of_combinations
async def test_rule_acts_on_a_job_that_never_shows_its_end(every: bool) -> None:
    """Its text contains the exit code."""
    runs = {
        f"{kind.name}, {options.__name__}, exit code {code}": never_ends(kind, options, code)
        for kind, options, code in combinations(ENDS, (0, 3), every=every)
    }
    found = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
    assert {name: problem for name, problem in found.items() if problem} == {}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_second_end_is_waited_for_as_long_as_the_first(kind: Kind) -> None:
    """The limit passes after both ends. The kubelet starts the program again between them."""
    async with staged(kind) as training:
        following = await followed(training, log_stall(kind))
        container_ended(training, 3)
        await asyncio.sleep(DELAYS[-1])
        last = {"terminated": {"exitCode": 3, "startedAt": stamp(30), "finishedAt": stamp(20)}}
        training.pod(0, state={"running": {"startedAt": stamp()}}, restarts=2, last=last)
        training.prints(["trains again"] * 30, every=1.0)
        await asyncio.sleep(30.0)
        assert training.holding
        container_ended(training, 0)
        assert await shows_end(training, following, DELAYS[-1], 0) == ""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("delay", [1.2, None], ids=["soon", "never"])
async def test_worker_at_its_deadline_waits_for_the_end_as_long_as_it_can(kind: Kind, delay: float | None) -> None:
    """It has 3.5 s, of which it keeps one for the deletion of a job that never shows its end."""
    async with staged(kind) as training, training.owner(shared=False) as owner:
        start(training)
        container_ended(training, 0)
        owner.job.ref, owner.job.last_seen = training.ref, training.api.objects[kind.plural][NAME]
        ending, began = asyncio.ensure_future(owner.interrupted(Event.DEADLINE)), timing.now()
        if delay is not None:
            await asyncio.sleep(delay)
            training.ended()
        await asyncio.wait_for(ending, 30)
        assert (NAME in training.api.objects[kind.plural]) is (delay is not None), str(training.log)
        assert timing.now() - began < 3.5
