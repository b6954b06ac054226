"""The reaper, without a schedule: a run that no test expects could release a job before the test has looked at it."""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator

with DAG("chaos_reaper", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]):
    ReapTrainingJobsOperator(task_id="reap", dry_run=False, confirm_after=2)
