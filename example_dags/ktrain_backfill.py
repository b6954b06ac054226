"""A backfill of trainings that never requests more GPUs than a pool has.

    airflow pools set gpus 8 "GPUs of the training cluster" --include-deferred
    airflow dags unpause ktrain_backfill
    airflow backfill create --dag-id ktrain_backfill --from-date 2026-01-01 --to-date 2026-01-20 --max-active-runs 20

Airflow's max_active_tasks does not count deferred tasks; a pool with include_deferred does, and each task takes as
many slots as its job takes GPUs.
"""

import os
import pathlib

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.manifests import gpus_of, load
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

MANIFEST = load(pathlib.Path(__file__).parent / "manifests" / "pytorch_interval.yaml")

with DAG(
    "ktrain_backfill",
    schedule="@daily",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    doc_md=__doc__,
    tags=["ktrain"],
):
    PyTorchJobOperator(
        task_id="train",
        manifest=MANIFEST,
        namespace="default",
        image=os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest"),
        env={"FROM": "{{ data_interval_start }}", "UNTIL": "{{ data_interval_end }}"},
        pool="gpus",
        pool_slots=gpus_of(MANIFEST),
    )
