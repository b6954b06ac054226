"""Signatures of the operators and sensors, as editors and Airflow's `default_args` use them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, assert_type

import pytest
from airflow.sdk import DAG, TaskGroup

from airflow_provider_ktrain.operators.job_control import (
    DeleteTrainingJobOperator,
    ResumeTrainingJobOperator,
    ScaleTrainingJobOperator,
    SuspendTrainingJobOperator,
)
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator
from airflow_provider_ktrain.sensors.training import MPIJobSensor, PyTorchJobSensor, TrainJobSensor

CLASSES = (
    PyTorchJobOperator, MPIJobOperator, TrainJobOperator, PyTorchJobSensor, MPIJobSensor, TrainJobSensor,
    ScaleTrainingJobOperator, SuspendTrainingJobOperator, ResumeTrainingJobOperator, DeleteTrainingJobOperator,
    ReapTrainingJobsOperator,
)  # fmt: skip
#: Values, other than the defaults, of parameters that are no templates.
VALUES = {
    "deferrable": False, "on_finish_action": "keep_job", "reattach": "if_unchanged", "logs": "primary",
    "queue_timeout": 11.0, "schedule_timeout": 12.0, "startup_timeout": 13.0, "partial_start_timeout": 14.0,
    "log_stall_timeout": 15.0, "progress_timeout": 16.0, "max_restarts": 17, "crash_loop_limit": 18,
    "resume_on_clear": True, "avoid_failed_nodes": True, "skip_on_exit_code": 19, "dry_run": True, "timeout": 20.0,
    "fail_on_nan": True, "missing_ok": False, "force": True, "conditions": ["Failed"], "max_jobs": 21,
    "confirm_after": 22.0,
}  # fmt: skip


def test_call_is_an_operator_for_type_checkers() -> None:
    """A metaclass that returns something else hides the constructor. mypy checks this test."""
    with DAG("dag"):
        assert_type(PyTorchJobOperator(task_id="train", image="i:1"), PyTorchJobOperator)


def values_of(cls: type[Any]) -> dict[str, Any]:
    """A value for each parameter of the signature."""
    names = (name for name in inspect.signature(cls).parameters if name != "kwargs")
    return {name: VALUES.get(name, f"{{{{ params.{name} }}}}") for name in names}


def assert_has(operator: Any, values: dict[str, Any]) -> None:
    """Each value is an attribute. `dry_run` is a method of every operator."""
    dry_run = "dry_run_only" if isinstance(operator, ReapTrainingJobsOperator) else "server_dry_run"
    assert {name: getattr(operator, dry_run if name == "dry_run" else name) for name in values} == values


@pytest.mark.parametrize("cls", CLASSES)
def test_default_args_of_a_dag_reach_every_parameter(cls: type[Any]) -> None:
    with DAG("dag", default_args={**values_of(cls), "retries": 7}):
        operator = cls(task_id="task")
    assert_has(operator, values_of(cls) | {"retries": 7})


@pytest.mark.parametrize("cls", CLASSES)
def test_default_args_of_a_task_group_reach_every_parameter(cls: type[Any]) -> None:
    values: Any = values_of(cls)
    with DAG("dag", default_args={"retries": 6}), TaskGroup("group", default_args=values):
        operator = cls(task_id="task")
    assert_has(operator, values | {"retries": 6})


@pytest.mark.parametrize("cls", CLASSES)
def test_every_parameter_can_be_partial(cls: type[Any]) -> None:
    values = values_of(cls)
    name, value = values.popitem()
    with DAG("dag", default_args={"retries": 7}):
        mapped = cls.partial(task_id="task", **values).expand(**{name: [value]})
        assert_has(mapped.unmap({name: value}), values | {name: value, "retries": 7})


@pytest.mark.parametrize("cls", CLASSES)
def test_every_parameter_can_be_mapped(cls: type[Any]) -> None:
    values = values_of(cls)
    with DAG("dag"):
        mapped = cls.partial(task_id="task").expand(**{name: [value] for name, value in values.items()})
        assert_has(mapped.unmap(values), values)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_parameter_can_be_mapped_by_expand_kwargs(cls: type[Any]) -> None:
    values = values_of(cls)
    with DAG("dag", default_args={"job_name": "another"}):
        mapped = cls.partial(task_id="task").expand_kwargs([values])
        assert_has(mapped.unmap(values), values)


MISSPELT = {"kubernetes_con_id": "other"}
REFUSED: dict[str, Callable[[type[Any]], object]] = {
    "in a call": lambda cls: cls(task_id="task", **MISSPELT),
    "by partial": lambda cls: cls.partial(task_id="task", **MISSPELT),
    "by expand": lambda cls: cls.partial(task_id="task").expand(**{name: [value] for name, value in MISSPELT.items()}),
    "by expand_kwargs": lambda cls: cls.partial(task_id="task").expand_kwargs([MISSPELT]).unmap(MISSPELT),
}


@pytest.mark.filterwarnings("ignore:Task 'task' was never mapped")
@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("how", REFUSED)
def test_misspelt_parameter_is_refused(how: str, cls: type[Any]) -> None:
    with (
        DAG("dag", default_args={"job_name": "job", "workers": 1}),
        pytest.raises(TypeError, match="kubernetes_con_id"),
    ):
        REFUSED[how](cls)
