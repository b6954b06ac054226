"""Maintenance: release what is left over where nobody was left to act, such as a worker lost with its node.

It only says what it would do until `dry_run=False`. Needs `[ktrain] deployment_id`.
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
