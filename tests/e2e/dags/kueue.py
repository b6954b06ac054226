"""DAGs of `test_kueue.py`: a training in a queue, and job control. The run sets the namespace of the replay."""

import datetime
import os
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.job_control import ResumeTrainingJobOperator, SuspendTrainingJobOperator
from airflow_provider_ktrain.operators.training import PyTorchJobOperator, TrainJobOperator

START = pendulum.datetime(2026, 1, 1, tz="UTC")
PLACE: dict[str, Any] = {"kubernetes_conn_id": "kueue", "namespace": "{{ dag_run.conf['namespace'] }}"}
JOB: dict[str, Any] = {
    **PLACE,
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
TRAINS = "trap 'exit 143' TERM; echo trains; sleep 600 & wait"
SHORT = "echo done"

with DAG("kueue_continues", schedule=None, start_date=START):
    PyTorchJobOperator(
        **JOB,
        command=["sh", "-c", CONTINUES],
        checkpoint_dir=os.environ.get("TEST_CHECKPOINTS", "/tmp"),
    )

with DAG("kueue_trainjob", schedule=None, start_date=START):
    TrainJobOperator(**JOB, runtime="torch-distributed", nodes=1, command=["sh", "-c", TRAINS])

with DAG("kueue_retried", schedule=None, start_date=START):
    PyTorchJobOperator(**JOB, command=["sh", "-c", SHORT], retries=1)

for action, operator in (("suspend", SuspendTrainingJobOperator), ("resume", ResumeTrainingJobOperator)):
    with DAG(f"kueue_{action}", schedule=None, start_date=START):
        operator(**PLACE, task_id=action, job_name="{{ dag_run.conf['job'] }}")
