"""Retrain when the data asset is updated; publish the model asset only if the loss is low enough."""

import os

import pendulum
from airflow.sdk import DAG, Asset, task

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")
data = Asset("ktrain_example_data")
model = Asset("ktrain_example_model")

with DAG(
    "ktrain_retrain",
    schedule=[data],
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    params={"worst_loss": 0.4},
    doc_md=__doc__,
    tags=["ktrain"],
):
    train = PyTorchJobOperator(
        task_id="train",
        namespace="default",
        image=IMAGE,
        command=["python3", "train.py"],
        args=["--epochs", "5"],
        workers=1,
    )

    @task.short_circuit
    def good_enough(result: dict, params: dict) -> bool:
        """What rank 0 wrote behind KTRAIN_RESULT is the training's XCom."""
        return result["loss"] <= params["worst_loss"]

    @task(outlets=[model])
    def publish(result: dict) -> float:
        return result["loss"]

    good_enough(train.output) >> publish(train.output)
