"""Which containers count: the main one and the init containers of each replica, and no sidecar."""

from __future__ import annotations

import asyncio

import pytest

from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.options import Options
from tests.apiserver import stamp
from tests.engine.staged import Staged, staged
from tests.engine.tasks import Object

pytestmark = pytest.mark.virtual_time


def pod(training: Staged, phase: str = "Running") -> str:
    """A pod with an init container that has ended, and a sidecar, which is the first container."""

    def add(pod: Object) -> None:
        pod["spec"]["initContainers"] = [{"name": "fetch"}]
        pod["spec"]["containers"].insert(0, {"name": "metrics"})
        fetched = {"terminated": {"exitCode": 0, "startedAt": stamp(60), "finishedAt": stamp(50)}}
        beside = {"running": {"startedAt": stamp(50)}}
        pod["status"]["initContainerStatuses"] = [{"name": "fetch", "restartCount": 0, "state": fetched}]
        pod["status"]["containerStatuses"].insert(0, {"name": "metrics", "restartCount": 0, "state": beside})

    name = training.pod(0, phase)
    training.api.change("pods", name, add)
    return name


async def write_on(training: Staged, name: str) -> None:
    """The sidecar writes a line each second."""
    training.api.log(name, "metrics", 0).line('KTRAIN_RESULT {"loss": 9}')
    while True:
        training.api.log(name, "metrics", 0).line("beside")
        await asyncio.sleep(1.0)


async def test_a_sidecar_neither_fills_the_log_nor_supplies_the_result() -> None:
    async with staged() as training:
        name = pod(training)
        training.running()
        training.background.add(asyncio.ensure_future(write_on(training, name)))
        training.api.log(name, "fetch", 0).line("fetched")
        for text in ("trained", 'KTRAIN_RESULT {"loss": 1}'):
            training.api.log(name, "pytorch", 0).line(text)
        training.after(5.0, pod, training, "Succeeded")
        training.after(5.0, training.ended)
        outcome = await training.follow()
        assert outcome.result == {"loss": 1}
        lines = [line for line in training.log.messages if line.startswith("[Worker 0")]
        assert lines == ["[Worker 0 fetch] fetched", "[Worker 0] trained", """[Worker 0] KTRAIN_RESULT {"loss": 1}"""]


async def test_lines_of_a_sidecar_do_not_count_as_activity() -> None:
    async with staged() as training:
        name = pod(training)
        training.running()
        training.background.add(asyncio.ensure_future(write_on(training, name)))
        training.api.log(name, "pytorch", 0).line("hangs")
        outcome = await training.follow(Options(limits=Limits(log_stall=30)))
        assert (outcome.cause or {})["category"] == "hang"
        assert training.decided_after == 30.0
