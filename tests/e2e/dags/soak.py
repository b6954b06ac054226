"""DAGs of `make soak`: many short trainings as mapped tasks. The tasks of one DAG defer, those of the other don't."""

import datetime
import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

TRAININGS = int(os.environ.get("SOAK_TRAININGS", "2"))  # of each DAG
SECONDS = (4, 12, 20, 28)  # durations of the trainings, used in turn

for dag_id, deferrable in (("soak_deferred", True), ("soak_worker", False)):
    with DAG(dag_id, schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), max_active_tasks=TRAININGS):
        PyTorchJobOperator.partial(
            task_id="train",
            image=os.environ.get("TEST_IMAGE", "scratch"),
            command=["sh", "-c", "trap 'exit 143' TERM; i=0; "
                     "while [ $i -lt $SECONDS_TO_TRAIN ]; do echo line $i; i=$((i+1)); sleep 1; done"],
            gpus=1,
            deferrable=deferrable,
            retries=30,
            retry_delay=datetime.timedelta(seconds=1),
        ).expand(env=[{"SECONDS_TO_TRAIN": str(SECONDS[i % len(SECONDS)])} for i in range(TRAININGS)])  # fmt: skip
