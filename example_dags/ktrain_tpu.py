"""Train on 16 TPU chips. Messages, usage and metrics count TPUs: see "Accelerators" in docs/reference/configuration.md.

The pool `tpus` limits how many chips all DAGs use together: `airflow pools set tpus 64 "TPU chips"`.
"""

from pathlib import Path

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.manifests import gpus_of
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

MANIFEST = Path(__file__).parent / "manifests" / "tpu.yaml"

with DAG(
    "ktrain_tpu",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    doc_md=__doc__,
    tags=["ktrain"],
):
    PyTorchJobOperator(
        task_id="train",
        manifest=str(MANIFEST),
        pool="tpus",
        pool_slots=gpus_of(MANIFEST),
    )
