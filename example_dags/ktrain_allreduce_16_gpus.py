"""Sixteen pods with one GPU each on selected nodes, with NCCL and RDMA.

This is the practitioner's note of docs/guides-as-dags.md.
"""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "ktrain_allreduce_16_gpus",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    params={
        "hosts": ["gpu-node-1", "gpu-node-2"],
        "mnt": "/mnt",
        "nccl": "/opt/nccl-2.4.8-1/lib/libnccl.so",
    },
    render_template_as_native_obj=True,  # so that the parameter hosts stays a list
    doc_md=__doc__,
    tags=["ktrain", "guides"],
):
    PyTorchJobOperator(
        task_id="train",
        manifest="manifests/main_allreduce.yaml",
        namespace="default",
        gpus=1,
        hosts="{{ params.hosts }}",
    )
