"""Some pods of a job hold GPUs while others have no node: how long, and who waits for what."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.evidence import make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import diagnose_limit
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.accelerators import GPU
from airflow_provider_ktrain.core.state.limits import Limit, Limits, clocks
from airflow_provider_ktrain.core.state.pods.partial_start import PartialStart, find_partial_start, warning_due
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from tests.factories import replica_pod

from .test_diagnosis import time

T0 = epoch_seconds(time(0)) or 0.0
NO_NODE = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
ELASTIC = {"elasticPolicy": {"minReplicas": 2, "maxReplicas": 4}}


def job(**spec: Any) -> dict[str, Any]:
    return {"kind": "PyTorchJob", "metadata": {"name": "train", "creationTimestamp": time(0)}, "spec": spec}


def pod(role: str, index: int = 0, *, node: bool, at: int = 0, gpus: int = 8, **more: Any) -> dict[str, Any]:
    """A pod that was created `at` seconds after the job; with a node, it got the node 10 s later."""
    condition = {"type": "PodScheduled", "status": str(node), "lastTransitionTime": time(at + 10 * node)}
    container = {"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": gpus} if gpus else {}}}
    name = f"{role}-{index}"
    meta = {"name": name, "uid": name, "creationTimestamp": time(at), **more.pop("meta", {})}
    spec = {"containers": [container], **({"nodeName": "n1"} if node else {}), **more.pop("spec", {})}
    conditions = [condition | ({} if node else {"message": NO_NODE, "reason": "Unschedulable"})]
    return replica_pod(role, index, meta=meta, spec=spec, **{"phase": "Pending", "conditions": conditions, **more})


def found(*pods: dict[str, Any], **spec: Any) -> PartialStart:
    partial = find_partial_start(job(**spec), pods)
    assert partial is not None
    return partial


def test_partial_start_begins_when_one_pod_has_a_node_and_another_waits() -> None:
    assert found(pod("Master", node=True), pod("Worker", node=False)).since == T0 + 10
    assert found(pod("Master", node=True, phase="Running"), pod("Worker", node=False, at=600)).since == T0 + 600


def test_partial_start_continues_while_more_pods_get_nodes() -> None:
    pods = pod("Master", node=True), pod("Worker", 0, node=True, at=300), pod("Worker", 1, node=False)
    assert found(*pods).since == T0 + 10


def test_partial_start_names_holding_and_waiting_pods() -> None:
    partial = found(*(pod("Worker", i, node=i < 14, gpus=1) for i in range(16)), pod("Master", node=True, gpus=0))
    assert (partial.held, partial.holding, partial.waiting) == ({GPU: 14}, 14, ("Worker 14", "Worker 15"))
    first, reason, limit = partial.describe_partial_start("PyTorchJob ns/train", 3600).splitlines()
    assert first == "PyTorchJob ns/train holds 14 GPUs in 14 pods, but Worker 14 (and 1 more) has no node."
    assert reason == NO_NODE
    assert "after 3600 s (partial_start_timeout)" in limit
    assert "partial_start_timeout" not in partial.describe_partial_start("PyTorchJob ns/train", None)


@pytest.mark.parametrize(
    "pods",
    [
        [pod("Master", node=True), pod("Worker", node=True)],
        [pod("Master", node=False), pod("Worker", node=False)],
        [pod("Master", node=True, gpus=0), pod("Worker", node=False)],
        [pod("Master", node=True, phase="Succeeded"), pod("Worker", node=False)],
        [pod("Master", node=True), pod("Worker", node=False, meta={"deletionTimestamp": time(5)})],
        [pod("Master", node=True), pod("Worker", node=False, spec={"schedulingGates": [{"name": "queue"}]})],
    ],
    ids=[
        "all have nodes",
        "none has a node",
        "no GPUs held",
        "holder has ended",
        "waiter is deleted",
        "held by a queue",
    ],
)
def test_pods_that_do_not_wait_for_each_other(pods: list[dict[str, Any]]) -> None:
    assert find_partial_start(job(), pods) is None
    assert find_partial_start({}, [pod("Master", node=True), pod("Worker", node=False)]) is None, "job not seen yet"


@pytest.mark.parametrize(("placed", "partial"), [(1, True), (2, False), (3, False)])
def test_elastic_job_with_its_minimum_is_exempt(placed: int, partial: bool) -> None:
    pods = [pod("Worker", i, node=i < placed) for i in range(4)]
    assert (find_partial_start(job(**ELASTIC), pods) is not None) is partial


@pytest.mark.parametrize(("limit", "seconds"), [(None, 300), (3600, 300), (60, 30)])
def test_warning_comes_after_5_minutes_or_half_of_the_limit(limit: float | None, seconds: float) -> None:
    partial = found(pod("Master", node=True), pod("Worker", node=False))
    assert warning_due(partial.since, limit) == partial.since + seconds


@pytest.mark.parametrize("phase", [Phase.PENDING, Phase.RUNNING, Phase.RESTARTING, Phase.QUEUED, Phase.SUSPENDED])
def test_clock_runs_unless_a_queue_suspends_the_job(phase: Phase) -> None:
    pods = [pod("Master", node=True), pod("Worker", node=False)]
    groups, limits = PodGroups(PYTORCHJOB, pods), Limits(partial_start=60)
    running = clocks(job(), groups, phase, limits, deadline=None, last_line=T0)
    due = {clock.limit: clock.due - T0 for clock in running}
    assert due == ({} if phase in (Phase.QUEUED, Phase.SUSPENDED) else {Limit.PARTIAL_START: 70})
    assert not list(clocks(job(), groups, phase, Limits(), deadline=None, last_line=T0))


def test_cause_is_the_pod_without_a_node_even_if_others_failed() -> None:
    master = pod("Master", node=True)
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": time(50)}
    master["status"]["containerStatuses"] = [{"name": "pytorch", "state": {"terminated": ended}, "restartCount": 3}]
    cause = diagnose_limit(Limit.PARTIAL_START, 3600, make_evidence(job(), [master, pod("Worker", node=False)]))
    assert (cause.category, cause.replica) == (Category.SCHEDULING, "Worker 0")
    assert cause.summary.startswith(
        "PyTorchJob train held GPUs for 3600 s while some of its pods had no node (partial_start_timeout): "
        "Worker 0 can't be scheduled"
    )
