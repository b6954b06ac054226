"""DAG of tests/e2e/test_trackers.py: it runs the program of examples/trackers, as docs/how-to/trackers.md shows."""

import datetime
import os
import pathlib

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"

with DAG("reports_to_mlflow", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC")):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("TEST_IMAGE", "scratch"),
        code=str(EXAMPLES / "trackers"),
        command=["python3", "train_mlflow.py", "--fail-at-step", "5"],
        workers=1,
        env={
            "MLFLOW_TRACKING_URI": "{{ dag_run.conf['mlflow'] }}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "AIRFLOW_TASK_URL": "{{ ti.log_url.split('?')[0] }}",
        },
        retries=1,
        retry_delay=datetime.timedelta(seconds=1),
    )
