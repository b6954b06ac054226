"""The list of running trainings: what it reads, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import TaskRecord
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.plugin.running import MAX_ROWS, RunningTrainings

NOW = 1000.0
READABLE = "team-a"


class Database:
    """120 trainings, newest first, of two DAGs in turns. Counts what is read."""

    def __init__(self) -> None:
        keys = [TaskInstanceId(("team-a", "team-b")[n % 2], f"run-{n:03}", "train") for n in range(120)]
        self.records = [TaskRecord(key, "deferred", 1, 0.0, None) for key in keys]
        self.reads: Counter[str] = Counter()

    def active_trainings(self) -> list[TaskRecord]:
        self.reads["list"] += 1
        return self.records

    def read_status(self, key: TaskInstanceId) -> Mapping[str, Any]:
        self.reads[key.run_id] += 1
        return {"phase": "Running"}

    def readable_dag_ids(self, user: str, dag_ids: set[str]) -> set[str]:
        return dag_ids if user == "admin" else dag_ids & {READABLE}


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    """In place of Airflow's."""
    here = Database()
    for name in ("active_trainings", "read_status", "readable_dag_ids"):
        monkeypatch.setattr(compat_server, name, getattr(here, name))
    return here


def test_all_viewers_share_what_is_read_of_the_rows_that_are_shown(database: Database) -> None:
    running = RunningTrainings(cache_seconds=3600.0)
    for _ in range(100):
        shown = running.view("admin", NOW)
    assert (len(shown.rows), shown.count) == (MAX_ROWS, 120)
    assert [row["run_id"] for row in shown.rows] == [f"run-{n:03}" for n in range(MAX_ROWS)]
    assert database.reads == {"list": 1, **{f"run-{n:03}": 1 for n in range(MAX_ROWS)}}


def test_rows_of_other_dags_are_neither_shown_nor_counted(database: Database) -> None:
    shown = RunningTrainings().view("somebody", NOW)
    assert {row["dag_id"] for row in shown.rows} == {READABLE}
    assert (len(shown.rows), shown.count) == (MAX_ROWS, 60)


def test_list_is_read_again_when_the_cache_has_expired(database: Database) -> None:
    running = RunningTrainings(cache_seconds=0.0)
    running.view("admin", NOW)
    del database.records[1:]
    assert running.view("admin", NOW).count == 1
    assert database.reads["list"] == 2
    assert database.reads["run-000"] == 2
