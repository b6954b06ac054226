"""Answers of the plugin to users with different rights, written as JSON: run as a process with a database of its own.

SimpleAuthManager knows only roles. This auth manager answers per DAG and per entity, as those of other providers do.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import pathlib
import sys
import uuid
from typing import Any
from urllib.parse import urlencode

from airflow import models, settings
from airflow.api_fastapi.app import init_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
from airflow.models import DagModel, DagRun, TaskInstance
from airflow.models.base import Base
from airflow.models.dagbundle import DagBundleModel
from airflow.models.taskinstance import TaskInstanceNote
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState
from sqlalchemy import text
from starlette.testclient import TestClient

from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM, TRIES_STATE
from airflow_provider_ktrain.plugin.application import build

DAGS = ("mine", "theirs")
TASKS, XCOMS, LOGS = DagAccessEntity.TASK_INSTANCE, DagAccessEntity.XCOM, DagAccessEntity.TASK_LOGS
RIGHTS: dict[str, dict[str, set[DagAccessEntity | None]]] = {
    "everything": {dag: {None, TASKS, XCOMS, LOGS} for dag in DAGS},
    "one-dag": {"mine": {None, TASKS, XCOMS, LOGS}},
    "no-xcoms": {"mine": {None, TASKS, LOGS}},
    "no-tasks": {"mine": {None, XCOMS, LOGS}},
    "no-logs": {"mine": {None, TASKS, XCOMS}},
    "logs-of-another-dag": {"mine": {None, TASKS, XCOMS}, "theirs": {None, TASKS, XCOMS, LOGS}},
    "no-entities": {"mine": {None}},
    "nothing": {},
}
QUOTE, CATEGORY = "a-line-of-the-log", "user code"
STATUS: dict[str, Any] = {
    "version": 1, "try_number": 2, "phase": "Running", "phase_since": 1.0, "written_at": 1.0,
    "last_lines": {"Master 0": QUOTE}, "cause": {"summary": QUOTE, "detail": QUOTE, "category": CATEGORY},
}  # fmt: skip
TRIES = {"version": 1, "tries": [{"try_number": 1, "cause": QUOTE}]}


class PerEntityAuthManager(SimpleAuthManager):
    """The token of a user is the user's name."""

    async def get_user_from_token(self, token: str) -> SimpleAuthManagerUser:
        """The user of a token."""
        return SimpleAuthManagerUser(username=token, role=None)

    def is_authorized_dag(
        self,
        *,
        method: str,
        user: SimpleAuthManagerUser,
        access_entity: DagAccessEntity | None = None,
        details: DagDetails | None = None,
    ) -> bool:
        """Whether the table has this right."""
        dag_id = details.id if details and details.id else ""
        return method == "GET" and access_entity in RIGHTS[user.username].get(dag_id, ())


def fill_database() -> None:
    """A training that has failed, in each DAG."""
    load: Any = models
    load.import_all_models()
    Base.metadata.create_all(settings.engine)
    now = datetime.datetime.now(datetime.UTC)
    with create_session() as session:
        session.execute(text("PRAGMA foreign_keys=OFF"))
        session.add(DagBundleModel(name="bundle"))
        for dag_id in DAGS:
            key = {"dag_id": dag_id, "run_id": "run", "task_id": "train", "map_index": -1}
            run = DagRun(dag_id=dag_id, run_id="run", run_type="manual", state=DagRunState.RUNNING)
            dag = {"dag_id": dag_id, "bundle_name": "bundle", "fileloc": "x", "max_active_tasks": 1}
            dag |= {"max_consecutive_failed_dag_runs": 0, "has_task_concurrency_limits": False}
            session.execute(DagModel.__table__.insert().values(**dag))
            session.add(run)
            session.flush()
            row = {"id": uuid.uuid4(), **key, "state": "failed", "try_number": 2, "max_tries": 2, "pool": "p"}
            row |= {"pool_slots": 1, "start_date": now, "updated_at": now, "executor_config": {}}
            session.execute(TaskInstance.__table__.insert().values(**row))
            session.execute(TaskInstanceNote.__table__.insert().values(ti_id=row["id"], content=f"note on {dag_id}"))
            for name, value in ((STATUS_XCOM, STATUS), (SUMMARY_XCOM, {"cause": QUOTE, "category": CATEGORY})):
                xcom = {"dag_run_id": run.id, "key": name, "value": json.dumps(value), "timestamp": now}
                session.execute(XComModel.__table__.insert().values(**key, **xcom))
            state = {"dag_run_id": run.id, "key": TRIES_STATE, "value": json.dumps(TRIES), "updated_at": now}
            with contextlib.suppress(ImportError):  # below 3.3
                from airflow.models.task_state_store import TaskStateStoreModel

                session.execute(TaskStateStoreModel.__table__.insert().values(**key, **state))


def answers(client: TestClient, user: str) -> dict[str, Any]:
    """The status and text of each page for a user."""
    headers = {"Authorization": f"Bearer {user}"}
    paths = {dag: f"/training?dag_id={dag}&run_id=run&task_id=train" for dag in DAGS}
    paths |= {f"update of {dag}": path.replace("/training", "/training/update") for dag, path in paths.items()}
    paths |= {"list": "/trainings", "update of the list": "/trainings/update"}
    both = urlencode([("training", f"dag_id={dag}&run_id=run&task_id=train") for dag in DAGS])
    paths |= {"comparison": f"/compare?{both}", "update of the comparison": f"/compare/update?{both}"}
    paths |= {"second page": "/trainings?after=2030-01-01T00:00:00%2B00:00_0"}
    paths |= {"list with text": f"/trainings/update?text={QUOTE}"}
    paths |= {"comparison of one": f"/compare?{both.partition('&')[0]}"}
    paths |= {"before mine": "/compare/before?dag_id=mine&run_id=run&task_id=train"}
    found = {name: client.get(path, headers=headers) for name, path in paths.items()}
    return {name: [answer.status_code, answer.text] for name, answer in found.items()}


def main() -> None:
    """Write what each user gets to the file that the first argument names."""
    fill_database()
    init_auth_manager()
    client = TestClient(build())
    pathlib.Path(sys.argv[1]).write_text(json.dumps({user: answers(client, user) for user in RIGHTS}))


if __name__ == "__main__":
    main()
