"""DAGs with retries that come later: the running task of `chaos.py`, and a deferred one for tests/executors."""

import datetime
import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

COUNT = """
trap 'exit 143' TERM
i=0
while [ $i -lt {{ dag_run.conf.get("seconds", 20) }} ]; do echo line $i; i=$((i+1)); sleep 1; done
[ $RANK != 0 ] || sleep 4
"""

for name, delay, deferrable in (
    ("chaos_retry_in_a_minute", 60, False),
    ("chaos_retry_in_an_hour", 3600, False),
    ("chaos_deferred_retry_in_a_minute", 60, True),
):
    with DAG(name, schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]):
        PyTorchJobOperator(
            task_id="train",
            image=os.environ.get("TEST_IMAGE", "scratch"),
            command=["sh", "-c", COUNT],
            workers=1,
            gpus=1,
            deferrable=deferrable,
            retries=1,
            retry_delay=datetime.timedelta(seconds=delay),
        )
