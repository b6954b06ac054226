"""DAGs of tests/e2e/test_chaos_text.py: text and numbers that a database rejects or changes."""

import datetime
import os
from typing import Any

import pendulum
from airflow.sdk import DAG, task

from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.sensors.training import PyTorchJobSensor

START = pendulum.datetime(2026, 1, 1, tz="UTC")
RESULT = r'{"loss": 1e20, "diverged": NaN, "note": "a\u0000b\ud800", "accuracy": 0.97}'

with DAG("chaos_result", schedule=None, start_date=START, tags=["chaos"]):
    train = PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("TEST_IMAGE", "scratch"),
        command=["sh", "-c", f"sleep 6; printf '%s\\n' 'KTRAIN_RESULT {RESULT}'"],
        multiple_outputs=True,
    )

    @task
    def report(result: dict[str, object], accuracy: float) -> list[object]:
        return [result["loss"], result["diverged"], accuracy]

    result: Any = train.output
    report(result, result["accuracy"])

with DAG("chaos_error_page", schedule=None, start_date=START, tags=["chaos"]):
    PyTorchJobSensor(
        task_id="train", job_name="absent", namespace="default", kubernetes_conn_id="proxied",
        timeout=datetime.timedelta(minutes=10).total_seconds(),
    )  # fmt: skip
