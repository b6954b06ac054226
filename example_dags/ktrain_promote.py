"""Evaluate the model of the event, and promote it if it is as good as the promoted one and a person approves it.

The request is in Airflow's UI under "Required Actions".
"""

import os
import tempfile

import pendulum
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Asset, task

from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.volumes import ClaimVolume, HostPath

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")
CLAIM = os.environ.get("KTRAIN_MODELS_CLAIM")  # a ReadWriteMany PersistentVolumeClaim
HOST = os.environ.get("KTRAIN_MODELS", f"{tempfile.gettempdir()}/ktrain-models")  # for a single node
MODELS = ClaimVolume(CLAIM, "/models") if CLAIM else HostPath(HOST, "/models", type="DirectoryOrCreate")

model = Asset("ktrain_example_model")  # of ktrain_retrain.py
promoted = Asset("ktrain_example_promoted_model")

with DAG(
    "ktrain_promote",
    schedule=[model],
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    max_active_runs=1,  # the next model is compared after this one has been approved or rejected
    doc_md=__doc__,
    tags=["ktrain"],
):

    @task(inlets=[promoted])
    def production(inlet_events: dict) -> float:
        """The loss of the promoted model, or the highest loss of a first one."""
        earlier = inlet_events[promoted]
        return earlier[-1].extra["loss"] if earlier else 0.5

    evaluate = PyTorchJobOperator(
        task_id="evaluate",
        namespace="default",
        image=IMAGE,
        command=["python3", "evaluate.py"],
        args=["{{ (triggering_asset_events.values() | first | last).extra['model_uri'] }}"],
        volumes=[MODELS],
        require={"loss": "<= {{ ti.xcom_pull(task_ids='production') }}"},
    )

    approve = ApprovalOperator(
        task_id="approve",
        subject="Promote {{ ti.xcom_pull(task_ids='evaluate')['model_uri'] }}?",
        body="Loss: {{ ti.xcom_pull('evaluate')['loss'] }}. In production: {{ ti.xcom_pull('production') }}.",
    )

    @task(outlets=[promoted])
    def promote(new: dict, outlet_events: dict) -> None:
        """Replace this by what makes the model the one that is served."""
        outlet_events[promoted].extra = new

    production() >> evaluate >> approve >> promote(evaluate.output)
