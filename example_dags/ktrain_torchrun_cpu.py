"""Distributed PyTorch on CPUs with one Master and one Worker.

This is the training-operator guide of docs/guides-as-dags.md.
"""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "ktrain_torchrun_cpu",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    doc_md=__doc__,
    tags=["ktrain", "guides"],
):
    PyTorchJobOperator(task_id="train", manifest="manifests/torchrun_cpu.yaml", namespace="default")
