"""An MPIJob that computes pi with mpirun and mpi4py.

Set the parameter `api` to v1 for training-operator and to v2beta1 for mpi-operator.
"""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import MPIJobOperator

with DAG(
    "ktrain_mpi_pi",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    params={"api": "v1", "image": "mpi-pi:latest"},
    doc_md=__doc__,
    tags=["ktrain", "guides"],
):
    MPIJobOperator(task_id="train", manifest="manifests/mpi_pi_{{ params.api }}.yaml", namespace="default")
