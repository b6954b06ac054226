"""A hyper-parameter sweep by dynamic task mapping: one job per set, then the best result."""

import os

import pendulum
from airflow.sdk import DAG, task

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")

with DAG(
    "ktrain_sweep",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    doc_md=__doc__,
    tags=["ktrain"],
):
    trained = PyTorchJobOperator.partial(
        task_id="train",
        namespace="default",
        image=IMAGE,
        command=["python3", "train.py"],
        workers=0,
        max_active_tis_per_dagrun=2,
    ).expand(args=[["--epochs", "1"], ["--epochs", "4"]])

    @task
    def best(results: list[dict]) -> dict:
        return min(results, key=lambda result: result["loss"])

    best(trained.output)
