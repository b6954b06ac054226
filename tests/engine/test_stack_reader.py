"""Of which replicas the stacks are read when a limit releases a job with more than 64 of them."""

from __future__ import annotations

import json
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Category, Cause
from airflow_provider_ktrain.core.identity.names import STACKS_ANNOTATION, JobRef
from airflow_provider_ktrain.core.logs.stacks import MARK
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.stacks import StackReader
from airflow_provider_ktrain.engine.follow.state import JobState

from .fakekube import FakeKube, serving, stamp
from .tasks import Lines

REF = JobRef("PyTorchJob", "v1", "ns", "train", "u")
JOB: dict[str, Any] = {
    "kind": "PyTorchJob", "metadata": {"name": "train", "annotations": {STACKS_ANNOTATION: "x"}},
    "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 69}}},
}  # fmt: skip
TORCH = ["/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py", 100]
TRAIN = ["/ktrain/code/train.py", 88, "train"]
WAITS, BARRIER = [[*TORCH, "all_reduce"], TRAIN], [[*TORCH, "barrier"], TRAIN]
LOADS = [["/ktrain/code/data.py", 41, "load_batch"], TRAIN]


async def test_primary_lowest_step_and_highest_indices_are_read() -> None:
    """Workers 0 and 2 to 6 are not: what they would print names nobody."""
    kube, pods, printed = FakeKube(), [], {}
    for role, index in (("master", 0), *(("worker", n) for n in range(69))):
        name = f"train-{role}-{index}"
        labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": str(index)}
        pods.append(kube.pod(name, containers=("pytorch",), labels=labels))
        frames = BARRIER if role == "master" else LOADS if index < 7 else WAITS
        record = {"pid": 7, "rank": "", "local": "", "part": "rank", "main": True, "frames": frames, "how": "handler"}
        kube.log(name, "pytorch").write(stamp(1), "step 3")
        printed[name] = [MARK + json.dumps(entry) for entry in (record, {"end": True, "left_out": 0})]
    async with serving(kube) as api:
        state = JobState(REF, Handover())
        state.job = JOB
        context = FollowContext(api, state, Lines())
        output = JobOutput(context)
        for number in range(69):
            step = 3 if number == 1 else 9
            output.training_metrics.read_line(f"Worker {number}", f'KTRAIN_METRIC {{"step": {step}}}', 1.0)
        async with StackReader(context, output, Limit.PROGRESS, 1800, pods) as reader:
            await reader.open()
            for name, records in printed.items():
                for text in records:
                    kube.log(name, "pytorch").write(stamp(2), text)
                kube.log(name, "pytorch").end()
            cause, lines = await reader.explain(Cause(Category.HANG, "no step"))
    assert kube.requests["log"] == 64
    assert cause.summary == (
        "No step for 30 min: Worker 1 is in load_batch (data.py:41), "
        "62 of the 63 other replicas that were read wait in all_reduce (train.py:88)"
    )
    assert "Where the processes were (64 of 70 replicas read):" in lines
    assert "  1: train.py:88 in train, in barrier [Master 0]" in lines
