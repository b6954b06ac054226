"""The ML policy that a program needs of its runtime."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import RuntimeMismatchError
from airflow_provider_ktrain.core.kinds.trainjob.runtime import python_without_torchrun, require_policy

from .manifests import trainjob

Json = dict[str, Any]


def runtime(**policy: Any) -> Json:
    return {"metadata": {"name": "mine"}, "spec": {"mlPolicy": policy} if policy else {}}


@pytest.mark.parametrize(
    ("nodes", "of"),
    [(2, runtime(torch={})), (2, runtime(numNodes=1, torch={})), (1, runtime(numNodes=4)), (1, runtime())],
)
def test_runtimes_on_which_torchrun_forms_one_group(nodes: int, of: Json) -> None:
    require_policy(trainjob(nodes=nodes), of, "torch")


@pytest.mark.parametrize(
    ("nodes", "of", "found"),
    [
        (2, runtime(mpi={"runLauncherAsNode": True}), "mine with mlPolicy mpi"),
        (1, runtime(mpi={}), "mine with mlPolicy mpi"),
        (2, runtime(jax={}), "mine with mlPolicy jax"),
        (2, runtime(), "mine with mlPolicy for no framework"),
    ],
)
def test_other_runtimes_are_refused_with_the_reason(nodes: int, of: Json, found: str) -> None:
    with pytest.raises(RuntimeMismatchError, match="has no torch policy, so the nodes would not find each other") as e:
        require_policy(trainjob(nodes=nodes), of, "torch")
    assert f"found {found}" in str(e.value)
    assert "@task.mpijob" in str(e.value)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (["python", "train.py"], "python"),
        (["/opt/conda/bin/python3.11", "-u", "train.py"], "python3.11"),
        (["torchrun", "train.py"], ""),
        (["python", "-m", "torch.distributed.run", "train.py"], ""),
        (["python3", "-m", "accelerate.commands.launch", "train.py"], ""),
        (["sh", "-c", "python train.py"], ""),
        ([], ""),
        (None, ""),
        ("python train.py", ""),
    ],
)
def test_commands_that_start_python_on_each_node(command: object, program: str) -> None:
    assert python_without_torchrun(command) == program
