"""A TrainJob of Kubeflow Trainer 2: torchrun on two nodes. `make demo KIND=trainjob` runs it."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import TrainJobOperator

with DAG(
    "ktrain_trainjob",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    default_args={"retries": 1},
    params={
        "image": os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest"),
        "epochs": 5,
        "epoch_seconds": 0.3,
        "gpus": int(os.environ.get("KTRAIN_DEMO_GPUS", "1")),
    },
    doc_md=__doc__,
    tags=["ktrain"],
):
    TrainJobOperator(
        task_id="train",
        namespace="default",
        runtime="torch-distributed",
        image="{{ params.image }}",
        command=["torchrun", "train.py"],
        args=["--epochs", "{{ params.epochs }}", "--epoch-seconds", "{{ params.epoch_seconds }}"],
        nodes=2,
        nproc_per_node=1,
        gpus="{{ params.gpus }}",
    )
