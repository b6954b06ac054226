"""The part of `compat` for Airflow's API server: its database models and its rights. Only the plugin imports it.

Sources: airflow.api_fastapi.core_api.security and airflow.models of 3.2.2 and 3.3.2. tests/e2e/test_training_page.py
uses all of it on a real API server.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import STATUS_XCOM, SUMMARY_XCOM, TRIES_STATE
from airflow_provider_ktrain.core.identity.names import TaskInstanceId

ACTIVE_STATES = ("running", "deferred")
#: The parts of a DAG that the pages show, named as in Airflow's `DagAccessEntity`.
SHOWN_PARTS = ("TASK_INSTANCE", "XCOM")
MAX_STORED_CHARS = 256 * 1024  #: How much of a value is read: any task may store something else under our keys.
#: Stands for a status that can't be read.
UNREADABLE: Mapping[str, Any] = {"unreadable": True}
MAX_LISTED = 10_000  #: Trainings that are read for a list, the newest ones.
MAX_FIELD_CHARS = 1024  #: How much of one field of a summary is searched; ours have less.
ROWS_AT_ONCE = 500  #: How many rows are fetched from the database at once.
#: How long a triggerer with room may take to start a new trigger. Usually, it takes a second or two.
TAKEOVER_SECONDS = 60.0


@dataclass(frozen=True)
class TaskRecord:
    """What Airflow's database has about a task instance.

    :param started_at, ended_at: epoch seconds; None if the try has not begun or ended.
    :param followed: whether a triggerer that sends heartbeats has the trigger of a deferred task. Default: None, not
        known: the task isn't deferred, or only just.
    :param max_tries: only a clear changes it. Default: None, not known.
    :param note: the note about it in Airflow. Default: empty, there is none.
    :param summary: `core.reporting.summary`, from `find_task` only. Default: empty, there is none or it isn't known.
    """

    key: TaskInstanceId
    state: str
    try_number: int
    started_at: float | None
    ended_at: float | None
    followed: bool | None = None
    max_tries: int | None = None
    note: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """Which trainings to list.

    :param dag_ids: of these DAGs.
    :param states: in one of these states of Airflow. Default: empty, in any.
    :param since, until: whose try began from one time on, and before another. Default: None, at any time.
    :param task: only of this task and map index, in any run. Default: None, of all.
    :param ids: only the task instances with these ids. Default: None, all.
    """

    dag_ids: frozenset[str]
    states: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    task: TaskInstanceId | None = None
    ids: tuple[str, ...] | None = None


class Cost(NamedTuple):
    """What is stored about a training of a list that sums and searches need.

    :param id: of the task instance.
    :param summary: with `usage`, `state`, `category` and `cause`; a field that is not stored is None.
    :param status: with `usage`; only if nobody has stored how the training ended.
    """

    id: str
    state: str
    try_number: int
    summary: Mapping[str, Any]
    status: Mapping[str, Any]


@dataclass(frozen=True)
class Listed:
    """A training of a list.

    :param position: for `trainings`, to go on after this one.
    :param summary: `core.reporting.summary`, or UNREADABLE.
    """

    position: str
    record: TaskRecord
    summary: Mapping[str, Any]


def shows_tab_everywhere() -> bool:
    """`[ktrain] training_tab`: whether tasks have a tab with the training page on Airflow below 3.4.

    There the tab is shown on every task of every DAG.
    """
    from airflow.sdk.configuration import conf

    return bool(conf.getboolean("ktrain", "training_tab", fallback=False))


def scopes_tabs() -> bool:
    """Whether Airflow shows a plugin's tab only on the tasks of some operators: 3.4 and newer."""
    from airflow import __version__

    major, minor = (int(part) for part in __version__.split(".")[:2])
    return (major, minor) >= (3, 4)


def user_dependency() -> Any:
    """A FastAPI dependency: the user who asks. Without a valid token the answer is 401."""
    from airflow.api_fastapi.core_api.security import get_user

    return get_user


def rights_dependencies() -> list[Any]:
    """FastAPI dependencies: the user may read the task instances and XComs of the DAG in the query. Else 403."""
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.core_api.security import requires_access_dag
    from fastapi import Depends

    return [Depends(requires_access_dag("GET", DagAccessEntity[part])) for part in SHOWN_PARTS]


