"""Between how many Workers an elastic job may be scaled."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds.base import MPIJOB, PYTORCHJOB
from airflow_provider_ktrain.core.state.elastic import bounds, keeps_world_size

from .manifests import mpijob, pytorchjob


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, (1, None)),
        ({"minReplicas": 1, "maxReplicas": 4}, (1, 4)),
        ({"maxReplicas": 4}, (4, 4)),
        ({"minReplicas": 2}, (2, 2)),
        ({}, (1, None)),
    ],
)
def test_a_pytorchjob_says_it_in_its_elastic_policy(policy: Any, expected: tuple[int, int | None]) -> None:
    assert bounds(PYTORCHJOB, {"spec": {"elasticPolicy": policy}}) == expected


@pytest.mark.parametrize(
    ("command", "slots", "expected"),
    [
        (["mpirun", "-np", "2", "python"], 1, (0, None)),
        (["horovodrun", "--min-np", "1", "--max-np", "4", "python"], 1, (1, 4)),
        (["horovodrun", "--min-np=3", "--max-np=9", "python"], 2, (2, 4)),
        (["horovodrun", "--min-num-proc", "2", "--max-num-proc", "8"], 2, (1, 4)),
        (["horovodrun", "--max-np", "$MAX"], 1, (0, None)),
    ],
)
def test_an_mpijob_says_it_in_processes(command: list[str], slots: int, expected: tuple[int, int | None]) -> None:
    launcher = {"template": {"spec": {"containers": [{"command": command[:1], "args": command[1:]}]}}}
    job = {"spec": {"slotsPerWorker": slots, "mpiReplicaSpecs": {"Launcher": launcher}}}
    assert bounds(MPIJOB, job) == expected


def test_a_job_with_a_master_and_no_elastic_policy_keeps_its_world_size() -> None:
    job = pytorchjob()
    assert keeps_world_size(PYTORCHJOB, job)
    job["spec"]["elasticPolicy"] = {}
    assert not keeps_world_size(PYTORCHJOB, job)
    del job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Master"]
    assert not keeps_world_size(PYTORCHJOB, job)
    assert not keeps_world_size(MPIJOB, mpijob())
