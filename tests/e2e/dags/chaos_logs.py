"""DAG of the tests of remote logs: numbered lines, some slow ones, many at once, then a line a second."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

# The worker logs the first lines, triggerers log the others. 1,000 lines per second stay within their budget. Only the
# Master fails, and it fails last: the operator deletes pods that still run when another one has failed. `Stage.finish`
# ends the slow lines.
WRITE = """
trap 'exit 143' TERM
i=0
while [ $i -lt 6 ]; do echo line $i; i=$((i+1)); sleep 1; done
while [ $i -lt {{ dag_run.conf["lines"] }} ]; do
  echo line $i; i=$((i+1)); [ $((i % 500)) != 0 ] || sleep 0.5
done
j=0
while [ $j -lt {{ dag_run.conf["seconds"] }} ] && [ ! -e 'STEPS/{{ ti.dag_id }}.{{ ti.run_id }}.finish' ]; do
  echo line $i; i=$((i+1)); j=$((j+1)); sleep {{ dag_run.conf.get("pause", 1) }}
done
echo wrote $i lines
[ $RANK = 0 ] || exit 0
sleep 4
exit {{ dag_run.conf.get("code", 0) }}
""".replace("STEPS", os.environ.get("CHAOS_STEPS", ""))

with DAG("chaos_logs", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]):
    PyTorchJobOperator(
        task_id="train",
        image=os.environ.get("TEST_IMAGE", "scratch"),
        command=["sh", "-c", WRITE],
        gpus=1,
        workers=1,
    )