def may_read(user: Any, dag_id: str, *parts: str) -> bool:
    """Whether the user may read parts of a DAG."""
    from airflow.models.dag import DagModel

    return _may_read(user, dag_id, DagModel.get_team_name(dag_id), parts)


def rights(user: Any, dag_ids: Iterable[str]) -> dict[str, bool]:
    """The DAGs whose task instances and XComs the user may read, each with whether their logs, too."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.models.dag import DagModel

    wanted = set(dag_ids)
    candidates = sorted(wanted and wanted & get_auth_manager().get_authorized_dag_ids(user=user, method="GET"))
    teams = DagModel.get_dag_id_to_team_name_mapping(candidates) if candidates else {}
    readable = [dag_id for dag_id in candidates if _may_read(user, dag_id, teams.get(dag_id), SHOWN_PARTS)]
    return {dag_id: _may_read(user, dag_id, teams.get(dag_id), ("TASK_LOGS",)) for dag_id in readable}


def _may_read(user: Any, dag_id: str, team: str | None, parts: Iterable[str]) -> bool:
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails

    details = DagDetails(id=dag_id, team_name=team)
    return all(
        get_auth_manager().is_authorized_dag(
            method="GET", user=user, access_entity=DagAccessEntity[part], details=details
        )
        for part in parts
    )


def find_task(key: TaskInstanceId) -> TaskRecord | None:
    """The task instance, with its note and summary; None if there is none."""
    from airflow.models.taskinstance import TaskInstance, TaskInstanceNote
    from airflow.models.xcom import XComModel
    from sqlalchemy import select

    note = select(TaskInstanceNote.content).where(TaskInstanceNote.ti_id == TaskInstance.id).scalar_subquery()
    is_summary = XComModel.key == SUMMARY_XCOM, *_is(XComModel, key)
    summary = select(_text_of(XComModel.value)).where(*is_summary).scalar_subquery()
    columns = *_task_columns(), note.label("note"), summary.label("summary")
    with _session() as session:
        found = session.execute(select(*columns).where(*_is(TaskInstance, key))).first()
        if found is None:
            return None
        record = replace(_record(found), note=found.note or "", summary=_mapping(found.summary) or {})
        return replace(record, followed=_followed(session, key)) if record.state == "deferred" else record


def _followed(session: Any, key: TaskInstanceId) -> bool | None:
    """Whether a triggerer that sends heartbeats has the trigger of a deferred task; None if the trigger is new."""
    from airflow.jobs.job import Job
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.trigger import Trigger
    from sqlalchemy import select

    wanted = (
        select(Trigger.created_date, Job)
        .join(TaskInstance, TaskInstance.trigger_id == Trigger.id)
        .outerjoin(Job, Job.id == Trigger.triggerer_id)
        .where(*_is(TaskInstance, key))
    )
    row = session.execute(wanted).first()
    if row is None:  # its event has fired
        return None
    if row.Job is not None and row.Job.is_alive():
        return True
    return False if time.time() - row.created_date.timestamp() > TAKEOVER_SECONDS else None


def summarized_dags() -> dict[str, float]:
    """The DAGs that have a training with a summary, and since when, in epoch seconds."""
    from airflow.models.xcom import XComModel
    from sqlalchemy import func, select

    columns = XComModel.dag_id, func.min(XComModel.timestamp)
    with _session() as session:
        rows = session.execute(select(*columns).where(XComModel.key == SUMMARY_XCOM).group_by(XComModel.dag_id)).all()
    return {dag_id: at.timestamp() for dag_id, at in rows}


def trainings(selection: Selection, after: str, most: int) -> list[Listed]:
    """The newest trainings that have begun and have a summary, newest first, in one query.

    :param after: the position of the training before the first one. Empty: begin with the newest.
    :param most: so many of them.
    """
    with _session() as session:
        rows = session.execute(trainings_query(selection, after, most)).all()
    found = [(row, _mapping(row.summary)) for row in rows]
    return [Listed(_position(row), _record(row), UNREADABLE if one is None else one) for row, one in found]


def costs(selection: Selection, after: str = "") -> Generator[Cost]:
    """What the newest MAX_LISTED trainings cost, and why they failed, newest first.

    They are fetched while they are consumed, in one query.

    :param after: as for `trainings`.
    """
    with _session() as session:
        query = costs_query(selection, after, session.get_bind().dialect.name)
        for identifier, state, try_number, *found in session.execute(query.execution_options(yield_per=ROWS_AT_ONCE)):
            held, wasted, tries, ended, category, cause, whole, own_held, own_wasted, whole_status = found
            summary: Mapping[str, Any] = {"state": ended, "category": category, "cause": cause}
            summary = {**summary, "usage": {"held": held, "wasted": wasted, "tries": tries}}
            status: Mapping[str, Any] = {"usage": {"held": own_held, "wasted": own_wasted}}
            summary = summary if whole is None else _mapping(whole) or UNREADABLE
            status = status if whole_status is None else _mapping(whole_status) or UNREADABLE
            yield Cost(identifier, state or "", try_number or 0, summary, status)


def costs_query(selection: Selection, after: str, dialect: str) -> Any:
    """The query of `costs`. To take fields from the database's JSON is faster than to read all of it as text.

    A whole summary or status follows its fields if it has no version: an XCom backend may have stored JSON in a text.
    """
    from airflow.models.taskinstance import TaskInstance as Ti
    from airflow.models.xcom import XComModel
    from sqlalchemy import Text, and_, case, cast, func, or_, true
    from sqlalchemy.orm import aliased

    def fields(value: Any, *paths: tuple[str, ...]) -> list[Any]:
        is_json = func.json_valid(value) == 1 if dialect == "sqlite" else true()  # others store nothing else
        texts = [
            case((is_json, func.substr(value[path].as_string(), 1, MAX_FIELD_CHARS))) for path in (*paths, ("version",))
        ]
        return [*texts[:-1], case((texts[-1].is_(None), _text_of(value)))]

    status, amounts = aliased(XComModel), (("usage", "held"), ("usage", "wasted"))
    of_summary = fields(XComModel.value, *amounts, ("usage", "tries"), ("state",), ("category",), ("cause",))
    state = of_summary[3]
    unfinished = or_(Ti.state.in_(ACTIVE_STATES), state.is_(None), state == "running")
    columns = cast(Ti.id, Text), Ti.state, Ti.try_number, *of_summary, *fields(status.value, *amounts)
    newest = _newest(selection, after, MAX_LISTED, *columns)
    return newest.outerjoin(status, and_(unfinished, status.key == STATUS_XCOM, *_is(status, Ti)))


def trainings_query(selection: Selection, after: str, most: int) -> Any:
    """The query of `trainings`. A position that can't be read counts as none.

    It sorts rows without summaries: databases take long to make text of thousands of them.
    """
    from airflow.models.taskinstance import TaskInstance as Ti
    from airflow.models.xcom import XComModel
    from sqlalchemy import and_, select

    newest = _newest(selection, after, most, Ti.id, *_task_columns()).subquery()
    return (
        select(*newest.c, _text_of(XComModel.value).label("summary"))
        .join(XComModel, and_(XComModel.key == SUMMARY_XCOM, *_is(XComModel, newest.c)))
        .order_by(newest.c.start_date.desc(), newest.c.id.desc())
    )


def _newest(selection: Selection, after: str, most: int, *columns: Any) -> Any:
    from airflow.models.taskinstance import TaskInstance as Ti
    from airflow.models.xcom import XComModel
    from sqlalchemy import and_, or_, select

    wanted: list[Any] = [Ti.dag_id.in_(sorted(selection.dag_ids)), Ti.start_date.is_not(None)]
    if selection.states:
        wanted.append(Ti.state.in_(selection.states))
    if selection.since is not None:
        wanted.append(Ti.start_date >= selection.since)
    if selection.until is not None:
        wanted.append(Ti.start_date < selection.until)
    if selection.task is not None:
        wanted += [Ti.task_id == selection.task.task_id, Ti.map_index == selection.task.map_index]
    if selection.ids is not None:
        wanted.append(Ti.id.in_([uuid.UUID(one) for one in selection.ids]))
    if (place := _place(after)) is not None:
        wanted.append(or_(Ti.start_date < place[0], and_(Ti.start_date == place[0], Ti.id < place[1])))
    has_summary = and_(XComModel.key == SUMMARY_XCOM, *_is(XComModel, Ti))
    newest = select(*columns).select_from(Ti).join(XComModel, has_summary).where(*wanted)
    return newest.order_by(Ti.start_date.desc(), Ti.id.desc()).limit(most)


def _position(row: Any) -> str:
    """Empty for a task instance that has not begun."""
    return "" if row.start_date is None else f"{row.start_date.isoformat()}_{row.id}"


def _place(position: str) -> tuple[datetime, uuid.UUID] | None:
    began, _, identifier = position.rpartition("_")
    try:
        at = datetime.fromisoformat(began)
        return (at, uuid.UUID(identifier)) if at.tzinfo else None
    except ValueError:
        return None


def find_trainings(keys: Sequence[TaskInstanceId]) -> dict[TaskInstanceId, Listed]:
    """The task instances that exist, with their summaries, in one query. The summary of one without is empty."""
    from airflow.models.taskinstance import TaskInstance as Ti
    from airflow.models.xcom import XComModel
    from sqlalchemy import and_, or_, select

    wanted = (
        select(Ti.id, *_task_columns(), _text_of(XComModel.value).label("summary"))
        .outerjoin(XComModel, and_(XComModel.key == SUMMARY_XCOM, *_is(XComModel, Ti)))
        .where(or_(*(and_(*_is(Ti, key)) for key in keys)))
    )
    with _session() as session:
        found = [Listed(_position(row), _record(row), _mapping(row.summary) or {}) for row in session.execute(wanted)]
    return {listed.record.key: listed for listed in found}


def read_statuses(keys: Sequence[TaskInstanceId]) -> dict[TaskInstanceId, Mapping[str, Any]]:
    """The statuses that were last written for task instances, in one query; UNREADABLE if one can't be read."""
    from airflow.models.xcom import XComModel
    from sqlalchemy import and_, or_, select

    value = _text_of(XComModel.value)
    columns = (XComModel.dag_id, XComModel.run_id, XComModel.task_id, XComModel.map_index, value)
    these = or_(*(and_(*_is(XComModel, key)) for key in keys))
    with _session() as session:
        rows = session.execute(select(*columns).where(XComModel.key == STATUS_XCOM, these)).all()
    found = {TaskInstanceId(*row[:-1]): _mapping(row[-1]) for row in rows}
    return {key: UNREADABLE if status is None else status for key, status in found.items()}


