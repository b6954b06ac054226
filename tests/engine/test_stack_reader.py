"""Which stacks are read when a limit releases a job: of more than 64 replicas, and by streams that are opened late."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.identity.names import STACKS_ANNOTATION, JobRef
from airflow_provider_ktrain.core.logs.stacks import MARK
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.stacks import SECONDS, StackReader
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.stream_budget import STREAMS
from tests.apiserver import PodServer, log_time, serving
from tests.until import until

from .tasks import Lines

REF = JobRef("PyTorchJob", "v1", "ns", "train", "u")
TORCH = ["/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", 100]
TRAIN = ["/ktrain/code/train.py", 88, "train"]
WAITS, BARRIER = [[*TORCH, "all_reduce"], TRAIN], [[*TORCH, "barrier"], TRAIN]
LOADS = [["/ktrain/code/data.py", 41, "load_batch"], TRAIN]


def context_of(api: Any, workers: int) -> FollowContext:
    """That of a job with a Master and so many Workers."""
    state = JobState(REF, Handover())
    state.job = {
        "kind": "PyTorchJob", "metadata": {"name": "train", "annotations": {STACKS_ANNOTATION: "x"}},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": workers}}},
    }  # fmt: skip
    return FollowContext(api, state, Lines())


def pod(kube: PodServer, role: str, index: int, **status: Any) -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": str(index)}
    return kube.pod(f"train-{role}-{index}", containers=("pytorch",), labels=labels, **status)


def printed_at(frames: list[list[Any]]) -> list[str]:
    """What a container with one process prints."""
    record = {"pid": 7, "rank": "", "local": "", "part": "rank", "main": True, "frames": frames, "how": "handler"}
    return [MARK + json.dumps(entry) for entry in (record, {"end": True, "left_out": 0})]


async def test_primary_lowest_step_and_highest_indices_are_read() -> None:
    """Workers 0 and 2 to 6 are not: what they would print names nobody."""
    kube, pods, printed = PodServer(), [], {}
    for role, index in (("master", 0), *(("worker", n) for n in range(69))):
        pods.append(pod(kube, role, index))
        name = pods[-1]["metadata"]["name"]
        kube.log(name, "pytorch").write(log_time(1), "step 3")
        printed[name] = printed_at(BARRIER if role == "master" else LOADS if index < 7 else WAITS)
    async with serving(kube) as api:
        context = context_of(api, 69)
        output = JobOutput(context)
        for number in range(69):
            step = 3 if number == 1 else 9
            output.training_metrics.read_line(f"Worker {number}", f'KTRAIN_METRIC {{"step": {step}}}', 1.0)
        async with StackReader(context, output, Limit.PROGRESS, 1800, pods) as reader:
            await reader.open()
            for name, records in printed.items():
                for text in records:
                    kube.log(name, "pytorch").write(log_time(2), text)
                kube.log(name, "pytorch").end()
            cause, lines = await reader.explain(Cause(Category.HANG, "no step"))
    assert kube.verbs["log"] == 64
    assert cause.summary == (
        "No step for 30 min: Worker 1 is in load_batch (data.py:41), "
        "62 of the 63 other replicas that were read wait in all_reduce (train.py:88)"
    )
    assert "Where the processes were (64 of 70 replicas read):" in lines
    assert "  1: train.py:88 in train, in barrier [Master 0]" in lines


@pytest.mark.parametrize("why", ["no free stream", "no connection", "no kubelet"])
async def test_stacks_are_read_by_streams_that_are_opened_after_the_release(why: str) -> None:
    """A triggerer that follows many jobs has no free stream, or the API server is busy, until the pods have ended."""
    kube, frames = PodServer(), {("master", 0): WAITS, ("worker", 0): LOADS, ("worker", 1): WAITS}
    pods = [pod(kube, role, index) for role, index in frames]
    async with serving(kube) as api:
        context = context_of(api, 2)
        output = JobOutput(context)
        async with contextlib.AsyncExitStack() as others, StackReader(context, output, Limit.PROGRESS, 1800, pods) as r:
            for _ in range(STREAMS if why == "no free stream" else 0):
                await others.enter_async_context(output.follower.budget.slot())
            kube.away = why == "no connection"
            if why == "no kubelet":
                kube.refuse(503)
            await r.open()
            for (role, index), found in frames.items():
                log = kube.log(f"train-{role}-{index}", "pytorch")
                for text in ("step 3", *printed_at(found), "Received 15 death signal", "shutting down workers"):
                    log.write(log_time(2), text)
                log.end()
            assert kube.verbs["log"] == 0
            kube.away = False
            kube.clear_failures()
            await others.aclose()
            cause, _ = await r.explain(Cause(Category.HANG, "no step"))
    assert cause.summary == (
        "No step for 30 min: Worker 0 is in load_batch (data.py:41), 2 other replicas wait in all_reduce (train.py:88)"
    )


async def test_replica_whose_pod_has_ended_has_left() -> None:
    """Not one whose pod was replaced."""
    kube = PodServer()
    replaced = pod(kube, "master", 0, state="terminated", phase="Failed")
    pods = [replaced, pod(kube, "master", 0), pod(kube, "worker", 0, state="terminated", phase="Succeeded")]
    log = kube.log("train-master-0", "pytorch")
    for text in printed_at(WAITS):
        log.write(log_time(2), text)
    async with serving(kube) as api:
        context = context_of(api, 1)
        async with StackReader(context, JobOutput(context), Limit.PROGRESS, 1800, pods) as reader:
            await reader.open()
            cause, _ = await reader.explain(Cause(Category.HANG, "no step"))
    assert cause.summary == "No step for 30 min: Worker 0 has left, Master 0 waits in all_reduce (train.py:88)"
    assert cause.replica == "Worker 0"


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time stands still when the test wants it, and is set by it."""

    now: float | None = None

    def time(self) -> float:
        return super().time() if self.now is None else self.now

    @contextlib.contextmanager
    def standing(self) -> Iterator[float]:
        self.now = self.time()
        try:
            yield self.now
        finally:
            self.now = None


