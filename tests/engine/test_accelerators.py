"""Accelerators other than GPUs: as resources of nodes. Devices of ResourceClaims aren't counted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from airflow_provider_ktrain.core.state.accelerators import SHARED, TABLE
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.engine.staged import Staged, staged

pytestmark = pytest.mark.virtual_time

#: Resources, each with what several units are called: at least one of each row of the table.
ROWS = {
    "nvidia.com/gpu": "GPUs", "nvidia.com/gpu.shared": "shared GPUs", "nvidia.com/mig-1g.5gb": "MIG 1g.5gb slices",
    "nvidia.com/mig-3g.20gb.shared": "shared MIG 3g.20gb slices", "amd.com/gpu": "GPUs", "amd.com/spx_nps1": "GPUs",
    "amd.com/cpx_nps4": "GPU partitions", "google.com/tpu": "TPUs", "aws.amazon.com/neuron": "Neuron devices",
    "aws.amazon.com/neurondevice": "Neuron devices", "aws.amazon.com/neuroncore": "Neuron cores",
    "habana.ai/gaudi": "Gaudi accelerators", "huawei.com/Ascend910": "NPUs", "huawei.com/Ascend310P": "NPUs",
    "huawei.com/npu": "NPUs", "huawei.com/Ascend910-16c": "vNPUs", "gpu.intel.com/i915": "GPUs",
    "gpu.intel.com/xe": "GPUs", "example.com/gpu": "GPUs",
}  # fmt: skip


def test_each_row_of_the_table_has_a_resource() -> None:
    whole = [name.removesuffix(SHARED) for name in ROWS]
    used = {next(row for row in TABLE if re.fullmatch(row.resource, name)) for name in whole}
    assert used == {*TABLE}


async def stalled(training: Staged, *, role: str = "Worker", **pod: Any) -> Outcome:
    """The end of a job of two pods, or of one, that is released because its log stalls."""
    for index in range(training.kind.count(training.job, role)):
        training.pod(index, **pod)
    training.running()
    return await training.follow(Options(limits=Limits(log_stall=60)))


def workers(training: Staged, number: int) -> None:
    training.spec(pytorchReplicaSpecs={"Worker": {"replicas": number}})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("resource", ROWS)
async def test_partial_start_names_the_resource(resource: str) -> None:
    """The Master has 3 units, and none are left for the Worker."""
    units = ROWS[resource]
    async with staged(roles=("Master", "Worker"), since=0.0) as training:
        training.condition("Created")
        training.pod(0, limits={resource: "3"}, since=0.0)
        training.pod(0, "Pending", role="Worker", node="", limits={resource: "3"}, since=0.0)
        outcome = await training.follow(Options(limits=Limits(partial_start=20)))
        assert outcome.cause is not None
        assert f"held {units} for 20 s while some of its pods had no node" in outcome.cause["summary"]
        log = str(training.log)
        assert f"holds 3 {units} in 1 pod, but Worker 0 has no node." in log
        assert f"The {units} are idle until all pods have nodes." in log
        assert f" 3 {units} released, 2 pods deleted." in outcome.released
        assert outcome.usage["gpus"] == 3
        assert outcome.usage.get("resource") == (None if units == "GPUs" else resource)
        assert f" on 3 {units} (" in log


async def test_two_kinds_are_listed() -> None:
    async with staged() as training:
        workers(training, 2)
        outcome = await stalled(training, limits={"nvidia.com/gpu": "1", "nvidia.com/mig-1g.5gb": "2"})
        assert "2 GPUs and 4 MIG 1g.5gb slices released, 2 pods deleted." in outcome.released
        assert outcome.usage["gpus"] == 2
        assert outcome.usage["others"]["nvidia.com/mig-1g.5gb"]["gpus"] == 4
        assert outcome.status["replicas"]["others"] == {"nvidia.com/mig-1g.5gb": 4}


async def test_devices_of_claims_are_not_counted() -> None:
    async with staged() as training:
        outcome = await stalled(training, limits={}, resourceClaims=[{"name": "gpus", "resourceClaimName": "gpus"}])
        assert " 1 pod deleted; devices of ResourceClaims not counted." in outcome.released
        assert outcome.usage == {"unknown_claims": 1}
        assert "Accelerator time: devices of ResourceClaims not counted." in str(training.log)
        assert not [line for line in training.api.requests if "resource.k8s.io" in line]
