"""Signatures of the operators and sensors, as editors and Airflow's `default_args` use them."""

from __future__ import annotations

import inspect
from typing import Any, assert_type

import pytest
from airflow.sdk import DAG

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


@pytest.mark.parametrize("cls", CLASSES)
def test_default_args_reach_every_parameter_of_the_signature(cls: type[Any]) -> None:
    names = [name for name in inspect.signature(cls).parameters if name != "kwargs"]
    values = {name: VALUES.get(name, f"{{{{ params.{name} }}}}") for name in names}
    with DAG("dag", default_args={**values, "retries": 7}):
        operator = cls(task_id="task")
    # `dry_run` is a method of every operator
    attributes = {name: name for name in names} | {"dry_run": "server_dry_run"}
    if cls is ReapTrainingJobsOperator:
        attributes["dry_run"] = "dry_run_only"
    assert {name: getattr(operator, attributes[name]) for name in names} == values
    assert operator.retries == 7
