"""Retrain when the data asset is updated. `ktrain_promote.py` continues with the event of the model asset.

A model that isn't good enough sends no event: the task fails.
"""

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

data = Asset("ktrain_example_data")
model = Asset("ktrain_example_model")

with DAG("ktrain_retrain", schedule=[data], start_date=START, doc_md=__doc__, tags=["ktrain"]):
    PyTorchJobOperator(
        task_id="train",
        namespace="default",
        image=IMAGE,
        command=["python3", "train.py"],
        args=["--epochs", "5"],
        workers=1,
        checkpoint_dir="/models",  # each run has its own directory in it, and its result names the model there
        volumes=[MODELS],
        require={"loss": "<= 0.5"},
        outlets=[model],
    )
