"""DAGs of the chaos tests: one job of two replicas that writes a line per second, in every kind of task."""

import datetime
import os
import signal
import time
from typing import Any

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.exceptions import TrainingRequirementError
from airflow_provider_ktrain.operators.training import PyTorchJobOperator, TrainJobOperator

STEPS = os.environ.get("CHAOS_STEPS", "")  # the directory of the programs' records, for `soak_count`
WORKER_MEMORY = int(os.environ.get("CHAOS_WORKER_MEMORY", "0"))  # a limit of worker pods in tests/executors
# The run sets `seconds`, `seconds_of_first_try`, `stop_seconds`, `wait`, `nan_steps` and `code`. `Stage.finish` ends
# the program earlier. A line is written before each second passes, so there is at least one. The end of the Master ends
# the job, so the Master waits for the Worker, which has waited for the Master. The first process of a container gets
# SIGTERM only if it handles it.
COUNT = """
record() {
    [ -z "STEPS" ] || [ ${RANK:-$PET_NODE_RANK} != 0 ] ||
        echo "$1 $(date +%s)" >> 'STEPS/{{ ti.dag_id }}.{{ ti.run_id }}.{{ ti.map_index }}'
}
trap 'record end; sleep {{ dag_run.conf.get("stop_seconds", 0) }}; exit 143' TERM
i=0
seconds={{ ti.try_number == 1 and dag_run.conf.get("seconds_of_first_try") or dag_run.conf.get("seconds", 20) }}
while [ $i -lt $seconds ] && [ ! -e 'STEPS/{{ ti.dag_id }}.{{ ti.run_id }}.finish' ]; do
    record $i
    echo line $i
    loss=0.5
    case " {{ dag_run.conf.get("nan_steps", "") }} " in *" $i "*) loss=NaN;; esac
    echo "KTRAIN_METRIC {\\"step\\": $i, \\"loss\\": $loss}"
    i=$((i+1))
    sleep 1
done
[ ${RANK:-$PET_NODE_RANK} != 0 ] || sleep {{ dag_run.conf.get("wait", 4) }}
exit {{ dag_run.conf.get("code", 0) }}
""".replace("STEPS", STEPS)
#: Limits in seconds. An outage of the API server takes longer than a program may be silent.
LIMITS: dict[str, Any] = {
    "queue_timeout": 300,
    "schedule_timeout": 300,
    "startup_timeout": 300,
    "partial_start_timeout": 300,
    "log_stall_timeout": 30,
    "progress_timeout": 30,
}
JOB: dict[str, Any] = {
    "task_id": "train",
    "image": os.environ.get("TEST_IMAGE", "scratch"),
    "command": ["sh", "-c", COUNT],
    "gpus": 1,
    "retry_delay": datetime.timedelta(seconds=1),
}


class SoonTimedOut(PyTorchJobOperator):
    """Airflow's own timeout of the deferral follows immediately after the deadline."""

    defer_padding = 3.0


class WaitsAfterExecute(PyTorchJobOperator):
    """The worker of the first try waits after `execute` has returned, until it is killed."""

    def post_execute(self, context: Any, result: Any = None) -> None:
        if context["ti"].try_number == 1:
            self.log.info("execute has returned")
            time.sleep(600)


class UsesMemory(PyTorchJobOperator):
    """When its process gets SIGUSR1, it uses more memory than its worker pod may."""

    def execute(self, context: Any) -> Any:
        signal.signal(signal.SIGUSR1, lambda *_: vars(self).update(used=b"x" * WORKER_MEMORY))
        return super().execute(context)


class WaitsAfterRelease(PyTorchJobOperator):
    """The worker of the first try waits after its release and before its answer to Airflow, until it is killed."""

    def execute(self, context: Any) -> Any:
        try:
            return super().execute(context)
        except TrainingRequirementError:
            if context["ti"].try_number == 1:
                self.log.info("the job is released")
                time.sleep(600)
            raise


def a_dag(dag_id: str) -> DAG:
    return DAG(dag_id, schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"])


def dag(dag_id: str, operator: type[PyTorchJobOperator] = PyTorchJobOperator, **parameters: Any) -> None:
    with a_dag(dag_id):
        operator(**JOB, **LIMITS, workers=1, **parameters)


def dag_of_each_kind(dag_id: str, **parameters: Any) -> None:
    dag(dag_id, **parameters)
    with a_dag(f"{dag_id}_trainjob"):
        TrainJobOperator(**JOB, **LIMITS, runtime="torch-distributed", nodes=2, **parameters)


dag_of_each_kind("chaos_worker", deferrable=False)
dag_of_each_kind("chaos_worker_retries", deferrable=False, retries=1)
dag("chaos_worker_ended", WaitsAfterExecute, deferrable=False, retries=1)
dag("chaos_worker_unmet", WaitsAfterRelease, deferrable=False, retries=1, require={"loss": "< 0.1"})
dag_of_each_kind("chaos_deferred")
dag_of_each_kind("chaos_deferred_retries", retries=1)
dag_of_each_kind("chaos_deferred_keeps", on_finish_action="keep_job")
dag("chaos_deferred_unmet", retries=1, require={"loss": "< 0.1"})
dag("chaos_deferred_nan", fail_on_nan="loss")
dag("chaos_deadline", execution_timeout=datetime.timedelta(seconds=30))
dag("chaos_timeout", SoonTimedOut, execution_timeout=datetime.timedelta(seconds=30))
for queue in os.environ.get("CHAOS_QUEUES", "").split():  # of the workers in tests/executors
    dag(f"chaos_worker_{queue}", deferrable=False, queue=queue)
    dag(f"chaos_worker_retries_{queue}", deferrable=False, queue=queue, retries=1)
    dag(f"chaos_deferred_{queue}", queue=queue)
if WORKER_MEMORY:
    from kubernetes.client import V1Container, V1Pod, V1PodSpec, V1ResourceRequirements

    limited = V1Container(name="base", resources=V1ResourceRequirements(limits={"memory": str(WORKER_MEMORY)}))
    pod = {"pod_override": V1Pod(spec=V1PodSpec(containers=[limited]))}
    dag("chaos_memory", UsesMemory, deferrable=False, executor_config=pod)
    dag("chaos_memory_retries", UsesMemory, deferrable=False, executor_config=pod, retries=1)
with a_dag("chaos_many"):  # jobs that end a second after their tasks have deferred
    PyTorchJobOperator.partial(**JOB).expand(env=[{"NUMBER": str(number)} for number in range(50)])
