"""`@task.trainjob` with a real torchrun."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.decorators.trainjob import _TrainJobDecoratedOperator
from airflow_provider_ktrain.exceptions import TrainingClusterError, TrainingConfigurationError
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance

pytestmark = [
    pytest.mark.embedded("needs an image with torch"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


@pytest.fixture
def instance(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    set_connection(cluster, monkeypatch)
    with Instance(cluster, TRAINJOB) as made:
        yield made


def sees(greeting: str) -> dict[str, Any]:
    import os

    rank, size, attempt = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "KTRAIN_ATTEMPT"))
    print(f"rank {rank} of {size}", flush=True)
    return {"size": size, "attempt": attempt, "greeting": greeting}


def no_json() -> Any:
    return {1}


def run(instance: Instance, function: Any, *args: Any, **parameters: Any) -> Any:
    options = {"nodes": 2, "gpus": 0, "deferrable": False, **parameters}
    return instance.execute(
        operator=_TrainJobDecoratedOperator, python_callable=function, op_args=list(args), **options
    )


def test_function_runs_on_every_node_under_torchrun(instance: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    returned = run(instance, sees, "hello", nproc_per_node=2)
    assert returned == {"size": "4", "attempt": "1", "greeting": "hello"}
    log = capfd.readouterr().out
    assert all(f"rank {rank} of 4" in log for rank in range(4))
    assert "[node 1] rank " in log
    assert not instance.jobs()


@pytest.mark.thorough
def test_return_value_that_is_not_json_fails_the_task_for_good(instance: Instance) -> None:
    """A TrainJob's function whose return value isn't JSON fails the task for good, as one of another kind does."""
    with pytest.raises(TrainingConfigurationError, match="its return value is not JSON and is lost"):
        run(instance, no_json, nproc_per_node=1)
    assert not instance.jobs()


def test_an_mpi_runtime_is_refused_before_anything_is_created(instance: Instance) -> None:
    with pytest.raises(TrainingClusterError, match=r"has no torch policy(?s:.*)mpi-distributed(?s:.*)@task\.mpijob"):
        run(instance, sees, "hello", runtime="mpi-distributed")
    assert not instance.jobs()
