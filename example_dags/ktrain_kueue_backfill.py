"""A backfill of trainings that share the quota of a Kueue queue with everybody else on the cluster.

    airflow dags unpause ktrain_kueue_backfill
    airflow backfill create --dag-id ktrain_kueue_backfill --from-date 2026-01-01 --to-date 2026-01-20 \\
        --max-active-runs 20

All jobs are submitted at once, and their tasks are deferred. Kueue admits the jobs when there is quota, those of a
higher priority first. A job that is preempted is queued again and uses no retry. See docs/how-to/queues.md.
"""

import datetime
import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

with DAG(
    "ktrain_kueue_backfill",
    schedule="@daily",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    doc_md=__doc__,
    tags=["ktrain"],
):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("KTRAIN_DEMO_IMAGE", "pytorch-demo:latest"),
        command=["python3", "train.py"],
        env={"FROM": "{{ data_interval_start }}", "UNTIL": "{{ data_interval_end }}"},
        workers=1,
        gpus=1,
        queue_name=os.environ.get("KTRAIN_QUEUE", "team-a"),
        workload_priority_class=os.environ.get("KTRAIN_QUEUE_PRIORITY") or None,
        queue_timeout=datetime.timedelta(days=2),
    )
