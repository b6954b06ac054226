"""The replicas whose logs a task follows."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, TRAINJOB, Kind
from airflow_provider_ktrain.core.logs.selection import LogChoice, check_choice, chooser, is_followed


def job(kind: Kind, **replicas: int) -> dict[str, Any]:
    return {"spec": {kind.form.replica_specs: {role: {"replicas": n} for role, n in replicas.items()}}}


def chosen(choice: LogChoice, kind: Kind, made: dict[str, Any]) -> list[str]:
    choose = chooser(choice, kind, made)
    prefix = "training.kubeflow.org"
    return [
        f"{role}-{i}"
        for role in kind.roles
        for i in range(kind.count(made, role))
        if choose({"metadata": {"labels": {f"{prefix}/replica-type": role.lower(), f"{prefix}/replica-index": str(i)}}})
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("all", ["Master-0", "Worker-0", "Worker-1"]),
        ("auto", ["Master-0", "Worker-0", "Worker-1"]),
        ("primary", ["Master-0"]),
        ("none", []),
        ({"Worker": [1]}, ["Worker-1"]),
        ({"Master": [0], "Worker": [0, 7]}, ["Master-0", "Worker-0"]),
        ({}, []),
    ],
)
def test_log_choice_selects_replicas(choice: LogChoice, expected: list[str]) -> None:
    check_choice(choice, PYTORCHJOB)
    assert chosen(choice, PYTORCHJOB, job(PYTORCHJOB, Master=1, Worker=2)) == expected


@pytest.mark.parametrize(("workers", "replicas"), [(15, 16), (16, 1)])
def test_auto_selects_all_replicas_of_jobs_with_up_to_16(workers: int, replicas: int) -> None:
    assert len(chosen("auto", PYTORCHJOB, job(PYTORCHJOB, Master=1, Worker=workers))) == replicas


def test_primary_without_a_master_and_of_an_mpijob() -> None:
    assert chosen("primary", PYTORCHJOB, job(PYTORCHJOB, Worker=3)) == ["Worker-0"]
    assert chosen("primary", MPIJOB, job(MPIJOB, Launcher=1, Worker=2)) == ["Launcher-0"]


@pytest.mark.parametrize("choice", ["some", "", {"Launcher": [0]}, {"Worker": ["0"]}, {"Worker": [-1]}])
def test_invalid_choice_is_rejected(choice: LogChoice) -> None:
    with pytest.raises(KtrainError, match=r"logs: found .*expected"):
        check_choice(choice, PYTORCHJOB)


def pod(role: str, *containers: str, init: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """A pod of an operator's or of a JobSet's."""
    labels = {"training.kubeflow.org/replica-type": role.lower(), "jobset.sigs.k8s.io/replicatedjob-name": role}
    return {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": name} for name in containers], "initContainers": list(init)},
    }


MPI_TEMPLATE = {"template": {"spec": {"containers": [{"name": "mpi"}, {"name": "metrics"}]}}}


@pytest.mark.parametrize(
    ("kind", "made", "role", "containers", "expected"),
    [
        (PYTORCHJOB, {}, "Master", ("metrics", "pytorch"), "pytorch"),
        (PYTORCHJOB, {}, "Master", ("renamed", "metrics"), "renamed"),
        (MPIJOB, {"mpiReplicaSpecs": {"Launcher": MPI_TEMPLATE}}, "Launcher", ("istio-proxy", "mpi", "metrics"), "mpi"),
        (MPIJOB, {"mpiReplicaSpecs": {}}, "Worker", ("sshd", "metrics"), "sshd"),
        (MPIJOB, {"mainContainer": "metrics"}, "Launcher", ("mpi", "metrics"), "metrics"),
        (TRAINJOB, {}, "node", ("metrics", "node"), "node"),
        (TRAINJOB, {}, "launcher", ("metrics", "node"), "node"),
        (TRAINJOB, {}, "dataset-initializer", ("metrics", "dataset-initializer"), "dataset-initializer"),
        (TRAINJOB, {}, "evaluation", ("evaluate", "metrics"), "evaluate"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_sidecars_are_not_followed(
    kind: Kind, made: dict[str, Any], role: str, containers: tuple[str, ...], expected: str
) -> None:
    followed = [c for c in containers if is_followed(kind, {"spec": made}, pod(role, *containers), c)]
    assert followed == [expected]


def test_init_containers_are_followed_unless_they_run_beside_the_main_container() -> None:
    init = ({"name": "download"}, {"name": "proxy", "restartPolicy": "Always"})
    found = pod("Worker", "pytorch", init=init)
    assert is_followed(PYTORCHJOB, {}, found, "download")
    assert not is_followed(PYTORCHJOB, {}, found, "proxy")


def test_the_init_container_that_waits_for_the_master_is_not_followed() -> None:
    """It would log two lines every two seconds in each Worker, as long as the Master pulls its image."""
    found = pod("Worker", "pytorch", init=({"name": "init-pytorch"},))
    assert not is_followed(PYTORCHJOB, {}, found, "init-pytorch")
