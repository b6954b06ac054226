"""The demo: a distributed training as one Airflow task. `make demo` runs it."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "ktrain_demo",
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
    PyTorchJobOperator(task_id="train", manifest="manifests/pytorch_demo.yaml", namespace="default", deferrable=True)
