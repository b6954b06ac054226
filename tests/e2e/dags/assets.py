"""DAGs of the end-to-end tests of asset events: trainings with outlets, and DAGs that their events start."""

import os
from typing import Any

import pendulum
from airflow.sdk import DAG, Asset, AssetAlias, task

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

START = pendulum.datetime(2026, 1, 1, tz="UTC")
TRAINED, ALIAS, REQUIRED = Asset("e2e_trained"), AssetAlias("e2e_model"), Asset("e2e_required")
# the URI is another one in each run, as that of a new model is
PROGRAM = """
echo 'KTRAIN_METRIC {"step": 1, "loss": 0.5}'
echo 'KTRAIN_RESULT {"loss": 0.5, "model_uri": "s3://e2e/{{ run_id }}", "password": "hunter2"}'
"""


with DAG("assets_deferred", schedule=None, start_date=START):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ["TEST_IMAGE"],
        command=["sh", "-c", f"{PROGRAM}sleep 20"],  # the worker follows for 10 s
        gpus=1,
        outlets=[TRAINED, ALIAS],
    )

with DAG("assets_consumer", schedule=[ALIAS], start_date=START):

    @task
    def receive(triggering_asset_events: Any = None) -> list[Any]:
        return [[event.asset.uri, event.extra] for event in triggering_asset_events[ALIAS]]

    receive()

with DAG("new_data", schedule=None, start_date=START):

    @task(outlets=[Asset("ktrain_example_data")])
    def arrives() -> None: ...

    arrives()

with DAG("required", schedule=None, start_date=START):
    for name, accuracy in (("good", 0.95), ("bad", 0.87)):
        for host, seconds in (("worker", 0), ("deferred", 12)):  # the worker follows for 10 s
            line = f'KTRAIN_RESULT {{"val_accuracy": {accuracy}, "task": "{name}_{host}"}}'
            PyTorchJobOperator(
                task_id=f"{name}_{host}",
                image=os.environ["TEST_IMAGE"],
                command=["sh", "-c", f"echo '{line}'; sleep {seconds}"],
                deferrable=host == "deferred",
                require={"val_accuracy": ">= 0.9"},
                retries=1,
                outlets=[REQUIRED],
            )

with DAG("required_consumer", schedule=[REQUIRED], start_date=START):

    @task
    def receive(triggering_asset_events: Any = None) -> list[str]:
        return [event.extra["result"]["task"] for event in triggering_asset_events[REQUIRED]]

    receive()
