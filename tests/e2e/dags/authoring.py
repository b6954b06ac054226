"""DAGs of the end-to-end tests of authoring: checkpoints across tries, a backfill in a pool."""

import datetime
import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

WAIT = """trap 'exit 143' TERM; go="/tmp/$HOSTNAME.go"; until [ -e $go ]; do sleep 0.2; done; rm $go"""  # see kube.py
START = pendulum.datetime(2026, 1, 1, tz="UTC")

with DAG("resumes", schedule=None, start_date=START):
    PyTorchJobOperator(
        task_id="train",
        image="pytorch-demo:latest",
        command=["python3", "train.py"],
        args=["--epochs", "4", "--fail-at-epoch", "3"],
        checkpoint_dir=os.environ["TEST_CHECKPOINTS"],
        retries=1,
        retry_delay=datetime.timedelta(seconds=1),
    )

with DAG("intervals", schedule="@daily", start_date=START, catchup=False):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ["TEST_IMAGE"],
        # the first two intervals train until the test lets them go, so they are deferred
        command=["sh", "-c", f"{{% if logical_date.day <= 2 %}}{WAIT}{{% endif %}}\necho trained {{{{ ds }}}}"],
        gpus=2,
        pool="four_gpus",
        pool_slots=2,
    )
