"""The replicas whose logs a task follows."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.kinds import MPIJOB, PYTORCHJOB, Kind
from airflow_provider_ktrain.core.logs.selection import LogChoice, check_choice, chooser


def job(kind: Kind, **replicas: int) -> dict[str, Any]:
    return {"spec": {kind.replica_specs: {role: {"replicas": n} for role, n in replicas.items()}}}


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
