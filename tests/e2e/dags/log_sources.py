"""DAG of the tests of log records: init containers, sidecars, equal lines, and a failure if the run requests one."""

import os

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator

IMAGE = os.environ.get("TEST_IMAGE", "scratch")
WRITE = """
i=0
while [ $i -lt 60 ]; do
  printf 'same\\nsame\\nsame\\n'; echo "tick $i"; i=$((i+1)); sleep 1
done
echo 'KTRAIN_RESULT {"loss": 1}'
[ $RANK = 0 ] || exit 0
sleep 5  # so that the Worker, which starts later, has ended: a running Worker is deleted at the Master's end
echo "ValueError: bad shard" >&2
exit {{ dag_run.conf.get("code", 0) }}
"""
SIDECAR = """
echo 'KTRAIN_RESULT {"loss": 9}'
i=0; while [ $i -lt 100 ]; do echo beside $i; i=$((i+1)); sleep 0.1; done
"""
WAIT = "for i in 1 2 3 4 5 6 7 8 9 10; do echo waiting for the volume; sleep 0.1; done"


def container(name: str, program: str) -> dict[str, object]:
    return {"name": name, "image": IMAGE, "command": ["sh", "-c", program]}


def replica() -> dict[str, object]:
    main = container("pytorch", WRITE)
    main["env"] = [{"name": "HF_TOKEN", "value": "hf-0123456789"}, {"name": "EPOCHS", "value": "60"}]
    pod = {"initContainers": [container("fetch", WAIT)], "containers": [container("metrics", SIDECAR), main]}
    return {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod}}


with DAG("log_sources", schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["logs"]):
    PyTorchJobOperator(
        task_id="train",
        manifest={
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "sources"},
            "spec": {"pytorchReplicaSpecs": {"Master": replica(), "Worker": replica()}},
        },
        gpus=1,
    )
