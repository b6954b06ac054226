"""DAGs of `test_features.py`: one for each feature. Their runs share one Airflow and start together."""

import datetime
import os
import pathlib
import re
from typing import Any

import pendulum
from airflow.sdk import DAG, Asset, task

from airflow_provider_ktrain.operators.job_control import (
    DeleteTrainingJobOperator,
    ResumeTrainingJobOperator,
    ScaleTrainingJobOperator,
    SuspendTrainingJobOperator,
)
from airflow_provider_ktrain.operators.reaper import ReapTrainingJobsOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator
from airflow_provider_ktrain.sensors.training import PyTorchJobSensor

IMAGE = os.environ.get("TEST_IMAGE", "scratch")
CHECKPOINTS = os.environ.get("TEST_CHECKPOINTS", "/tmp")
RETRY: dict[str, Any] = {"retries": 1, "retry_delay": datetime.timedelta(seconds=1)}
WAIT = 'go="/tmp/$HOSTNAME.go"; until [ -e $go ]; do sleep 0.2; done; rm $go'  # until the test lets it go: see kube.py
SLEEP = "sleep 600 & wait"
FAILS_ON_ITS_NODE = "raise RuntimeError('CUDA error: uncorrectable ECC error encountered')"
# both replicas write each line once; the test lets them go after half of the lines, when the task is deferred
WRITES = f"""
line() {{ echo "line $1"; echo "KTRAIN_METRIC {{\\"step\\": $1, \\"loss\\": 0.$((9 - $1))}}"; sleep 0.5; }}
for i in 1 2 3 4; do line $i; done
{WAIT}
for i in 5 6 7 8; do line $i; done
echo 'KTRAIN_RESULT {{"loss": 0.1}}'
[ $RANK != 0 ] || sleep 3  # the Master's end ends the job
"""
# try 1 saves a step and reports a broken GPU; try 2 continues after that step
RESUMES = f"""
saved=$KTRAIN_CHECKPOINT_DIR/step
mkdir -p $KTRAIN_CHECKPOINT_DIR
[ ! -e $saved ] || {{ echo resumed after step $(cat $saved); exit 0; }}
echo 4 > $saved
exec python3 -c "{FAILS_ON_ITS_NODE}"
"""
# exits with 0 on SIGTERM, when it is evicted in try 1; try 2 finds what it saved
SAVES = f"""
mkdir -p $KTRAIN_CHECKPOINT_DIR
[ ! -e $KTRAIN_CHECKPOINT_DIR/saved ] || {{ echo complete; exit 0; }}
trap 'touch $KTRAIN_CHECKPOINT_DIR/saved; echo saved; exit 0' TERM
echo begins
{SLEEP}
"""
# the callback of the how-to, as it is written there
NOTIFICATIONS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "how-to" / "notifications.md"
documented: dict[str, Any] = {}
code = re.split(r"^```(?:python)?\n", NOTIFICATIONS.read_text(), flags=re.MULTILINE)[1]
exec(code.partition("with DAG")[0], documented)  # noqa: S102
MAIL = documented["MAIL"]
HANGS = """while :; do echo 'KTRAIN_METRIC {"step": 7}'; sleep 1 & wait; done"""


def sh(program: str) -> dict[str, Any]:
    """The image and the command of a task. The first process of a container gets SIGTERM only if it handles it."""
    traps = program if "trap" in program else f"trap 'exit 143' TERM\n{program}"
    return {"task_id": "train", "image": IMAGE, "command": ["sh", "-c", traps], "gpus": 1}


def a_dag(name: str, **parameters: Any) -> DAG:
    return DAG(f"feature_{name}", **{"schedule": None, "start_date": pendulum.datetime(2026, 1, 1), **parameters})


with a_dag("worker"):
    PyTorchJobOperator(
        task_id="train", image=IMAGE, command=["sh", "train.sh"], code="training", workers=1, gpus=1,
        env={"API_KEY": "swordfish"}, deferrable=False, **RETRY,
    )  # fmt: skip

with a_dag("deferred"):
    PyTorchJobOperator(**sh(WRITES), workers=1)

with a_dag("failure"):
    PyTorchJobOperator(**sh("echo begins; echo 'ValueError: bad shard' >&2; exit 3"), on_failure_callback=MAIL)

