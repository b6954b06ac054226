"""The exit code of a failed job is that of its primary replica's main container."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB
from airflow_provider_ktrain.core.state.pods.exit_code import primary_exit_code

from .test_diagnosis import pod, time

JOB = {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 2}}}}


def replica(role: str, index: int = 0, **more: Any) -> dict[str, Any]:
    made = pod(role, index, **more)
    made["spec"]["containers"] = [{"name": "sidecar"}, {"name": "pytorch"}]
    return made


def exit_code(*pods: dict[str, Any], job: dict[str, Any] = JOB) -> int | None:
    return primary_exit_code(PYTORCHJOB, job, pods)


def test_exit_code_is_that_of_the_master() -> None:
    assert exit_code(replica("Worker", code=1), replica("Master", code=99, at=9), replica("Worker", 1)) == 99


def test_exit_code_is_that_of_worker_0_without_a_master() -> None:
    job = {"kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2}}}}
    assert exit_code(replica("Worker", 1, code=1), replica("Worker", code=99), job=job) == 99


def test_exit_code_is_unknown_if_only_a_worker_failed() -> None:
    assert exit_code(replica("Master"), replica("Worker", code=99)) is None


def test_exit_code_of_a_sidecar_does_not_count() -> None:
    master = replica("Master", code=99)
    master["status"]["containerStatuses"][0]["name"] = "sidecar"
    assert exit_code(master) is None


def test_exit_code_of_an_mpijob_is_that_of_its_main_container() -> None:
    job = {"kind": "MPIJob", "spec": {"mainContainer": "pytorch", "mpiReplicaSpecs": {"Launcher": {}, "Worker": {}}}}
    launcher = replica("Launcher", code=99)
    assert primary_exit_code(MPIJOB, job, [launcher]) == 99
    assert primary_exit_code(MPIJOB, {**job, "spec": {"mpiReplicaSpecs": {"Launcher": {}}}}, [launcher]) is None


def test_exit_code_of_a_pod_that_was_replaced_does_not_count() -> None:
    old = replica("Master", code=99, uid="old")
    new = replica("Master", code=1, at=60, uid="new", created=time(30))
    assert exit_code(old, new) == exit_code(new, old) == 1


@pytest.mark.parametrize("status", [{"reason": "Evicted"}, {"reason": "NodeLost"}])
def test_exit_code_of_a_pod_that_kubernetes_ended_does_not_count(status: dict[str, Any]) -> None:
    assert exit_code(replica("Master", code=137, **status)) is None
