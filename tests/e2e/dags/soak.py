"""DAGs of `make soak`: many short trainings of each kind as mapped tasks, which defer or are followed in workers."""

import datetime
import os
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

TRAININGS = int(os.environ.get("SOAK_TRAININGS", "2"))  # of each DAG
SECONDS = (4, 12, 20, 28)  # durations of the trainings, used in turn
IMAGE = os.environ.get("TEST_IMAGE", "scratch")
TRAIN = """
trap 'exit 143' TERM
i=0
while [ $i -lt $SECONDS_TO_TRAIN ]; do echo line $i; i=$((i+1)); sleep 1; done
"""


def replica(program: str) -> dict[str, Any]:
    container = {"name": "mpi", "image": IMAGE, "command": ["sh", "-c", program]}
    return {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}


MPI = {
    "apiVersion": "kubeflow.org/v2beta1",
    "kind": "MPIJob",
    "spec": {
        "runPolicy": {"cleanPodPolicy": "Running"},
        "mpiReplicaSpecs": {
            "Launcher": replica(TRAIN),
            "Worker": replica("trap 'exit 143' TERM; sleep 600 & wait"),
        },
    },
}
OPERATORS: dict[str, Any] = {
    "pytorchjobs": lambda **task: PyTorchJobOperator.partial(image=IMAGE, command=["sh", "-c", TRAIN], **task),
    "mpijobs": lambda **task: MPIJobOperator.partial(manifest=MPI, **task),
    "trainjobs": lambda **task: TrainJobOperator.partial(
        runtime="torch-distributed", image=IMAGE, command=["sh", "-c", TRAIN], **task
    ),
}

for plural, operator in OPERATORS.items():
    for host in ("deferred", "worker"):
        with DAG(
            f"soak_{plural}_{host}",
            schedule=None,
            start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
            max_active_tasks=TRAININGS,
        ):
            operator(
                task_id="train",
                gpus=1,
                deferrable=host == "deferred",
                retries=30,
                retry_delay=datetime.timedelta(seconds=1),
            ).expand(env=[{"SECONDS_TO_TRAIN": str(SECONDS[i % len(SECONDS)])} for i in range(TRAININGS)])
