"""DAG of tests/e2e/test_checkpoints.py: the program of examples/checkpoints keeps its checkpoints in S3."""

import datetime
import os
import pathlib

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"

with DAG("keeps_checkpoints_in_s3", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC")):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("TEST_IMAGE", "scratch"),
        code=str(EXAMPLES / "checkpoints"),
        command=["python3", "train_s3.py", "--fail-at-step", "10"],
        gpus=1,
        checkpoint_dir="s3://{{ dag_run.conf['connection'] }}@{{ dag_run.conf['bucket'] }}/runs",
        env={
            "AWS_ENDPOINT_URL": "{{ dag_run.conf['endpoint'] }}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        },
        retries=1,
        retry_delay=datetime.timedelta(seconds=1),
    )
