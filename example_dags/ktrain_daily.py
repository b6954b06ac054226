"""A daily training with its own checkpoints; a retry resumes from the last checkpoint."""

import os
import tempfile
from datetime import timedelta

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.exceptions import TrainingUserCodeError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.volumes import ClaimVolume, HostPath

try:
    from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule
except ImportError:  # Airflow below 3.3
    RULES = {}
else:  # don't retry an error in the training program
    RULES = {"retry_policy": ExceptionRetryPolicy(rules=[RetryRule(TrainingUserCodeError, action=RetryAction.FAIL)])}

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")
CLAIM = os.environ.get("KTRAIN_CHECKPOINTS_CLAIM")  # a ReadWriteMany PersistentVolumeClaim
HOST = os.environ.get("KTRAIN_CHECKPOINTS", f"{tempfile.gettempdir()}/ktrain-checkpoints")  # for a single node

with DAG(
    "ktrain_daily",
    schedule="@daily",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["ktrain"],
):
    PyTorchJobOperator(
        task_id="train",
        namespace="default",
        image=IMAGE,
        command=["python3", "train.py"],
        args=["--epochs", "4"],
        env={"DATA_DATE": "{{ dag_run.run_after | ds }}"},  # a run that is triggered may have no logical date
        workers=1,
        gpus=1,
        checkpoint_dir="/checkpoints",
        volumes=[
            ClaimVolume(CLAIM, "/checkpoints") if CLAIM else HostPath(HOST, "/checkpoints", type="DirectoryOrCreate")
        ],
        execution_timeout=timedelta(hours=6),
        retries=2,
        **RULES,
    )
