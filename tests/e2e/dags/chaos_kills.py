"""DAGs of `test_chaos_kills.py`, beside those of `chaos.py`."""

import datetime
import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "chaos_worker_retries_late", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]
):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("TEST_IMAGE", "scratch"),
        command=["sh", "-c", "trap 'exit 143' TERM; echo started; sleep 600 & wait"],
        workers=1,
        gpus=1,
        deferrable=False,
        retries=1,
        retry_delay=datetime.timedelta(hours=1),
    )
