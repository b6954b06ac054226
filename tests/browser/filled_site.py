"""The plugin's pages of 10,300 trainings in two DAGs, for users with rights on one or both: run as a process.

It serves at the port of the socket that it inherits, whose number is its argument. The rights are those of rights_site.
"""

from __future__ import annotations

import socket
import sys
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import uvicorn
from airflow import models, settings
from airflow.api_fastapi.app import init_auth_manager
from airflow.models import DagModel, DagRun, TaskInstance
from airflow.models.base import Base
from airflow.models.dagbundle import DagBundleModel
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from fastapi import FastAPI
from sqlalchemy import insert, select

from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM
from airflow_provider_ktrain.links.training import PREFIX
from airflow_provider_ktrain.plugin.application import build
from tests.plugin.rights_site import DAGS

ENDED, RUNNING = 10_000, 300
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


def fill() -> None:
    """Store the trainings: in turns of each DAG, oldest first, every third one failed."""
    load: Any = models
    load.import_all_models()
    Base.metadata.create_all(settings.engine)
    limits = {"max_active_tasks": 1, "max_consecutive_failed_dag_runs": 0, "has_task_concurrency_limits": False}
    keys = [{"dag_id": DAGS[n % 2], "run_id": f"run_{n}"} for n in range(ENDED + RUNNING)]
    with create_session() as session:
        session.execute(insert(DagBundleModel.__table__).values(name="bundle"))
        for dag_id in DAGS:
            dag = {"dag_id": dag_id, "bundle_name": "bundle", "fileloc": "x", **limits}
            session.execute(insert(DagModel.__table__).values(dag))
        runs = [{**key, "run_type": "manual", "run_after": BEGAN, "state": "running"} for key in keys]
        session.execute(insert(DagRun.__table__), runs)
        ids = dict(session.execute(select(DagRun.run_id, DagRun.id)).all())
        tasks, xcoms = [], []
        for n, run in enumerate(keys):
            key, began = {**run, "task_id": "train", "map_index": -1}, BEGAN + timedelta(minutes=n)
            state = "deferred" if n >= ENDED else "success" if n % 3 else "failed"
            times = {"start_date": began, "end_date": began + timedelta(hours=1), "updated_at": began}
            about = {"id": uuid.uuid4(), "state": state, "try_number": 1, "pool": "p", "pool_slots": 1}
            tasks.append({**key, **times, **about})
            cause = f"ValueError: no data in shard {n}" if state == "failed" else ""
            usage = {"tries": 1, "held": 60.0, "wasted": 6.0}
            stored = {SUMMARY_XCOM: {"version": 1, "cause": cause, "category": cause and "user code", "usage": usage}}
            if state == "deferred":
                stored[STATUS_XCOM] = {"version": 1, "try_number": 1, "phase": "Running", "usage": usage}
            xcoms += [
                {**key, "dag_run_id": ids[run["run_id"]], "key": name, "value": value, "timestamp": began}
                for name, value in stored.items()
            ]
        session.execute(insert(TaskInstance.__table__), tasks)
        session.execute(insert(XComModel.__table__), xcoms)


def main() -> None:
    """Serve until the process is ended."""
    fill()
    init_auth_manager()
    site = FastAPI()
    site.mount(PREFIX, build())
    listening = socket.socket(fileno=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(site, log_level="error")).run([listening])


if __name__ == "__main__":
    main()
