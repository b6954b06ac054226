"""Elastic Horovod that is scaled down and up again: ktrain_horovod_elastic with a cooldown for removed hosts."""

import pathlib

import pendulum
from airflow.providers.cncf.kubernetes.hooks.kubernetes import KubernetesHook
from airflow.sdk import DAG, task

from airflow_provider_ktrain.operators.job_control import ScaleTrainingJobOperator
from airflow_provider_ktrain.operators.training import MPIJobOperator
from airflow_provider_ktrain.sensors.training import MPIJobSensor

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "example_dags"
ARGUMENTS = (
    # a rank waits for the others for 30 s by default, in which a busy machine may not start them
    "-np 2 --min-np 1 --max-np 3 --blacklist-cooldown-range 5 30 --gloo-timeout-seconds 300 "
    "--host-discovery-script /etc/mpi/discover_hosts.sh "
    "python /examples/elastic/tensorflow2_mnist_elastic.py"
)


@task.sensor(poke_interval=2, timeout=900)
def ranks_train(job_name: str, number: int) -> bool:
    """Whether this number of ranks has trained: Workers that run may not have started theirs yet."""
    log = KubernetesHook().core_v1_client.read_namespaced_pod_log(f"{job_name}-launcher", "default")
    return f" on {number}: y" in log


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
    two = ranks_train.override(task_id="two_train")(train.job_name, 2)
    one = ranks_train.override(task_id="one_trains")(train.job_name, 1)
    runs >> two >> shrink >> one >> grow
