"""DAGs of `test_kueue.py`: trainings in a queue."""

import datetime
import os
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

START = pendulum.datetime(2026, 1, 1, tz="UTC")
JOB: dict[str, Any] = {
    "kubernetes_conn_id": "kueue",
    "task_id": "train",
    "image": os.environ.get("TEST_IMAGE", "scratch"),
    "gpus": 1,
    "queue_name": "queue",
    "retry_delay": datetime.timedelta(seconds=1),
}
# The first run saves a checkpoint and trains until it is evicted. The run after that finds the checkpoint and succeeds.
CONTINUES = """
trap 'exit 143' TERM
mkdir -p $KTRAIN_CHECKPOINT_DIR
if [ -e $KTRAIN_CHECKPOINT_DIR/saved ]; then echo continues in attempt $KTRAIN_ATTEMPT; exit; fi
touch $KTRAIN_CHECKPOINT_DIR/saved
echo saved
sleep 600 & wait
"""

with DAG("kueue_continues", schedule=None, start_date=START):
    PyTorchJobOperator(
        **JOB,
        command=["sh", "-c", CONTINUES],
        checkpoint_dir=os.environ.get("TEST_CHECKPOINTS", "/tmp"),
    )

with DAG("kueue_retried", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, command=["sh", "-c", "echo done"], retries=1)
