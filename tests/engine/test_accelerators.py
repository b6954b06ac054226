"""Accelerators other than GPUs on a cluster: as resources of its nodes, and as devices of ResourceClaims."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from airflow_provider_ktrain.core.state.accelerators import SHARED, TABLE
from airflow_provider_ktrain.core.state.limits import Limits
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import job_pods
from airflow_provider_ktrain.engine.follow.outcome import Outcome
from tests import clusters
from tests.clusters import TestCluster
from tests.engine.tasks import TRAINS, Task, api_of, release_job

pytestmark = pytest.mark.embedded("needs nodes with each kind of accelerator")
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
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    others = {name: "4" for name in ROWS if name != clusters.GPUS}
    with clusters.cluster(gpus=4, resources=others) as reached:
        yield reached


def test_each_row_of_the_table_has_a_resource() -> None:
    whole = [name.removesuffix(SHARED) for name in ROWS]
    used = {next(row for row in TABLE if re.fullmatch(row.resource, name)) for name in whole}
    assert used == {*TABLE}


@pytest.mark.parametrize("resource", ROWS)
async def test_each_resource_is_released_by_its_name(task: Task, resource: str) -> None:
    ref = (await task.submit(gpus=1, gpu_resource=resource, workers=1)).ref
    await task.running(ref, 2)
    outcome = await task.ended(ref, limits=Limits(log_stall=0.5))
    assert f" 2 {ROWS[resource]} released, 2 pods deleted." in outcome.released
    check_usage(outcome, task, 2, resource)


@pytest.mark.parametrize("resource", ROWS)
async def test_partial_start_names_the_resource(task: Task, resource: str) -> None:
    """The Master gets 3 of the 4 units of the node, so none are left for the Worker."""
    ref = (await task.submit(1, TRAINS, gpus=3, gpu_resource=resource, workers=1)).ref
    outcome = await task.ended(ref, limits=Limits(partial_start=2))
    units = ROWS[resource]
    assert outcome.cause is not None
    assert f"held {units} for 2 s while some of its pods had no node" in outcome.cause["summary"]
    assert [line for line in task.log.messages if f"holds 3 {units} in 1 pod, but Worker 0 has no node." in line]
    assert f"The {units} are idle until all pods have nodes." in str(task.log)
    assert f" 3 {units} released, 2 pods deleted." in outcome.released
    check_usage(outcome, task, 3, resource)


def check_usage(outcome: Outcome, task: Task, number: int, resource: str) -> None:
    """The usage counts this resource, and the log names it."""
    assert outcome.usage["gpus"] == number
    assert outcome.usage.get("resource") == (None if ROWS[resource] == "GPUs" else resource)
    assert f" on {number} {ROWS[resource]} (" in str(task.log)


async def test_two_kinds_are_listed(task: Task) -> None:
    ref = (await task.submit(gpus=1, workers=1, resources={"nvidia.com/mig-1g.5gb": 2})).ref
    await task.running(ref, 2)
    outcome = await task.ended(ref, limits=Limits(log_stall=0.5))
    assert "2 GPUs and 4 MIG 1g.5gb slices released, 2 pods deleted." in outcome.released
    assert outcome.usage["gpus"] == 2
    assert outcome.usage["others"]["nvidia.com/mig-1g.5gb"]["gpus"] == 4
    assert outcome.status["replicas"]["others"] == {"nvidia.com/mig-1g.5gb": 4}


# ResourceClaims


async def claim(task: Task, name: str, devices: int) -> None:
    """A claim with allocated devices, as a scheduler leaves it."""
    path = CLAIMS.format(task.namespace)
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": devices}}
    body = {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}}
    await task.api.request("POST", path, body=body)
    results = [
        {"request": "gpu", "driver": "gpu.nvidia.com", "pool": "node", "device": f"gpu-{number}"}
        for number in range(devices)
    ]
    status = {"status": {"allocation": {"devices": {"results": results}}}}
    await task.api.request("PATCH", f"{path}/{name}/status", body=status)


def claiming(name: str) -> dict[str, Any]:
    return {"pod_override": {"spec": {"resourceClaims": [{"name": "gpus", "resourceClaimName": name}]}}, "gpus": None}


async def token_with(cluster: TestCluster, admin: Any, name: str, *options: str) -> str:
    """A token of a service account with the Role that `ktrain rbac` prints."""
    words = [sys.executable, "-m", "airflow_provider_ktrain.cli", "rbac", "-n", cluster.namespace, "--name", name]
    printed = await asyncio.to_thread(
        subprocess.run, [*words, "--service-account", name, *options], capture_output=True, text=True, check=True
    )
    role, binding = yaml.safe_load_all(printed.stdout)
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    accounts = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts"
    await admin.request("POST", accounts, body={"metadata": {"name": name}})
    await admin.request("POST", f"{rbac}/roles", body=role)
    await admin.request("POST", f"{rbac}/rolebindings", body=binding)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    answer = await admin.request("POST", f"{accounts}/{name}/token", body=asked)
    return str(answer["status"]["token"])


async def test_devices_of_a_claim_are_released_and_used(task: Task, cluster: TestCluster) -> None:
    await claim(task, "known", 3)
    ref = (await task.submit(**claiming("known"))).ref
    await task.running(ref)
    async with api_of(cluster, token=await token_with(cluster, task.api, "dra", "--dra")) as api:
        outcome = await Task(api, task.namespace, task.key, task.log).ended(ref, limits=Limits(log_stall=0.5))
    assert "3 GPUs released, 1 pod deleted." in outcome.released
    assert (outcome.usage["gpus"], outcome.usage.get("unknown_claims")) == (3, None)
    assert outcome.usage["held"] > 0
    assert outcome.status["replicas"]["rows"][0][4] == 3


async def test_devices_of_the_claim_that_a_template_made_are_counted(task: Task) -> None:
    await claim(task, "job-gpus-x7k2p", 2)
    from_template = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
    ref = (await task.submit(gpus=None, pod_override={"spec": {"resourceClaims": [from_template]}})).ref
    await task.running(ref)
    (pod,) = await job_pods(task.api, ref)
    made = {"name": "gpus", "resourceClaimName": "job-gpus-x7k2p"}  # Kubernetes' controller names it so
    path = f"{api_paths.core(task.namespace, 'pods', pod['metadata']['name'])}/status"
    await task.api.request("PATCH", path, body={"status": {"resourceClaimStatuses": [made]}})
    outcome = await task.ended(ref, limits=Limits(log_stall=0.5))
    assert "2 GPUs released, 1 pod deleted." in outcome.released
    assert outcome.usage["gpus"] == 2


async def test_devices_are_unknown_without_the_right_to_read_the_claim(task: Task, cluster: TestCluster) -> None:
    await claim(task, "unknown", 3)
    ref = (await task.submit(**claiming("unknown"))).ref
    await task.running(ref)
    async with api_of(cluster, token=await token_with(cluster, task.api, "no-dra")) as api:
        outcome = await Task(api, task.namespace, task.key, task.log).ended(ref, limits=Limits(log_stall=0.5))
    assert " An unknown number of devices of 1 ResourceClaim released, 1 pod deleted." in outcome.released
    assert outcome.usage == {"unknown_claims": 1}
    assert "Accelerator time: unknown. The devices of 1 ResourceClaim were not read." in str(task.log)


async def test_a_claim_that_is_gone_has_unknown_devices(task: Task) -> None:
    await claim(task, "gone", 2)
    ref = (await task.submit(**claiming("gone"))).ref
    await task.running(ref)
    await task.api.request("DELETE", f"{CLAIMS.format(task.namespace)}/gone")
    done = await release_job(task.api, ref)
    assert "An unknown number of devices of 1 ResourceClaim released" in done.text


class Recorder(Api):
    """Records the paths of requests about claims."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.made: list[str] = []

    async def request(self, method: str, path: str, **how: Any) -> dict[str, Any]:
        if "resource.k8s.io" in path:
            self.made.append(path)
        return await super().request(method, path, **how)


async def test_claims_are_read_once_and_only_if_pods_have_some(task: Task, cluster: TestCluster) -> None:
    """Once while the job is followed, and once when it is released; each time after a discovery."""
    await claim(task, "counted", 1)
    made = []
    for overlay in ({"gpus": 1}, claiming("counted")):
        async with api_of(cluster, Recorder) as api:
            one = Task(api, task.namespace)
            ref = (await one.submit(**overlay)).ref
            await one.running(ref)
            await one.ended(ref, limits=Limits(log_stall=0.5))
            made.append(api.made)
    assert made == [[], ["/apis/resource.k8s.io", f"{CLAIMS.format(task.namespace)}/counted"] * 2]