def read_tries(key: TaskInstanceId) -> Mapping[str, Any]:
    """What is stored about the task's tries (`with_try`); empty on Airflow below 3.3, which has no task store."""
    try:
        from airflow.models.task_state_store import TaskStateStoreModel
    except ImportError:  # below 3.3
        return {}
    from sqlalchemy import select

    model = TaskStateStoreModel
    with _session() as session:
        value = session.scalar(select(_text_of(model.value)).where(model.key == TRIES_STATE, *_is(model, key)))
    return _mapping(value) or {}


def _session() -> Any:
    from airflow.utils.session import create_session

    return create_session(scoped=False)


def _task_columns() -> tuple[Any, ...]:
    from airflow.models.taskinstance import TaskInstance as Ti

    return (
        Ti.dag_id, Ti.run_id, Ti.task_id, Ti.map_index, Ti.state, Ti.try_number, Ti.start_date, Ti.end_date,
        Ti.max_tries,
    )  # fmt: skip


def _is(model: Any, key: Any) -> Iterable[Any]:
    """Conditions: the row of `model` is about the task instance `key`, which may be another model."""
    return (
        model.dag_id == key.dag_id,
        model.run_id == key.run_id,
        model.task_id == key.task_id,
        model.map_index == key.map_index,
    )


def _record(row: Any) -> TaskRecord:
    started, ended = (None if at is None else at.timestamp() for at in (row.start_date, row.end_date))
    key = TaskInstanceId(row.dag_id, row.run_id, row.task_id, row.map_index)
    return TaskRecord(key, str(row.state or ""), int(row.try_number or 0), started, ended, max_tries=row.max_tries)


def _text_of(column: Any) -> Any:
    """A column of JSON as text, which its driver doesn't decode; NULL if it has more than MAX_STORED_CHARS."""
    from sqlalchemy import Text, case, cast, func

    text = cast(column, Text)
    return case((func.length(text) <= MAX_STORED_CHARS, text))


def _mapping(text: str | None) -> Mapping[str, Any] | None:
    """What is stored as JSON text, or as JSON of such a text; None if it isn't a mapping."""
    value: Any = text
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
    return value if isinstance(value, Mapping) else None
