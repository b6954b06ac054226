"""Elastic Horovod on an MPIJob, scaled from 2 Workers to 3 and to 1 while it trains.

This is the MPI-Operator guide of docs/guides-as-dags.md.
"""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.job_control import ScaleTrainingJobOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator
from airflow_provider_ktrain.sensors.training import MPIJobSensor

with DAG(
    "ktrain_horovod_elastic",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    default_args={"namespace": "default"},
    doc_md=__doc__,
    tags=["ktrain", "guides"],
):
    train = MPIJobOperator(
        task_id="train",
        manifest="manifests/tensorflow-mnist-elastic.yaml",
        env={"ELASTIC_SIZES": "2 3 1"},  # for examples/horovod: train until each of these numbers of Workers has run
    )
    # the timeout ends the wait if `train` can't submit its job
    runs = MPIJobSensor(task_id="runs", job_name=train.job_name, conditions=["Running"], timeout=600)
    grow = ScaleTrainingJobOperator(task_id="grow", job_name=train.job_name, kind="MPIJob", workers=3)
    shrink = ScaleTrainingJobOperator(task_id="shrink", job_name=train.job_name, kind="MPIJob", workers=1)
    runs >> grow >> shrink
