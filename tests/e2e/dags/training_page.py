"""The DAG of `test_training_page.py`: a training that runs until the test lets it go."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

WAIT = """go="/tmp/$HOSTNAME.go"; until [ -e $go ]; do sleep 0.2; done; rm $go"""  # see tests/e2e/kube.py

with DAG("reports", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC")):
    PyTorchJobOperator(
        task_id="train", image=os.environ["TEST_IMAGE"], command=["sh", "-c", f"trap 'exit 143' TERM; {WAIT}"], gpus=1
    )
