"""Run by test_stored_trainings in a process with a database of its own: stores trainings, and reads them as pages do.

Tables and rows are those of Airflow's own models. It prints what was read, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow import models, settings
from airflow.models.base import Base
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.sdk.bases.xcom import BaseXCom
from airflow.utils.session import create_session
from airflow.utils.state import TaskInstanceState
from airflow.utils.types import DagRunType
from sqlalchemy import event, insert, text, update

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import Listed, Selection
from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM
from airflow_provider_ktrain.core.identity.names import TaskInstanceId

START = datetime(2026, 11, 21, 10, tzinfo=UTC)
#: Newest last: 48 runs of a task, two mapped ones of another DAG, and those of STORED.
KEYS = [
    *(TaskInstanceId("team-a", f"run-{n}", "train") for n in range(48)),
    *(TaskInstanceId("team's 100%", "manual__2026-11-21T10:00:00+00:00", "group.train", n) for n in range(2)),
    *(TaskInstanceId("team-b", "run-0", f"odd-{n}") for n in range(3)),
]
#: What can't be read: text that nests too deep, the same as JSON of the database, and an object that is too large.
STORED = ("[" * 100_000, "[" * 5_000 + "]" * 5_000, json.dumps({"phase": "x" * compat_server.MAX_STORED_CHARS}))
#: By run. An XCom backend may store JSON in a text; any task may store something else.
SUMMARIES: dict[str, Any] = {
    "run-1": {"version": 1, "usage": {"held": 60.5, "tries": 1}, "category": "user code", "cause": "x" * 2000},
    "run-2": json.dumps({"version": 1, "usage": {"held": 7, "wasted": 1}, "cause": "of a text"}),
    "run-3": ["neither"],
}
WITHOUT_STATUS = TaskInstanceId("team-b", "run-0", "prepare")
ENDED = TaskInstanceId("team-b", "run-0", "earlier")
MISSING = TaskInstanceId("team-b", "run-0", "was deleted")


def status_of(key: TaskInstanceId) -> Any:
    return {
        "version": 1,
        "usage": {"held": 9.5},
        "phase": "Running",
        "who": f"{key.run_id} ü {key.map_index}",
        "gpus": 0.5,
    }


def fill() -> None:
    models.import_all_models()  # type: ignore[no-untyped-call]
    Base.metadata.create_all(settings.engine)
    with create_session() as session:
        for dag_id, run_id in dict.fromkeys((key.dag_id, key.run_id) for key in KEYS):
            run = {"dag_id": dag_id, "run_id": run_id, "run_type": DagRunType.MANUAL, "run_after": START}
            session.execute(insert(DagRun).values(run))
        for number, key in enumerate((*KEYS, WITHOUT_STATUS, ENDED)):
            of_task = {
                **vars(key), "state": TaskInstanceState.SUCCESS if key == ENDED else TaskInstanceState.DEFERRED,
                "try_number": 2, "pool": "default_pool", "start_date": START + timedelta(seconds=number),
            }  # fmt: skip
            session.execute(insert(TaskInstance).values(of_task))
    with create_session() as session:
        for key in (*KEYS, ENDED):
            ours = {"version": 1, "state": "succeeded" if key == ENDED else "running", "cause": key.run_id}
            others = (SUMMARY_XCOM, SUMMARIES.get(key.run_id, ours)), ("job", {"phase": "another"})
            for name, value in ((STATUS_XCOM, status_of(key)), *others):
                serialized = BaseXCom.serialize_value(value)
                XComModel.set(name, serialized, **vars(key), serialize=False, session=session)  # as its API does
    with create_session() as session:
        column = "CAST(:value AS JSONB)" if session.get_bind().dialect.name == "postgresql" else ":value"
        for key, value in zip(KEYS[-3:], (json.dumps(STORED[0]), *STORED[1:]), strict=True):
            where = {"task": key.task_id, "key": STATUS_XCOM, "value": value}
            session.execute(text(f"UPDATE xcom SET value = {column} WHERE task_id = :task AND key = :key"), where)
        deep = {"value": STORED[1], "key": SUMMARY_XCOM}  # deeper than SQLite takes for JSON
        session.execute(text(f"UPDATE xcom SET value = {column} WHERE run_id = 'run-4' AND key = :key"), deep)


@contextmanager
def counted_queries() -> Iterator[list[str]]:
    queries: list[str] = []

    def note(*given: Any) -> None:
        queries.append(given[2])

    event.listen(settings.engine, "before_cursor_execute", note)
    yield queries
    event.remove(settings.engine, "before_cursor_execute", note)


def found(selection: Selection, after: str = "") -> list[Listed]:
    return compat_server.trainings(selection, after, 100)


def main() -> None:
    fill()
    assert settings.engine is not None
    since = compat_server.summarized_dags()
    every = Selection(frozenset(since))
    with counted_queries() as list_queries:
        listed = found(every)
    with counted_queries() as cost_queries:
        costs = list(compat_server.costs(every))
    by_id = found(replace(every, ids=(costs[3].id, costs[1].id)))
    with counted_queries() as queries:
        statuses = compat_server.read_statuses([*KEYS, WITHOUT_STATUS])
    with counted_queries() as find_queries:
        by_key = compat_server.find_trainings([KEYS[0], KEYS[7], WITHOUT_STATUS, MISSING])
    with create_session() as session:  # the next status of a training replaces the one before
        changed = update(XComModel).where(XComModel.key == STATUS_XCOM, XComModel.run_id == "run-3")
        session.execute(changed.values(value={"phase": "Failed"}))
    right = {key: compat_server.UNREADABLE if key in KEYS[-3:] else status_of(key) for key in KEYS}
    keys = [one.record.key for one in listed]
    two_seconds = Selection(every.dag_ids, since=START, until=START + timedelta(seconds=2))
    print(
        json.dumps(
            {
                "database": settings.engine.dialect.name,
                "dags": sorted(since),
                "newest_first": keys == [ENDED, *KEYS[::-1]],
                "summary": [listed[-1].summary, listed[-1].record.state, listed[-1].record.try_number],
                "queries": [len(list_queries), len(cost_queries), len(queries), len(find_queries)],
                "after": [one.record.key for one in found(every, listed[20].position)] == keys[21:],
                "costs": [one[1:] for one in (*costs[:4], *costs[-5:])],
                "by id": [one.record.key for one in by_id] == [listed[1].record.key, listed[3].record.key],
                "of a DAG": len(found(Selection(frozenset({"team-a"})))),
                "ended": [one.record.key.task_id for one in found(Selection(every.dag_ids, ("success",)))],
                "of two seconds": [one.record.key.run_id for one in found(two_seconds)],
                "of a task": len(found(Selection(every.dag_ids, task=KEYS[48]))),
                "by key": [by_key[KEYS[7]].summary, by_key[WITHOUT_STATUS].summary, MISSING in by_key],
                "page": [
                    record and dict(record.summary)
                    for record in map(compat_server.find_task, (KEYS[2], KEYS[3], WITHOUT_STATUS, MISSING))
                ],
                "right": statuses == right,
                "changed": [(compat_server.read_statuses([KEYS[3]]) or {}).get(KEYS[3]), statuses[KEYS[3]]["phase"]],
                "none": compat_server.read_statuses([WITHOUT_STATUS]),
            }
        )
    )


if __name__ == "__main__":
    main()
