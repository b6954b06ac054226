"""Lives of trainings at an API server that lies.

A seed is one life. `KTRAIN_LIFE=17 pytest tests/adversary` lives that one alone, `KTRAIN_LIVES=100000` so many.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.adversary.lies import LIES
from tests.adversary.lives import Life, live, plan_at_random
from tests.adversary.server import Plan
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection

pytestmark = pytest.mark.embedded("needs the scripted API server")
LIVES = int(os.environ.get("KTRAIN_LIVES", "2000"))
BATCH = 20


def check(life: Life, plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live a life; fail with its story if something was wrong."""
    print(f"KTRAIN_LIFE={seed}")

    def connect(cluster: TestCluster) -> None:
        set_connection(cluster, monkeypatch)

    truth = live(life, plan, seed, connect)
    if truth.wrong:
        pytest.fail("\n".join([f"KTRAIN_LIFE={seed}", *truth.wrong, *truth.story]), pytrace=False)


def seeds(batch: int) -> range:
    """The seeds of a batch, or the one that is asked for."""
    if one := os.environ.get("KTRAIN_LIFE"):
        return range(int(one), int(one) + 1)
    return range(batch * BATCH, min((batch + 1) * BATCH, LIVES))


BATCHES = [0] if "KTRAIN_LIFE" in os.environ else list(range(-(-LIVES // BATCH)))


@pytest.mark.parametrize("batch", BATCHES[:2])
def test_lives_without_lies(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(batch):
        check(Life.random(random.Random(seed)), lambda request, number: None, seed, monkeypatch)


@pytest.mark.parametrize(
    "batch", [pytest.param(batch, marks=[pytest.mark.thorough] if batch > 2 else []) for batch in BATCHES]
)
def test_lives_with_lies(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds(batch):
        rng = random.Random(seed)
        life = Life.random(rng)
        check(life, plan_at_random(rng, LIES), seed, monkeypatch)
