"""A plain MPIJob: mpirun and mpi4py, for the API that the cluster serves.

`api`: v1 where training-operator runs, v2beta1 where mpi-operator does. See docs/guides-as-dags.md.
"""

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import MPIJobOperator

with DAG(
    "ktrain_mpi_pi",
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    params={"api": "v1", "image": "mpi-pi"},
    doc_md=__doc__,
    tags=["ktrain", "seeds"],
):
    MPIJobOperator(task_id="train", manifest="manifests/mpi_pi_{{ params.api }}.yaml", namespace="default")
