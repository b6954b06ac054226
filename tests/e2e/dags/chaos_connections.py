"""DAGs of `test_chaos_connections.py`: one short job with different connections; `kubernetes_default` isn't defined."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

COUNT = """
trap 'exit 143' TERM
i=0
while [ $i -lt 15 ]; do echo line $i; i=$((i+1)); sleep 1; done
[ $RANK != 0 ] || sleep 4
"""

for name, connection in (("default", "kubernetes_default"), ("unverified", "unverified"), ("verified", "verified")):
    with DAG(f"chaos_{name}", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]):
        PyTorchJobOperator(
            task_id="train",
            image=os.environ.get("TEST_IMAGE", "scratch"),
            command=["sh", "-c", COUNT],
            workers=1,
            gpus=1,
            namespace=os.environ.get("TEST_NAMESPACE"),
            kubernetes_conn_id=connection,
        )
