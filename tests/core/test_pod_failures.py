"""Failures that are in the past, and failures that may have made the job fail."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.diagnosis.pod_failures import Failure, find_failures
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, Kind

from .test_diagnosis import pod, time


def found(*pods: dict[str, Any], kind: Kind = PYTORCHJOB) -> list[Failure]:
    return find_failures(kind, pods, {})


def launcher(suffix: str, code: int | None, *, created: int) -> dict[str, Any]:
    """A pod of mpi-operator's batch Job: each has another name and only a role label."""
    made = pod("Launcher", 0, code=code, at=created + 5, uid=suffix, created=time(created))
    made["metadata"] |= {"name": f"train-launcher-{suffix}", "labels": {"training.kubeflow.org/job-role": "launcher"}}
    return made


def test_a_failure_whose_pod_was_not_replaced_is_the_latest() -> None:
    deleted = {"deletionTimestamp": time(60), "deletionGracePeriodSeconds": 30}
    for meta in ({}, deleted):  # whether or not its pod is being deleted
        (failure,) = found(pod("Worker", 0, code=1, at=20, metadata=meta), pod("Worker", 1), pod("Master", 0))
        assert (failure.replica, failure.is_latest) == ("Worker 0", True)


@pytest.mark.parametrize("code", [None, 0, 1])
def test_a_failure_whose_pod_was_recreated_is_not_the_latest(code: int | None) -> None:
    """Under ExitCode, whether the new pod runs, succeeds or fails. Replicas of other roles don't matter."""
    old = pod("Worker", 0, code=130, at=20, uid="old")
    new = pod("Worker", 0, code=code, at=60, uid="new", created=time(30))
    for pods in ([old, new, pod("Master", 0)], [pod("Master", 0), new, old]):
        assert [f.is_latest for f in found(*pods)] == [False, True][: 2 if code else 1]


def test_terminating_pod_is_older_than_one_of_the_same_second() -> None:
    going = {"deletionTimestamp": time(0), "deletionGracePeriodSeconds": 0}
    old, new = pod("Worker", 0, code=130, uid="old", metadata=going), pod("Worker", 0, code=1, at=1, uid="new")
    for pods in ([old, new], [new, old]):
        assert [(f.exit_code, f.is_latest) for f in found(*pods)] == [(130, False), (1, True)]


def test_a_container_counts_as_failed_until_it_runs_again() -> None:
    waits = pod("Worker", 0, restarts=1)
    status = waits["status"]["containerStatuses"][0]
    status["lastState"] = {"terminated": {"exitCode": 1, "finishedAt": time(9)}}
    status["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    assert [f.is_latest for f in found(waits)] == [True]
    status["state"] = {"running": {"startedAt": time(10)}}
    assert found(waits) == []


def test_recreated_launchers_have_different_names() -> None:
    tries = [launcher("x7k2p", 1, created=0), launcher("9qwer", 2, created=20), launcher("aaaaa", None, created=40)]
    assert [f.is_latest for f in found(*tries[:1], kind=MPIJOB)] == [True]
    assert [(f.exit_code, f.is_latest) for f in found(*tries[:2], kind=MPIJOB)] == [(1, False), (2, True)]
    assert [f.is_latest for f in found(*tries, kind=MPIJOB)] == [False, False]


def test_workers_do_not_replace_each_other() -> None:
    pods = [pod("Worker", i, code=1, at=5, created=time(i)) for i in range(3)]
    for it in pods:
        it["metadata"]["labels"] = {"mpi-job-name": "train", "training.kubeflow.org/job-role": "worker"}  # no index
    assert [f.is_latest for f in found(*pods, kind=MPIJOB)] == [True] * 3
