"""The training-operator walk-through: distributed PyTorch on CPUs, one Master and one Worker. See
docs/guides-as-dags.md."""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "ktrain_torchrun_cpu",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    doc_md=__doc__,
    tags=["ktrain", "seeds"],
):
    PyTorchJobOperator(task_id="train", manifest="manifests/torchrun_cpu.yaml", namespace="default")
