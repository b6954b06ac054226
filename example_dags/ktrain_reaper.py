"""The reaper: release jobs that their tasks couldn't release, for example because a worker was lost with its node.

It needs `[ktrain] deployment_id`. With `dry_run=True`, the default, it only logs what it would release.
"""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator

with DAG(
    "ktrain_reaper",
    schedule="*/15 * * * *",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,
    doc_md=__doc__,
    tags=["ktrain"],
):
    ReapTrainingJobsOperator(
        task_id="reap",
        dry_run=os.environ.get("KTRAIN_REAPER_DRY_RUN", "true") != "false",
        confirm_after=float(os.environ.get("KTRAIN_REAPER_CONFIRM_AFTER", "300")),
    )
