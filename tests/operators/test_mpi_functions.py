"""`@task.mpijob` with a real mpirun, under both operators."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.decorators.mpijob import _MPIJobDecoratedOperator
from airflow_provider_ktrain.exceptions import TrainingConfigurationError, TrainingJobError
from tests import clusters
from tests.clusters import TestCluster
from tests.operators.task_instance import Instance

pytestmark = [
    pytest.mark.embedded("needs an image with mpirun"),
    pytest.mark.skipif(not shutil.which("mpirun", path=Path(sys.executable).parent), reason="needs Open MPI"),
]


@pytest.fixture(scope="module", params=[pytest.param("v1", marks=pytest.mark.thorough), "v2beta1"])
def mpi_cluster(request: pytest.FixtureRequest) -> Iterator[tuple[TestCluster, str]]:
    with clusters.cluster(gpus=8, mpi_api=request.param) as reached:
        yield reached, request.param


@pytest.fixture
def instance(mpi_cluster: tuple[TestCluster, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    cluster, version = mpi_cluster
    extra = {"kube_config_path": str(cluster.kubeconfig), "namespace": cluster.namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", "tests")
    with Instance(cluster, MPIJOB, version) as made:
        yield made


def run(instance: Instance, function: Any, *args: Any, **parameters: Any) -> Any:
    options = {"workers": 2, "gpus": 0, "deferrable": False, **parameters}
    return instance.execute(operator=_MPIJobDecoratedOperator, python_callable=function, op_args=list(args), **options)


def sees(text: str) -> dict[str, Any]:
    import os

    rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    print(f"rank {rank} of {size}")
    names = ("KTRAIN_CHECKPOINT_DIR", "KTRAIN_ATTEMPT", "GREETING", "KTRAIN_DAG_ID", "KTRAIN_TRY")
    return {"size": size, "text": text * 3000, "env": [os.environ.get(name) for name in names]}


def nothing() -> None:
    return None


def no_json() -> Any:
    return {1}


def too_much() -> str:
    return "x" * 50_000


def cuts_its_lines() -> int:
    import os

    write = os.write

    def half(fd: int, data: Any) -> int:
        return write(fd, data[: len(data) // 2] + b"\n")

    os.write = half
    return 1


def fails() -> None:
    import os

    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        raise ValueError("no data")


@pytest.mark.thorough
def test_function_runs_in_every_rank(instance: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    options = {"nproc_per_node": 2, "env": {"GREETING": "hello"}, "checkpoint_dir": "/checkpoints"}
    returned = run(instance, sees, "ü", **options)
    directory, *others = returned.pop("env")
    assert returned == {"size": "4", "text": "ü" * 3000}
    assert directory.startswith("/checkpoints/")
    assert others == ["1", "hello", "dag", "1"]
    log = capfd.readouterr().out
    assert all(f"[Launcher 0] rank {rank} of 4" in log for rank in range(4))
    assert instance.ti
    assert instance.ti.xcoms["return_value"]["size"] == "4"
    assert not instance.jobs()


def test_none_is_a_return_value(instance: Instance) -> None:
    assert run(instance, nothing) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "error", "why"),
    [
        (no_json, TrainingConfigurationError, "its return value is not JSON and is lost: it is of type set"),
        (too_much, TrainingJobError, "can't be read: the return value has 50,016 bytes of JSON, more than 49,152"),
        (cuts_its_lines, TrainingJobError, "can't be read: the Launcher's log has no intact line of it"),
    ],
)
def test_lost_return_value_is_an_error(instance: Instance, function: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(TrainingJobError) as raised:
        run(instance, function)
    assert type(raised.value) is error
    assert str(raised.value).startswith(f"{function.__name__} succeeded, but ")
    assert why in str(raised.value)
    with pytest.raises(error):  # a retry finds the stored outcome, and creates no job
        run(instance, function, number=2, max_tries=0)
    assert not instance.jobs()


def test_lost_return_value_that_is_not_pushed_is_no_error(instance: Instance) -> None:
    assert run(instance, cuts_its_lines, do_xcom_push=False) is None


def test_failure_of_a_rank_fails_the_task(instance: Instance) -> None:
    with pytest.raises(TrainingJobError, match="ValueError: no data"):
        run(instance, fails)
