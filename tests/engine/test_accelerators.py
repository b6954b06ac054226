"""Accelerators other than GPUs: as resources of nodes, and as devices of ResourceClaims."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from airflow_provider_ktrain.core.state.accelerators import SHARED, TABLE
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.follow.options import Options
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests.apiserver import connected
from tests.engine.staged import Staged, staged
from tests.engine.tasks import release_job

pytestmark = pytest.mark.virtual_time

#: resources, each with what several units are called: at least one of each row of the table
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


# ResourceClaims


def claim(training: Staged, name: str, devices: int) -> dict[str, Any]:
    """A claim with allocated devices, as a scheduler leaves it; returns what a pod that uses it has."""
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": devices}}
    results = [
        {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node", "device": f"gpu-{number}"}
        for number in range(devices)
    ]
    training.api.put(
        "resourceclaims",
        {
            "metadata": {"name": name}, "spec": {"devices": {"requests": [request]}},
            "status": {"allocation": {"devices": {"results": results}}},
        },
    )  # fmt: skip
    return {"limits": {}, "resourceClaims": [{"name": "gpus", "resourceClaimName": name}]}


async def test_devices_of_a_claim_are_released_and_used() -> None:
    async with staged() as training:
        outcome = await stalled(training, **claim(training, "known", 3))
        assert "3 GPUs released, 1 pod deleted." in outcome.released
        assert (outcome.usage["gpus"], outcome.usage.get("unknown_claims")) == (3, None)
        assert outcome.usage["held"] > 0
        assert outcome.status["replicas"]["rows"][0][4] == 3


async def test_devices_of_the_claim_that_a_template_made_are_counted() -> None:
    async with staged() as training:
        claim(training, "job-gpus-x7k2p", 2)
        made = {"name": "gpus", "resourceClaimName": "job-gpus-x7k2p"}  # Kubernetes' controller names it so
        from_template = [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]
        pod = training.pod(0, limits={}, resourceClaims=from_template)
        training.api.change("pods", pod, lambda pod: pod["status"].update(resourceClaimStatuses=[made]))
        training.running()
        outcome = await training.follow(Options(limits=Limits(log_stall=60)))
        assert "2 GPUs released, 1 pod deleted." in outcome.released
        assert outcome.usage["gpus"] == 2


async def test_devices_are_unknown_without_the_right_to_read_the_claim() -> None:
    async with staged() as training:
        training.api.fail("GET", "/resourceclaims", 403, math.inf)
        outcome = await stalled(training, **claim(training, "unknown", 3))
        assert " An unknown number of devices of 1 ResourceClaim released, 1 pod deleted." in outcome.released
        assert outcome.usage == {"unknown_claims": 1}
        assert "Accelerator time: unknown. The devices of 1 ResourceClaim were not read." in str(training.log)


async def test_a_claim_that_is_gone_has_unknown_devices() -> None:
    async with staged() as training, connected(training.url) as api:
        claim(training, "another", 2)
        training.pod(0, limits={}, resourceClaims=[{"name": "gpus", "resourceClaimName": "gone"}])
        done = await release_job(api, training.ref)
        assert "An unknown number of devices of 1 ResourceClaim released" in done.text


@pytest.mark.parametrize("has_claim", [False, True])
async def test_claims_are_read_once_and_only_if_pods_have_some(has_claim: bool) -> None:
    """Once while the job is followed, and once when it is released; each time after a discovery."""
    async with staged() as training:
        pod = claim(training, "counted", 1)
        await stalled(training, **(pod if has_claim else {}))
        made = [line.removeprefix("GET ") for line in training.api.requests if "resource.k8s.io" in line]
        path = f"/apis/resource.k8s.io/v1/namespaces/{training.ref.namespace}/resourceclaims/counted"
        assert made == (["/apis/resource.k8s.io", path] * 2 if has_claim else [])
