"""Elastic Horovod that is scaled down and up again: ktrain_horovod_elastic with a cooldown for removed hosts."""

import pathlib

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.job_control import ScaleTrainingJobOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator
from airflow_provider_ktrain.sensors.training import MPIJobSensor

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "example_dags"
ARGUMENTS = (
    "-np 2 --min-np 1 --max-np 3 --blacklist-cooldown-range 5 30 --host-discovery-script /etc/mpi/discover_hosts.sh "
    "python /examples/elastic/tensorflow2_mnist_elastic.py"
)

with DAG(
    "horovod_cooldown",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    default_args={"namespace": "default"},
):
    train = MPIJobOperator(
        task_id="train",
        manifest=str(EXAMPLES / "manifests" / "tensorflow-mnist-elastic.yaml"),
        args=ARGUMENTS.split(),
        env={"ELASTIC_SIZES": "2 1 2"},
    )
    runs = MPIJobSensor(task_id="runs", job_name=train.job_name, conditions=["Running"], timeout=600)
    shrink = ScaleTrainingJobOperator(task_id="shrink", job_name=train.job_name, kind="MPIJob", workers=1)
    grow = ScaleTrainingJobOperator(task_id="grow", job_name=train.job_name, kind="MPIJob", workers=2)
    runs >> shrink >> grow
