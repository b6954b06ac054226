"""Evaluate the model that the event of the model asset names. `ktrain_promote.py` continues with the result."""

import os
import tempfile

import pendulum
from airflow.sdk import DAG, Asset

from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.volumes import ClaimVolume, HostPath

IMAGE = os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest")
CLAIM = os.environ.get("KTRAIN_MODELS_CLAIM")  # a ReadWriteMany PersistentVolumeClaim
HOST = os.environ.get("KTRAIN_MODELS", f"{tempfile.gettempdir()}/ktrain-models")  # for a single node
MODELS = ClaimVolume(CLAIM, "/models") if CLAIM else HostPath(HOST, "/models", type="DirectoryOrCreate")
START = pendulum.datetime(2026, 1, 1, tz="UTC")

model = Asset("ktrain_example_model")  # of ktrain_retrain.py
evaluation = Asset("ktrain_example_evaluation")

with DAG("ktrain_evaluate", schedule=[model], start_date=START, doc_md=__doc__, tags=["ktrain"]):
    PyTorchJobOperator(
        task_id="evaluate",
        namespace="default",
        image=IMAGE,
        command=["python3", "evaluate.py"],
        args=["{{ (triggering_asset_events.values() | first | last).extra['model_uri'] }}"],
        volumes=[MODELS],
        outlets=[evaluation],
    )
