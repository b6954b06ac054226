"""The example DAGs, and functions as tasks, as Airflow parses them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from airflow.dag_processing.dagbag import DagBag
from airflow.sdk import DAG

from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator, pytorchjob_task
from airflow_provider_ktrain.sensors.training import TrainingJobSensor
from tests.leaks import restored_signals

EXAMPLES = pathlib.Path(__file__).parents[2] / "example_dags"
OUTSIDE = 3


@pytest.fixture(scope="module")
def examples() -> dict[str, DAG]:
    with restored_signals():
        bag = DagBag(EXAMPLES)
    assert bag.import_errors == {}
    return dict(bag.dags)


def test_each_example_is_one_dag_with_its_name_and_docs(examples: dict[str, DAG]) -> None:
    assert sorted(examples) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
    for dag in examples.values():
        assert dag.doc_md
        assert "ktrain" in dag.tags


def test_sensors_of_examples_set_a_timeout(examples: dict[str, DAG]) -> None:
    """Airflow's default is a week, but the job may never be submitted."""
    sensors = [task for dag in examples.values() for task in dag.tasks if isinstance(task, TrainingJobSensor)]
    assert sensors
    assert all(sensor.timeout <= 3600 for sensor in sensors)


# ---- functions as tasks


def uses_the_module() -> int:
    return OUTSIDE


def waits() -> Any:
    yield 1


def fine(a: int, b: int = 2) -> int:
    import math

    return int(math.fsum([a, b]))


def wants_the_date(a: int, ds: str | None = None) -> str:
    return f"{a} {ds}"


def wants_the_context(**context: Any) -> str:
    return str(context)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (uses_the_module, {}, "uses_the_module uses 'OUTSIDE', which is defined outside of it"),
        (waits, {}, "waits is a generator: return one value"),
        (fine, {"command": ["python"]}, "command can't be set, because the function is the program"),
        (fine, {"args": ["x"]}, "args can't be set, because the function is the program"),
        (fine, {"image": None}, "fine has no image: set image=... or manifest=..."),
        (
            wants_the_date,
            {},
            "wants_the_date takes 'ds' from Airflow's context, which is not available in the pod: rename",
        ),
        (
            wants_the_context,
            {},
            r"wants_the_context takes \*\*context, but Airflow's context is not available in the pod",
        ),
    ],
)
def test_unserializable_arguments_fail_when_the_dag_is_parsed(
    function: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with DAG("functions"), pytest.raises(ValueError, match=f"^@task.pytorchjob: {message}"):
        pytorchjob_task(**{"image": "x", **options})(function)(*[1] * (function in (fine, wants_the_date)))


def test_parameters_of_any_name_are_passed_to_the_function() -> None:
    with DAG("functions") as dag:
        pytorchjob_task(image="x")(wants_the_date)(1, ds="{{ ds }}")
        pytorchjob_task(manifest="train.yaml")(wants_the_context)(a=1)
    assert len(dag.tasks) == 2


def test_function_becomes_a_task() -> None:
    with DAG("functions") as dag:
        pytorchjob_task(image="x:1", workers=1)(fine)(1, b=5)
    task = dag.get_task("fine")
    assert isinstance(task, _PyTorchJobDecoratedOperator)
    assert (list(task.op_args), task.op_kwargs) == ([1], {"b": 5})
    assert task.function_arguments() == {"a": 1, "b": 5}
    assert task.build_manifest(None)["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
