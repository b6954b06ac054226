"""DAGs of the end-to-end tests of the training page."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

PROGRAM = """
trap 'exit 143' TERM
i=0
while [ $i -lt {steps} ]; do
  if [ $i = 30 ] && [ {{{{ dag_run.conf.get("waits", False) }}}} = True ]; then
    go="/tmp/$HOSTNAME.go"; until [ -e $go ]; do sleep 0.2; done; rm $go  # the test lets it go: see tests/e2e/kube.py
  fi
  echo "KTRAIN_METRIC {{\\"step\\": $i, \\"loss\\": 0.$((90 - i)), \\"odd\\": NaN}}"
  i=$((i + 1)); sleep 0.5
done
echo '<script>alert("from a log line")</script>'
exit {code}
"""

with DAG("reports", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC")):
    for task_id, steps, code in (("succeeds", 50, 0), ("fails", 3, 3)):
        PyTorchJobOperator(
            task_id=task_id,
            image=os.environ["TEST_IMAGE"],
            command=["sh", "-c", PROGRAM.format(steps=steps, code=code)],
            gpus=1,
            workers=1,
            on_finish_action="delete_job",
        )
