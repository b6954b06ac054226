"""DAGs of the tests in which a trigger can't be loaded, or gets the arguments of another release."""

import datetime
import os
from typing import Any, NoReturn

import pendulum
from airflow.sdk import DAG

from airflow_provider_ktrain.operators.training import PyTorchJobOperator
from airflow_provider_ktrain.triggers.training import TrainingJobTrigger

CLASSPATH = f"{TrainingJobTrigger.__module__}.{TrainingJobTrigger.__qualname__}"
COUNT = """
trap 'exit 143' TERM
i=0
while [ $i -lt {{ dag_run.conf.get("seconds", 20) }} ]; do echo line $i; i=$((i+1)); sleep 1; done
[ $RANK != 0 ] || sleep 4
"""
JOB: dict[str, Any] = {
    "task_id": "train",
    "image": os.environ.get("TEST_IMAGE", "scratch"),
    "command": ["sh", "-c", COUNT],
    "gpus": 1,
    "workers": 1,
    "retry_delay": datetime.timedelta(seconds=1),
}


class DefersAgainSoon(PyTorchJobOperator):
    """After each failed trigger, the worker follows for seconds instead of minutes."""

    seconds_in_worker = (5.0, 5.0, 5.0, 5.0)


class FlatTrigger(TrainingJobTrigger):
    """Has the arguments that triggers had before their format was frozen."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        _, now = super().serialize()
        names = ("job", "options", "kubernetes_conn_id", "cluster_context", "failures")
        flat = {name: now[name] for name in names}
        return CLASSPATH, {**flat, "cursor": {"zlib": "?"}, "metrics": {}, "marked": "", "past": {}}


class DefersAsAnEarlierRelease(PyTorchJobOperator):
    """Its worker has an earlier release of the provider than the triggerer."""

    def defer(self, *, trigger: Any, **how: Any) -> NoReturn:
        super().defer(trigger=FlatTrigger(**trigger.serialize()[1]), **how)


def dag(dag_id: str, operator: type[PyTorchJobOperator], **parameters: Any) -> None:
    with DAG(dag_id, schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), tags=["chaos"]):
        operator(**JOB, **parameters)


dag("chaos_defers_again", DefersAgainSoon, retries=2)
dag("chaos_earlier_release", DefersAsAnEarlierRelease)
