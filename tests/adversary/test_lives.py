"""Lives of trainings at an API server that lies.

A seed is one life. `KTRAIN_LIFE=17 pytest tests/adversary` lives that one alone, `KTRAIN_LIVES=100000` so many.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.adversary.lies import LIES, Lie
from tests.adversary.lives import Disturbance, Life, live, plan_at_random
from tests.adversary.server import Plan
from tests.adversary.truth import Truth
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection

pytestmark = pytest.mark.embedded("needs the scripted API server")
LIVES = int(os.environ.get("KTRAIN_LIVES", "2000"))
BATCH = 10


def check(life: Life, plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch, what: str = "") -> Truth:
    """Live a life; fail with its story if something was wrong."""
    print(f"KTRAIN_LIFE={seed} {what}")

    def connect(cluster: TestCluster) -> None:
        set_connection(cluster, monkeypatch)

    truth = live(life, plan, seed, connect)
    if truth.wrong:
        pytest.fail("\n".join([f"KTRAIN_LIFE={seed} {what}", *truth.wrong, *truth.story]), pytrace=False)
    return truth


def seeds(batch: int) -> range:
    """The seeds of a batch, or the one that is asked for."""
    if one := os.environ.get("KTRAIN_LIFE"):
        return range(int(one), int(one) + 1)
    return range(batch * BATCH, min((batch + 1) * BATCH, LIVES))


BATCHES = [0] if "KTRAIN_LIFE" in os.environ else list(range(-(-LIVES // BATCH)))


@pytest.mark.parametrize("batch", BATCHES[:1])
def test_lives_without_lies(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(batch):
        check(Life.random(random.Random(seed)), lambda purpose, count: None, seed, monkeypatch)


@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=[pytest.mark.thorough] if batch > 0 else []) for batch in BATCHES]
)
def test_lives_with_lies(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(batch):
        rng = random.Random(seed)
        life = Life.random(rng)
        check(life, plan_at_random(rng, LIES), seed, monkeypatch)


def told_at(wanted: str, number: int, *lies: Lie) -> Plan:
    """The first wrong answer goes to the request for this purpose with this number, the others to the next requests.

    A request that can't have such an answer gets the right one, and the next request is tried.
    """
    left = number

    def plan(purpose: str, count: int) -> Lie | None:
        nonlocal left
        if count == 0:
            left -= purpose == wanted
            return lies[0] if purpose == wanted and left < 0 else None
        return lies[count] if count < len(lies) else None

    return plan


@pytest.mark.thorough
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.name)
@pytest.mark.parametrize(("count", "kind"), [(1, "PyTorchJob"), (1, "MPIJob"), (1, "TrainJob"), (2, "TrainJob")])
def test_each_lie_at_each_kind_of_request(count: int, kind: str, lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lie in a life, at each kind of request; or two, where the second lie differs from kind to kind.

    Lives and requests of a kind are taken in turn: the number of the lie selects one.
    """
    lives = [Life(kind=kind, size=2, seconds=8.0, elastic=kind == "MPIJob")]
    lives += [replace(lives[0], disturbances=(Disturbance(end, 5.0),)) for end in ("mark failed", "lost", "evict")]
    lives.append(
        replace(lives[0], deferrable=False, retries=0, disturbances=(Disturbance("lost", 5.0),))
    )  # for the reaper
    asked: dict[str, list[tuple[Life, int]]] = {}
    for life in lives:
        truth = check(life, lambda purpose, count: None, 0, monkeypatch)
        for what, times in Counter(truth.requests).items():
            asked.setdefault(what, []).append((life, times))
    turn = LIES.index(lie)
    for n, (what, found) in enumerate(asked.items()):
        life, times = found[turn % len(found)]
        lies = [lie, LIES[(turn + n) % len(LIES)]][:count]
        names = ", then ".join(one.name for one in lies)
        check(life, told_at(what, turn % times, *lies), 0, monkeypatch, f"{names} at {what}, number {turn % times}")