with a_dag("killed_in_worker"):
    PyTorchJobOperator(**sh(f"echo begins; {SLEEP}"), deferrable=False, on_failure_callback=MAIL)

with a_dag("killed_while_deferred"):
    TrainJobOperator(
        **sh(f"echo begins; {SLEEP}"), runtime="torch-distributed", nodes=2, on_failure_callback=MAIL
    )  # fmt: skip

with a_dag("adopted"):
    PyTorchJobOperator(**sh(f"echo begins; {WAIT}; echo goes on"), deferrable=False, on_retry_callback=MAIL, **RETRY)

with a_dag("cleared"):
    PyTorchJobOperator(**sh("echo begins; {% if ti.try_number == 1 %}sleep 600 & wait{% endif %}"), **RETRY)

with a_dag("deadline"):
    PyTorchJobOperator(
        **sh(f"echo begins; {SLEEP}"), execution_timeout=datetime.timedelta(seconds=90), on_failure_callback=MAIL
    )  # fmt: skip

with a_dag("progress_timeout"):
    PyTorchJobOperator(**sh(HANGS), progress_timeout=5, deferrable=False)

with a_dag("skip"):

    @task
    def after() -> None: ...

    PyTorchJobOperator(**sh("exit 99"), skip_on_exit_code=99, deferrable=False, **RETRY) >> after()

with a_dag("checkpoint"):
    PyTorchJobOperator(
        **sh(RESUMES), checkpoint_dir=CHECKPOINTS, avoid_failed_nodes=True, deferrable=False, on_retry_callback=MAIL,
        **RETRY,
    )  # fmt: skip

with a_dag("mpijob"):
    MPIJobOperator(
        **sh("""echo launched; echo 'KTRAIN_RESULT {"kind": "MPIJob"}'"""), workers=1, deferrable=False, **RETRY
    )  # fmt: skip

with a_dag("trainjob"):
    TrainJobOperator(
        **sh(f"""echo "node $PET_NODE_RANK"; {WAIT}; echo 'KTRAIN_RESULT {{"kind": "TrainJob"}}'"""),
        runtime="torch-distributed", nodes=2, on_finish_action="keep_job", **RETRY,
    )  # fmt: skip

with a_dag("function"):

    @task.pytorchjob(
        image=IMAGE,
        pod_override={"spec": {"containers": [{"name": "pytorch", "env": [{"name": "FACTOR", "value": "10"}]}]}},
        deferrable=False,
        **RETRY,
    )
    def times_factor(number: int) -> int:
        import os

        return number * int(os.environ["FACTOR"])

    @task
    def total(numbers: Any) -> int:
        return sum(numbers)

    total(times_factor.expand(number=[1, 2]))

MODEL = Asset("feature_model")
with a_dag("asset"):
    pod = {"containers": [{"name": "pytorch", "image": IMAGE, "command": ["sh", "-c", SAVES]}]}
    # with OnFailure, an exit code of 0 is the job's success
    master = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    spec = {"pytorchReplicaSpecs": {"Master": master}}
    PyTorchJobOperator(
        task_id="train", manifest={"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": spec}, gpus=1,
        checkpoint_dir=CHECKPOINTS, outlets=[MODEL], deferrable=False, **RETRY,
    )  # fmt: skip

with a_dag("asset_consumer", schedule=[MODEL]):

    @task
    def receive(triggering_asset_events: Any = None) -> list[Any]:
        return [event.extra for event in triggering_asset_events[MODEL]]

    receive()

with a_dag("queue"):
    PyTorchJobOperator(**sh("echo admitted"), queue_name="team-a")

with a_dag("job_control"):
    job: dict[str, Any] = {"job_name": "background", **RETRY}
    (
        PyTorchJobSensor(task_id="sense", conditions=["Running"], deferrable=False, **job)
        >> ScaleTrainingJobOperator(task_id="scale", workers=2, **job)
        >> SuspendTrainingJobOperator(task_id="suspend", **job)
        >> ResumeTrainingJobOperator(task_id="resume", **job)
        >> DeleteTrainingJobOperator(task_id="delete", **job)
    )

with a_dag("orphan"):
    PyTorchJobOperator(**sh(f"echo begins; {SLEEP}"), namespace="orphans", deferrable=False)

with a_dag("reaper"):
    ReapTrainingJobsOperator(task_id="reap", namespaces="orphans", dry_run=False, confirm_after=2, **RETRY)
