"""The line that shows how many replicas run and what the others wait for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.pods.replica_status import replica_status
from tests.factories import replica_pod

NOW = datetime(2026, 11, 21, 10, 0, 26, tzinfo=UTC)
JOB = {"spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 3}}}}
RUNS = {"phase": "Running", "containerStatuses": [{"name": "pytorch", "state": {"running": {}}}]}


def pod(role: str, index: int, status: dict[str, Any], scheduled: str = "True", reason: str = "") -> dict[str, Any]:
    condition = {
        "type": "PodScheduled", "status": scheduled, "reason": reason, "lastTransitionTime": "2026-11-21T10:00:00Z",
    }  # fmt: skip
    return replica_pod(role, index, spec={"nodeName": "n"}, **{"conditions": [condition], **status})


def waiting(reason: str) -> dict[str, Any]:
    return {"phase": "Pending", "containerStatuses": [{"name": "pytorch", "state": {"waiting": {"reason": reason}}}]}


def line(*pods: dict[str, Any]) -> str:
    return replica_status(PYTORCHJOB, JOB, PodGroups(PYTORCHJOB, pods), NOW).line


def test_all_run() -> None:
    pods = [pod("master", 0, RUNS), *(pod("worker", n, RUNS) for n in range(3))]
    status = replica_status(PYTORCHJOB, JOB, PodGroups(PYTORCHJOB, pods), NOW)
    assert (status.line, status.all_run) == ("4/4 Running", True)


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull"])
def test_a_replica_with_a_problem_is_named(reason: str) -> None:
    """The kubelet alternates between the two reasons: that is no change."""
    pods = [pod("master", 0, RUNS), *(pod("worker", n, RUNS) for n in range(2)), pod("worker", 2, waiting(reason))]
    assert line(*pods) == "3/4 Running · Worker 2 ImagePullBackOff 26 s"


def test_crash_loop_counts_from_the_end_of_the_last_run() -> None:
    """And not from when the pod was scheduled."""
    crashed = waiting("CrashLoopBackOff") | {"phase": "Running"}
    crashed["containerStatuses"][0]["lastState"] = {"terminated": {"exitCode": 1, "finishedAt": "2026-11-21T10:00:25Z"}}
    pods = [pod("master", 0, crashed), *(pod("worker", n, RUNS) for n in range(3))]
    assert line(*pods) == "3/4 Running · Master 0 CrashLoopBackOff 1 s"


def test_replicas_that_start_are_counted() -> None:
    waits = {"name": "init-pytorch", "state": {"running": {"startedAt": "2026-11-21T10:00:00Z"}}}
    initializing = {"phase": "Pending", "initContainerStatuses": [waits]}
    pods = [pod("master", 0, waiting("ContainerCreating")), pod("worker", 0, initializing)]
    assert line(*pods) == "0/4 Running · 1 ContainerCreating · 1 Init:0/1 (waits for Master 0) · 2 not created"


def test_replicas_with_the_same_problem_share_an_entry() -> None:
    pods = [pod("master", 0, {"phase": "Pending"}, "False", "Unschedulable")]
    pods += [pod("worker", n, {"phase": "Pending"}, "False", "Unschedulable") for n in range(12)]
    assert line(*pods) == "0/13 Running · Master 0, Worker 0, Worker 1 and 10 more Unschedulable 26 s"


def test_a_crashing_container_and_an_ended_one() -> None:
    crashing = {**waiting("CrashLoopBackOff"), "phase": "Running"}
    pods = [pod("master", 0, {"phase": "Succeeded"}), pod("worker", 0, crashing), pod("worker", 1, RUNS)]
    assert line(*pods) == "1/4 Running · Worker 0 CrashLoopBackOff 26 s · 1 Succeeded · 1 not created"


def test_failed_replicas_are_named_with_their_reason() -> None:
    killed = {
        "phase": "Failed",
        "containerStatuses": [{"name": "pytorch", "state": {"terminated": {"reason": "OOMKilled"}}}],
    }
    pods = [
        pod("master", 0, RUNS),
        pod("worker", 0, killed),
        pod("worker", 1, {"phase": "Failed", "reason": "Evicted"}),
    ]
    assert line(*pods) == "1/4 Running · Worker 1 Evicted · Worker 0 OOMKilled · 1 not created"


def test_times_are_no_change() -> None:
    pods = PodGroups(PYTORCHJOB, [pod("master", 0, waiting("ImagePullBackOff"))])
    later = NOW.replace(minute=5)
    one, two = (replica_status(PYTORCHJOB, JOB, pods, now) for now in (NOW, later))
    assert one.states == two.states
    assert two.line == "0/4 Running · Master 0 ImagePullBackOff 5 min · 3 not created"


def test_a_replica_that_the_line_does_not_name_is_no_change() -> None:
    unschedulable = [pod("worker", n, {"phase": "Pending"}, "False", "Unschedulable") for n in range(6)]
    one, two = (PodGroups(PYTORCHJOB, pods) for pods in (unschedulable[:5], [*unschedulable[:4], unschedulable[5]]))
    assert replica_status(PYTORCHJOB, JOB, one, NOW).states == replica_status(PYTORCHJOB, JOB, two, NOW).states
