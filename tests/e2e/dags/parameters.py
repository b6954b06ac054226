"""DAGs of tests/e2e/test_parameters.py: parameters that users of KubernetesPodOperator know."""

import datetime
import json
import os
from unittest import mock

import pendulum
from airflow.sdk import DAG, task

from airflow_provider_ktrain.core.text.secret_rules import RULES
from airflow_provider_ktrain.operators.training import PyTorchJobOperator

START = pendulum.datetime(2026, 1, 1, tz="UTC")
IMAGE = os.environ.get("TEST_IMAGE", "scratch")

with (
    DAG("worker_without_xcoms", schedule=None, start_date=START),
    mock.patch.dict(os.environ, AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE="False"),
):
    PyTorchJobOperator(
        task_id="train",
        image=IMAGE,
        command=["sh", "-c", """echo 'KTRAIN_RESULT {"loss": 0.5}'; sleep 15"""],
        gpus=1,
        do_xcom_push=False,
    )

with DAG("partial_start", schedule=None, start_date=START):  # each node has 8 GPUs, and there are 4 nodes
    PyTorchJobOperator(
        task_id="train",
        image=IMAGE,
        command=["sh", "-c", "trap 'exit 143' TERM; sleep 600 & wait"],
        workers=4,
        gpus=8,
        partial_start_timeout=30,
        retries=1,
        retry_delay=datetime.timedelta(hours=1),
    )

INPUT = {"name": "INPUT", "value": "/input"}
MOUNT = {"name": "input", "mountPath": "/input"}

with DAG("private", schedule=None, start_date=START):

    @task.pytorchjob(
        image=IMAGE,
        pod_override={
            "spec": {
                "serviceAccountName": "trainer",
                "imagePullSecrets": [{"name": "registry"}],
                "initContainers": [
                    {
                        "name": "fetch",
                        "image": IMAGE,
                        "command": ["sh", "-c", 'echo "of {{ dag.dag_id }}" > "$INPUT/data"'],
                        "env": [INPUT],
                        "volumeMounts": [MOUNT],
                    }
                ],
                "containers": [
                    {
                        "name": "pytorch",
                        "envFrom": [{"secretRef": {"name": "private-settings"}}],
                        "env": [INPUT],
                        "volumeMounts": [MOUNT],
                    }
                ],
                "volumes": [{"name": "input", "emptyDir": {}}],
            }
        },
    )
    def reads() -> list[str]:
        import os
        import pathlib

        return [os.environ["GREETING"], pathlib.Path(os.environ["INPUT"], "data").read_text().strip()]

    reads()


with DAG("diverges", schedule=None, start_date=START):

    @task.pytorchjob(image=IMAGE, retries=1, retry_delay=datetime.timedelta(seconds=1))
    def diverges() -> dict[str, float]:
        return {"epochs": 3, "loss": float("nan")}

    diverges()

SECRETS = [rule.example.replace("SECRET", "hunter2hunter2") for rule in RULES]
with DAG("secret_results", schedule=None, start_date=START):

    @task
    def same(results: list[object]) -> list[bool]:
        return [result == SECRETS for result in results]

    same(
        [
            PyTorchJobOperator(
                task_id=f"deferrable_{deferrable}",
                image=IMAGE,
                command=["sh", "-c", """sleep 15; printf '%s\\n' "$LINE\""""],
                env={"LINE": f"KTRAIN_RESULT {json.dumps(SECRETS)}"},
                deferrable=deferrable,
            ).output
            for deferrable in (False, True)
        ]
    )
