"""DAGs of `make soak`: many short trainings of each kind as mapped tasks, which defer or are followed in workers.

Those of `soak_evicted_*` continue from their last step, and exit with 0 on SIGTERM: their pods are evicted.
"""

import datetime
import json
import os
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator

TRAININGS = int(os.environ.get("SOAK_TRAININGS", "2"))  # of each DAG
LIMITS = json.loads(os.environ.get("SOAK_LIMITS", '{"execution_timeout": 1200}'))  # seconds, by parameter
STEPS = os.environ.get("SOAK_STEPS", "")  # the directory of the programs' records
SECONDS = (75, 4, 45, 20)  # durations of the trainings, used in turn: longer and shorter than an outage
IMAGE = os.environ.get("TEST_IMAGE", "scratch")
# each step is printed, and recorded with its time where nothing can be lost
TRAIN = """
record() { echo "$1 $(date +%s)" >> "${RECORD:-/dev/null}"; }
trap 'record end; exit 143' TERM
i=0
while [ $i -lt $SECONDS_TO_TRAIN ]; do
    record $i
    echo "KTRAIN_METRIC {\\"step\\": $i}"
    i=$((i+1))
    sleep 1
done
record done
"""
SAVES = TRAIN.replace("exit 143", "exit 0").replace(
    "i=0\n", """i=$(grep -v end "$RECORD" 2>/dev/null | tail -n 1 | cut -d " " -f 1); i=$((${i:--1}+1))\n"""
)


def replica(program: str, restart_policy: str = "Never", container: str = "mpi") -> dict[str, Any]:
    spec = {"containers": [{"name": container, "image": IMAGE, "command": ["sh", "-c", program]}]}
    return {"replicas": 1, "restartPolicy": restart_policy, "template": {"spec": spec}}


def mpi(program: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": replica(program),
                "Worker": replica("trap 'exit 143' TERM; sleep 600 & wait"),
            },
        },
    }


PYTORCH = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "spec": {"pytorchReplicaSpecs": {"Master": replica(SAVES, "OnFailure", "pytorch")}},
}
OPERATORS: dict[str, Any] = {
    "pytorchjobs": lambda **task: PyTorchJobOperator.partial(image=IMAGE, command=["sh", "-c", TRAIN], **task),
    "mpijobs": lambda **task: MPIJobOperator.partial(manifest=mpi(TRAIN), **task),
    "trainjobs": lambda **task: TrainJobOperator.partial(
        runtime="torch-distributed", image=IMAGE, command=["sh", "-c", TRAIN], **task
    ),
}
EVICTED: dict[str, Any] = {
    "pytorchjobs": lambda **task: PyTorchJobOperator.partial(manifest=PYTORCH, **task),
    "mpijobs": lambda **task: MPIJobOperator.partial(manifest=mpi(SAVES), **task),
    "trainjobs": lambda **task: TrainJobOperator.partial(
        runtime="torch-distributed", image=IMAGE, command=["sh", "-c", SAVES], **task
    ),
}


def training(dag_id: str, number: int) -> dict[str, Any]:
    """What differs between the trainings of a DAG."""
    seconds = SECONDS[number % len(SECONDS)]
    keep = (number + number // len(SECONDS) + dag_id.endswith("worker")) % 2
    return {
        "env": {"SECONDS_TO_TRAIN": str(seconds), "RECORD": STEPS and f"{STEPS}/{dag_id}.{number}"},
        "on_finish_action": "keep_job" if keep else "delete_job",
    }


def dag(dag_id: str, operator: Any, *, deferrable: bool) -> None:
    with DAG(
        dag_id,
        schedule=None,
        start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
        max_active_tasks=TRAININGS,
    ):
        operator(
            task_id="train",
            gpus=1,
            deferrable=deferrable,
            crash_loop_limit=2,
            retries=30,
            retry_delay=datetime.timedelta(seconds=1),
            **{**LIMITS, "execution_timeout": datetime.timedelta(seconds=LIMITS["execution_timeout"])},
        ).expand_kwargs([training(dag_id, number) for number in range(TRAININGS)])


for plural, operator in OPERATORS.items():
    dag(f"soak_{plural}_deferred", operator, deferrable=True)
    dag(f"soak_{plural}_worker", operator, deferrable=False)
for plural, operator in EVICTED.items():
    dag(f"soak_evicted_{plural}", operator, deferrable=plural != "mpijobs")
