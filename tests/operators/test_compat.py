"""Canaries: the Airflow internals that `compat` relies on are there, with the names and values it uses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from airflow.sdk import BaseOperator, BaseSensorOperator
from airflow.sdk.bases import operator
from airflow.sdk.exceptions import AirflowException
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.xcom import XCom
from airflow.sdk.observability.stats import Stats

from airflow_provider_ktrain import compat


def accepts(function: Any, *names: str) -> bool:
    return set(names) <= set(inspect.signature(function).parameters)


def test_trigger_failure_constants_match_airflow() -> None:
    assert operator.TRIGGER_FAIL_REPR == compat.TRIGGER_FAILED
    assert operator.TriggerFailureReason.TRIGGER_TIMEOUT.value == compat.DEFERRAL_TIMEOUT


def test_context_keys_include_common_names() -> None:
    assert {"ti", "ds", "params", "logical_date"} <= compat.context_keys()


def test_task_states_can_be_requested() -> None:
    assert accepts(task_runner.RuntimeTaskInstance.get_task_states, "dag_id", "task_ids", "run_ids", "map_index")


def test_supervisor_connection_is_declared() -> None:
    assert "SUPERVISOR_COMMS" in task_runner.__annotations__ or hasattr(task_runner, "SUPERVISOR_COMMS")


def test_xcom_of_another_process_can_be_read() -> None:
    assert accepts(XCom.get_one, "key", "dag_id", "task_id", "run_id", "map_index")


def test_gauges_have_tags() -> None:
    assert accepts(Stats.gauge, "tags")


def test_sensors_resume_as_operators_without_soft_fail() -> None:
    """Airflow's own method of the sensor would skip the task."""

    class Fails(BaseSensorOperator):
        def execute_complete(self, context: Any) -> None:
            raise AirflowException("from the sensor")

    assert "resume_execution" in vars(BaseSensorOperator)
    assert BaseSensorOperator.__mro__[1] is BaseOperator
    with pytest.raises(AirflowException, match=r"^from the sensor$"):
        compat.resume_without_sensor(Fails(task_id="wait", soft_fail=True), "execute_complete", {}, {})