async def turn(condition: Callable[[], object]) -> None:
    """Let the loop go on until the condition is true; its time may stand still."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.mark.parametrize("late", ["container that prints stacks for ever", "node that can't be read"])
def test_error_line_waits_for_10_seconds_at_most(late: str) -> None:
    """By the clock of the loop, which stands still until the test sets it."""

    async def bounded(loop: Clock) -> None:
        kube, frames = PodServer(), {("master", 0): WAITS, ("worker", 0): LOADS}
        kube.pause("before GET .*/nodes/")  # no read of a node is answered
        pods = [pod(kube, role, index) for role, index in frames]
        for one in pods:
            one["spec"]["nodeName"] = "gpu-7"
        logs = {role: kube.log(f"train-{role}-{index}", "pytorch") for role, index in frames}
        for (role, _), found in frames.items():
            logs[role].write(log_time(1), printed_at(found)[0])
        async with serving(kube) as api:
            context = context_of(api, 1)
            async with StackReader(context, JobOutput(context), Limit.PROGRESS, 1800, pods) as reader:
                await reader.open()
                await until(lambda: kube.sent >= len(pods))
                with loop.standing() as began:
                    explaining = asyncio.create_task(reader.explain(Cause(Category.HANG, "no step")))
                    if late.startswith("node"):
                        for log in logs.values():
                            log.write(log_time(2), printed_at([])[1])
                    for moment in range(100):
                        loop.now = began + SECONDS * moment / 100
                        if late.startswith("container"):
                            sent = kube.sent
                            logs["worker"].write(
                                log_time(3), printed_at([])[0].replace('"main": true', '"main": false')
                            )
                            await turn(functools.partial(lambda sent: kube.sent > sent, sent))
                        else:
                            await turn(kube.paused.is_set)
                        await asyncio.sleep(0)
                        assert not explaining.done()
                    loop.now = began + SECONDS
                    for _ in range(1000):  # turns of the loop, in which no time passes
                        await asyncio.sleep(0)
                    assert explaining.done()
                    cause, _ = explaining.result()
        assert cause.summary == (
            "No step for 30 min: Worker 0 is in load_batch (data.py:41), Master 0 waits in all_reduce (train.py:88)"
        )

    with asyncio.Runner(loop_factory=Clock) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, Clock)
        runner.run(bounded(loop))
