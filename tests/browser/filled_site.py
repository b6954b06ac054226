"""The plugin's pages of 10,300 trainings in two DAGs, for users with rights on one or both: run as a process.

A few more trainings are shown by pages of their own, in states that real ones leave too soon: see `pages`. They have no
summary, so the table doesn't list them.

It serves at the port of the socket that it inherits, whose number is its argument. The rights are those of rights_site.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
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
from airflow.utils.state import DagRunState
from fastapi import FastAPI
from sqlalchemy import insert, select

from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM, TRIES_STATE
from airflow_provider_ktrain.core.reporting.status_document import TrainingStatus
from airflow_provider_ktrain.links.training import PREFIX
from airflow_provider_ktrain.plugin.application import build
from tests.plugin.rights_site import DAGS

ENDED, RUNNING = 10_000, 300
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
HOUR = 3600.0
#: Curves of three tries: the first one broke at step 40. The second one went on from step 20 and broke at step 70.
SERIES: list[dict[str, list[list[int]]]] = [
    {"loss": [[0, 90], [10, 80], [20, 70], [30, 60], [40, 50]]},
    {"loss": [[20, 62], [30, 52], [40, 42], [50, 36], [60, 30], [70, 24]]},
    {"loss": [[50, 28], [60, 22], [70, 18], [80, 15], [90, 12], [100, 10]]},
]


def waiting(limit: str, seconds: float, warning: str) -> dict[str, Any]:
    """The status of a training that waits for a node, until `limit` or, an hour later, `scheduling_timeout` strikes."""
    now = time.time()
    limits = [{"name": limit, "due": now + seconds}, {"name": "scheduling_timeout", "due": now + seconds + HOUR}]
    return TrainingStatus(
        job={"kind": "PyTorchJob", "namespace": "ml", "name": "bert-large-7f3a"}, try_number=1, written_at=now,
        host="worker", phases=[("Pending", now - 10)], limits=limits, notice=f"Newest warning: {warning}",
        rows=[["Master", 0, "bert-large-7f3a-master-0", "", 8, "Pending", 0]],
    ).to_dict()  # fmt: skip


def pages() -> dict[str, tuple[int, dict[str, Any], list[dict[str, Any]]]]:
    """By run: the number of the try that runs, its status, and what is stored of the tries before."""
    tries = [
        {"try_number": n, "max_tries": 2, "cause": f"OOM in step {step}", "step": step, "series": series}
        for n, (step, series) in enumerate(zip((40, 70), SERIES, strict=False), 1)
    ]
    status = {"version": 1, "try_number": 3, "phase": "Running", "written_at": time.time(), "series": SERIES[2]}
    no_claim = '0/4 nodes are available: persistentvolumeclaim "data" not found.'
    no_node = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector."
    return {
        "three-tries": (3, status, tries),
        "missing-claim": (1, waiting("missing claim", HOUR, no_claim), []),
        "no-matching-node": (1, waiting("no matching node", HOUR, no_node), []),
        "expired": (1, waiting("missing claim", 0.0, no_claim), []),
    }


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
            stored[SUMMARY_XCOM] |= {"try_number": 1, "parameters": {"shard": str(n)}}
            if state == "deferred":
                stored[STATUS_XCOM] = {"version": 1, "try_number": 1, "phase": "Running", "usage": usage}
            xcoms += [
                {**key, "dag_run_id": ids[run["run_id"]], "key": name, "value": value, "timestamp": began}
                for name, value in stored.items()
            ]
        session.execute(insert(TaskInstance.__table__), tasks)
        session.execute(insert(XComModel.__table__), xcoms)
        for run_id, page in pages().items():
            add_page(session, run_id, *page)


def add_page(session: Any, run_id: str, number: int, status: dict[str, Any], tries: list[dict[str, Any]]) -> None:
    """Store a training of the first DAG that runs, with its status. Below Airflow 3.3, tries are not stored."""
    key = {"dag_id": DAGS[0], "run_id": run_id, "task_id": "train", "map_index": -1}
    run = DagRun(dag_id=DAGS[0], run_id=run_id, run_type="manual", run_after=BEGAN, state=DagRunState.RUNNING)
    session.add(run)
    session.flush()
    times = {"start_date": BEGAN, "updated_at": BEGAN}
    task = {**key, **times, "id": uuid.uuid4(), "state": "running", "try_number": number, "max_tries": 2}
    session.execute(insert(TaskInstance.__table__).values(**task, pool="p", pool_slots=1))
    stored = {**key, "dag_run_id": run.id}
    session.execute(insert(XComModel.__table__).values(**stored, key=STATUS_XCOM, value=status, timestamp=BEGAN))
    with contextlib.suppress(ImportError):
        from airflow.models.task_state_store import TaskStateStoreModel

        value = json.dumps({"version": 1, "tries": tries})
        values = {**stored, "key": TRIES_STATE, "value": value, "updated_at": BEGAN}
        session.execute(insert(TaskStateStoreModel.__table__).values(**values))


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
