"""DAGs of tests/e2e/test_code.py: their program is in the directory beside this file."""

import datetime
import os
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

JOB: dict[str, Any] = {
    "task_id": "train",
    "image": os.environ.get("TEST_IMAGE", "scratch"),
    "command": ["sh", "train.sh"],
    "code": "training",
}
MPIRUN = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "sh", "train.sh"]


def a_dag(dag_id: str) -> DAG:
    return DAG(dag_id, schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"))


with a_dag("sends_code_trainjob"):
    TrainJobOperator(**JOB, runtime="torch-distributed", nodes=2)
with a_dag("sends_code_mpijob"):
    MPIJobOperator(**{**JOB, "command": MPIRUN}, workers=2)
with a_dag("sends_code_for_long"):
    PyTorchJobOperator(
        **JOB, args=["600"], gpus=1, deferrable=False, retries=1, retry_delay=datetime.timedelta(seconds=1)
    )
with a_dag("sends_given_code"):
    PyTorchJobOperator(**{**JOB, "code": "{{ dag_run.conf['code'] }}"}, retries=1)
