"""The DAG of tests/e2e/test_openlineage.py: a training that succeeds and one that fails, both deferred."""

import os
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

JOB: dict[str, Any] = {"image": os.environ.get("TEST_IMAGE", "scratch"), "env": {"API_KEY": "swordfish"}}
RESULT = '{"model_uri": "s3://models/lineage"}'

with DAG("lineage", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC")):
    PyTorchJobOperator(
        task_id="train", **JOB, workers=1, code="training",
        command=["sh", "-c", f"sleep 5; cat greeting.txt; echo 'KTRAIN_RESULT {RESULT}'"],
    )  # fmt: skip
    PyTorchJobOperator(task_id="fails", **JOB, command=["sh", "-c", "sleep 5; echo broken; exit 3"])
