"""Writes deferred tasks into Airflow's database: a DAG, a run, task instances, and their triggers.

Reads `{"tasks": [{"task_id", "map_index", "classpath", "kwargs", "xcoms"}]}` from stdin; XComs are optional. Runs in a
process of its own with the environment of the Airflow that it is for. No worker is needed to defer a thousand tasks.
The run has succeeded already, so that a scheduler leaves it alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pendulum

DAG_ID, RUN_ID = "bench", "r"


def main(tasks: list[dict[str, Any]]) -> None:
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.trigger import Trigger
    from airflow.models.xcom import XComModel
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG
    from airflow.serialization.serialized_objects import LazyDeserializedDAG
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState, TaskInstanceState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType

    names = {t["task_id"] for t in tasks}
    now = pendulum.now("UTC")
    with DAG(DAG_ID, schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC")) as dag:
        for name in sorted(names):
            EmptyOperator(task_id=name)
    with create_session() as session:
        session.merge(DagBundleModel(name="bench"))
        session.flush()
        model: Any = DagModel  # its constructor isn't annotated
        session.add(model(dag_id=DAG_ID, bundle_name="bench", fileloc="bench.py", is_paused=False))
        session.flush()
        SerializedDagModel.write_dag(LazyDeserializedDAG.from_dag(dag), bundle_name="bench", session=session)
        session.flush()
        written = SerializedDagModel.get(DAG_ID, session=session)
        assert written is not None
        known = written.dag
        run = known.create_dagrun(
            run_id=RUN_ID, run_after=now, logical_date=None, data_interval=None, run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST, state=DagRunState.RUNNING, session=session,
        )  # fmt: skip
        instances = {ti.task_id: ti for ti in run.task_instances}
        for task in tasks:
            trigger = Trigger(task["classpath"], task["kwargs"])
            session.add(trigger)
            if task["map_index"] < 0:
                ti = instances[task["task_id"]]
            else:
                if (unmapped := instances.pop(task["task_id"], None)) is not None:
                    session.delete(unmapped)
                    session.flush()
                ti = TaskInstance(
                    known.get_task(task["task_id"]), written.dag_version_id, RUN_ID, map_index=task["map_index"]
                )
                session.add(ti)
            ti.state, ti.try_number, ti.start_date = TaskInstanceState.DEFERRED, 1, now
            session.flush()
            ti.trigger_id = trigger.id
            where = {"dag_id": DAG_ID, "run_id": RUN_ID, "task_id": ti.task_id, "map_index": ti.map_index}
            for key, value in task.get("xcoms", {}).items():
                XComModel.set(key, value, **where, serialize=False, session=session)  # as its API does
        run.state = DagRunState.SUCCESS


if __name__ == "__main__":
    main(json.load(sys.stdin)["tasks"])
