"""The phase Starting is reported once all pods have nodes, and not again and again while they are created."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from airflow_provider_ktrain.engine.follow import observer
from airflow_provider_ktrain.engine.follow.options import Options
from tests.engine.staged import Staged, staged
from tests.until import until


def phases_of(training: Staged) -> Iterator[str]:
    for line in training.log.messages:
        words = line.split(" is ")
        if words[0].endswith(training.ref.name) and len(words) == 2:
            yield words[1]


async def test_pods_that_are_created_one_after_the_other_change_the_phase_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "STARTING_DELAY_SECONDS", 30.0)
    async with staged() as training:
        training.condition("Created")
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5)))
        await until(lambda: list(phases_of(training)) == ["Pending"])
        training.pod(0)  # it runs and has a node
        await until(lambda: any("/log?" in line for line in training.api.requests))
        training.pod(1, "Pending", node="")
        training.pod(1)
        training.running()
        await until(lambda: len(list(phases_of(training))) > 1)
        assert list(phases_of(training)) == ["Pending", "Running"]
        following.cancel()


async def test_phase_changes_although_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged() as training:
        training.condition("Created")
        following = asyncio.ensure_future(training.follow(Options(drain_timeout=0.5)))
        await until(lambda: list(phases_of(training)) == ["Pending"])
        training.pod(0)
        await until(lambda: list(phases_of(training)) == ["Pending", "Starting"], 60)
        following.cancel()
