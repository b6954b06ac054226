"""The list of running trainings: what it reads, and how often."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import TaskRecord
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.plugin.running import CACHE_SECONDS, MAX_ROWS, OLD_READS, RunningTrainings

NOW = 1000.0
READABLE = "team-a"


class Database:
    """120 trainings, newest first, of two DAGs in turns. Counts what is read."""

    def __init__(self) -> None:
        keys = [TaskInstanceId(("team-a", "team-b")[n % 2], f"run-{n:03}", "train") for n in range(120)]
        self.records = [TaskRecord(key, "deferred", 1, 0.0, None) for key in keys]
        self.reads: Counter[str] = Counter()
        self.rows = 0  #: of statuses
        self.may_answer = threading.Event()
        self.may_answer.set()

    def active_trainings(self) -> list[TaskRecord]:
        self.reads["list"] += 1
        return self.records

    def read_statuses(self, keys: Sequence[TaskInstanceId]) -> dict[TaskInstanceId, Mapping[str, Any]]:
        self.reads["statuses"] += 1
        self.rows += len(keys)
        self.may_answer.wait()
        return {key: {"phase": "Running"} for key in keys}

    def readable_dag_ids(self, user: str, dag_ids: set[str]) -> set[str]:
        return dag_ids if user == "admin" else dag_ids & {READABLE}


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    """In place of Airflow's."""
    here = Database()
    for name in ("active_trainings", "read_statuses", "readable_dag_ids"):
        monkeypatch.setattr(compat_server, name, getattr(here, name))
    return here


def test_all_viewers_share_what_is_read_of_the_rows_that_are_shown(database: Database) -> None:
    running = RunningTrainings(cache_seconds=3600.0)
    for _ in range(100):
        shown = running.view("admin", NOW)
    assert (len(shown.rows), shown.count) == (MAX_ROWS, 120)
    assert [row["run_id"] for row in shown.rows] == [f"run-{n:03}" for n in range(MAX_ROWS)]
    assert (database.reads, database.rows) == ({"list": 1, "statuses": 1}, MAX_ROWS)


def test_row_that_cannot_be_read_breaks_no_list(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    odd: list[Mapping[str, Any]] = [compat_server.UNREADABLE, {"phase": deep, "replicas": {"count": 1e300}}]
    monkeypatch.setattr(compat_server, "read_statuses", lambda keys: {key: odd[n] for n, key in enumerate(keys[:2])})
    rows = RunningTrainings().view("admin", NOW).rows
    assert len(rows) == MAX_ROWS
    assert [row["phase"] for row in rows[:3]] == ["can't be read", "can't be read", ""]


def test_rows_of_other_dags_are_neither_shown_nor_counted(database: Database) -> None:
    shown = RunningTrainings().view("somebody", NOW)
    assert {row["dag_id"] for row in shown.rows} == {READABLE}
    assert (len(shown.rows), shown.count) == (MAX_ROWS, 60)


def test_list_is_read_again_when_the_cache_has_expired(database: Database) -> None:
    running = RunningTrainings(cache_seconds=0.0)
    running.view("admin", NOW)
    del database.records[1:]
    assert running.view("admin", NOW).count == 1
    assert database.reads == {"list": 2, "statuses": 2}


def test_viewers_do_not_wait_while_another_one_reads_again(database: Database) -> None:
    now = [100.0]
    running = RunningTrainings(cache_seconds=5.0, clock=lambda: now[0])
    running.view("admin", NOW)
    now[0] += 5.0
    database.may_answer.clear()
    with ThreadPoolExecutor(101) as viewers:
        first = viewers.submit(running.view, "admin", NOW)
        while database.reads["statuses"] < 2:
            time.sleep(0.001)
        others = [viewers.submit(running.view, "admin", NOW) for _ in range(100)]
        assert all(len(other.result(timeout=60).rows) == MAX_ROWS for other in others)
        assert not first.done()
        assert database.reads == {"list": 2, "statuses": 2}
        database.may_answer.set()
        assert len(first.result(timeout=60).rows) == MAX_ROWS


@pytest.mark.parametrize("age", [None, CACHE_SECONDS * OLD_READS], ids=["nothing was read", "it is old"])
def test_viewers_do_not_wait_for_each_other_if_there_is_nothing_to_show(database: Database, age: float | None) -> None:
    now = [100.0]
    running = RunningTrainings(clock=lambda: now[0])
    if age is not None:
        running.view("admin", NOW)
        now[0] += age
    database.may_answer.clear()
    before = database.reads["statuses"]
    with ThreadPoolExecutor(2) as viewers:
        both = [viewers.submit(running.view, user, NOW) for user in ("admin", "somebody")]
        while database.reads["statuses"] < before + 2:
            time.sleep(0.001)
        database.may_answer.set()
        assert [one.result(timeout=60).count for one in both] == [120, 60]
