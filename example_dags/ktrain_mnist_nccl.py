"""MNIST with NCCL: one Master and one Worker with a GPU each.

Without GPUs, trigger it with {"backend": "gloo"}. This is the PyTorch-Operator guide of docs/guides-as-dags.md.
"""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "ktrain_mnist_nccl",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    params={"image": "pytorch-mnist", "backend": "nccl"},
    doc_md=__doc__,
    tags=["ktrain", "guides"],
):
    PyTorchJobOperator(
        task_id="train",
        manifest="manifests/pytorch_job_mnist_nccl.yaml",
        namespace="default",
        args=["--backend", "{{ params.backend }}"],
    )
