"""Whether a ClusterQueue can ever admit a job: only quotas that are surely too small are errors."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from airflow_provider_ktrain.core.checks.cluster_queue import judge_cluster_queue, requests_of
from airflow_provider_ktrain.core.checks.server_rules import queue_of
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, overlay
from tests.core.manifests import mpijob, pytorchjob, trainjob

GPU = "nvidia.com/gpu"
NEVER = "ClusterQueue gpus can never admit the job: its Worker pods request "


def flavor(name: str, **amounts: str | tuple[str, str]) -> dict[str, Any]:
    """A flavor with quotas of gpu, cpu: nominal, or nominal and borrowingLimit."""
    resources = []
    for resource, amount in amounts.items():
        nominal, limit = amount if isinstance(amount, tuple) else (amount, None)
        quota = {"name": {"gpu": GPU}.get(resource, resource), "nominalQuota": nominal}
        resources.append({**quota, "borrowingLimit": limit} if limit is not None else quota)
    return {"name": name, "resources": resources}


def reported(*flavors: dict[str, Any], gpus: int = 2, workers: int = 3, **spec: Any) -> list[str]:
    """The messages about a job with this number of Workers, each with 2 GPUs and 4 CPUs."""
    options = JobOptions(gpus=gpus, workers=workers, resources={"cpu": "4"}, queue="team-a")
    manifest = overlay(pytorchjob(), options)
    covered = sorted({resource["name"] for one in flavors for resource in one["resources"]})
    group = {"coveredResources": covered, "flavors": list(flavors)}
    queue = {"spec": {"namespaceSelector": {}, "resourceGroups": [group], **spec}}
    return [p.message for p in judge_cluster_queue(queue_of(manifest), "gpus", queue, manifest, {})]


def test_a_job_that_fits_has_no_problem() -> None:
    assert reported(flavor("a100", gpu="8", cpu="32")) == []


def test_a_job_that_requests_more_than_each_flavor_has_is_an_error() -> None:
    too_small = f"{NEVER}6 {GPU} of at most 4 in flavor a100"
    assert reported(flavor("a100", gpu="4", cpu="32")) == [too_small]
    assert reported(flavor("a100", gpu="4", cpu="32"), flavor("h100", gpu="8", cpu="1")) == [
        f"{too_small} and 12 cpu of at most 1 in flavor h100"
    ]


def test_one_flavor_that_is_large_enough_suffices() -> None:
    assert reported(flavor("a100", gpu="4", cpu="32"), flavor("h100", gpu="8", cpu="32")) == []


def test_a_queue_of_a_cohort_may_borrow() -> None:
    assert reported(flavor("a100", gpu="4", cpu="32"), cohortName="all") == []
    assert reported(flavor("a100", gpu="4", cpu="32"), cohort="all") == []  # v1beta1
    assert reported(flavor("a100", gpu=("4", "2"), cpu="32"), cohortName="all") == []
    assert reported(flavor("a100", gpu=("4", "1"), cpu="32"), cohortName="all") == [
        f"{NEVER}6 {GPU} of at most 5 in flavor a100"
    ]
    assert reported(flavor("a100", gpu=("4", "2"), cpu="32")) == [f"{NEVER}6 {GPU} of at most 4 in flavor a100"]


def test_a_resource_without_quota_is_a_warning() -> None:
    """Kueue may be configured to ignore it."""
    assert reported(flavor("a100", gpu="8")) == ["ClusterQueue gpus has no quota for cpu: it may never admit the job"]


def test_unreadable_quota_is_no_evidence() -> None:
    assert reported(flavor("a100", gpu="many", cpu="32")) == []


def test_requests_of_pods_are_summed_by_role() -> None:
    manifest = mpijob("v2beta1")
    worker = manifest["spec"]["mpiReplicaSpecs"]["Worker"]
    worker["replicas"] = 2
    pod = worker["template"]["spec"]
    resources = [{"limits": {"cpu": "1", GPU: 2}, "requests": {"cpu": "500m"}}, {"requests": {"memory": "1Gi"}}]
    pod["containers"] = [{"name": str(number), "resources": of_one} for number, of_one in enumerate(resources)]
    pod["initContainers"] = [{"name": "init", "resources": {"requests": {"cpu": "2"}}}]
    totals = requests_of(manifest)
    assert totals["Worker"] == {"cpu": Decimal(4), GPU: Decimal(4), "memory": Decimal(2 * 2**30)}


def test_nodes_of_a_trainjob_are_one_pod_set() -> None:
    manifest = trainjob()
    manifest["spec"]["trainer"] = {"numNodes": 3, "resourcesPerNode": {"limits": {GPU: 2}}}
    assert requests_of(manifest) == {"node": {GPU: Decimal(6)}}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ({}, True),
        (None, False),
        ({"matchLabels": {"team": "a"}}, True),
        ({"matchLabels": {"team": "b"}}, False),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "gpu", "operator": "SomethingNew"}]}, True),
    ],
)
def test_a_queue_of_other_namespaces_is_an_error(selector: Any, matches: bool) -> None:
    manifest = overlay(pytorchjob(), JobOptions(queue="team-a"))
    queue = {"spec": {"namespaceSelector": selector}}
    problems = list(judge_cluster_queue(queue_of(manifest), "gpus", queue, manifest, {"team": "a"}))
    assert any("admits no jobs of this namespace" in p.message for p in problems) is not matches
