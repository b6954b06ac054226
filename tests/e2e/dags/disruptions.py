"""DAGs of `test_disruptions.py`: programs that save and exit with 0 on SIGTERM, and a DAG that their asset starts."""

import datetime
import os
from typing import Any

import pendulum
from airflow.sdk import DAG, Asset, task

from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

START = pendulum.datetime(2026, 1, 1, tz="UTC")
IMAGE = os.environ.get("TEST_IMAGE", "scratch")
# each step is a checkpoint; rank 0 of a TrainJob and its other rank have one each
SAVES = """
trap 'echo saved; exit 0' TERM
mkdir -p $KTRAIN_CHECKPOINT_DIR
saved=$KTRAIN_CHECKPOINT_DIR/rank-${PET_NODE_RANK:-0}
i=$(cat $saved 2>/dev/null || echo 0)
echo starts at $i
while [ $i -lt 30 ]; do i=$((i+1)); echo $i > $saved; echo step $i; sleep 1; done
echo complete
"""
SLEEPS = "trap 'exit 0' TERM; sleep 600 & wait"


def replica(program: str) -> dict[str, Any]:
    container = {"name": "pytorch", "image": IMAGE, "command": ["sh", "-c", program]}
    return {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}


PYTORCH = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "spec": {"pytorchReplicaSpecs": {"Master": replica(SAVES)}},
}
MPI = {
    "apiVersion": "kubeflow.org/v2beta1",
    "kind": "MPIJob",
    "spec": {
        "runPolicy": {"cleanPodPolicy": "Running"},
        "mpiReplicaSpecs": {"Launcher": replica(SAVES), "Worker": replica(SLEEPS)},
    },
}


def training(kind: str, outlets: list[Asset]) -> None:
    common: dict[str, Any] = {
        "task_id": "train",
        "kubernetes_conn_id": "disruptions",
        "gpus": 1,
        "outlets": outlets,
        "retries": 1,
        "retry_delay": datetime.timedelta(seconds=1),
        "checkpoint_dir": os.environ.get("TEST_CHECKPOINTS", "/tmp"),
    }
    if kind == "pytorchjob":
        PyTorchJobOperator(manifest=PYTORCH, **common)
    elif kind == "mpijob":
        MPIJobOperator(manifest=MPI, deferrable=False, **common)
    else:
        TrainJobOperator(runtime="torch-distributed", nodes=2, image=IMAGE, command=["sh", "-c", SAVES], **common)


for kind in ("pytorchjob", "mpijob", "trainjob"):
    complete = Asset(f"e2e_complete_{kind}")
    with DAG(f"disrupted_{kind}", schedule=None, start_date=START):
        training(kind, [complete])
    with DAG(f"disrupted_{kind}_consumer", schedule=[complete], start_date=START):

        @task
        def receive() -> None: ...

        receive()

with DAG("disrupted_pytorchjob_never", schedule=None, start_date=START):
    PyTorchJobOperator(
        task_id="train",
        kubernetes_conn_id="disruptions",
        image=IMAGE,
        command=["sh", "-c", SAVES],
        gpus=1,
        retries=1,
        retry_delay=datetime.timedelta(seconds=1),
        checkpoint_dir=os.environ.get("TEST_CHECKPOINTS", "/tmp"),
        avoid_failed_nodes=True,
    )
