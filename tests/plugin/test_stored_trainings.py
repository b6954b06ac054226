"""What the table of trainings reads from real databases: records and statuses of Airflow's own models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy.dialects import mysql

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import Selection
from tests.e2e import database

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [database.SQLITE, pytest.param(database.POSTGRESQL, marks=pytest.mark.thorough)])
def test_number_of_queries_does_not_grow_with_trainings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTRAIN_TEST_DATABASE", name)
    with database.database(tmp_path) as url:
        environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url}
        command = [sys.executable, "-m", "tests.plugin.stored_trainings"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "database": name,
        "dags": ["team's 100%", "team-a", "team-b"],
        "newest_first": True,
        "summary": [{"cause": "run-0"}, "deferred", 2],
        "queries": [1, 1, 1, 1],
        "costs": [
            [None, None, None, "run-0"],  # the newest, of another run with this name
            [None, None, None, None],
            [None, None, None, None],
            [7, 1, None, "of a text"],
            ["60.5", None, "user code", "x" * compat_server.MAX_FIELD_CHARS],
            [None, None, None, "run-0"],
        ],
        "by id": True,
        "after": True,
        "of a DAG": 48,
        "ended": ["earlier"],
        "of two seconds": ["run-1", "run-0"],
        "of a task": 1,
        "by key": [{"cause": "run-7"}, {}, False],
        "right": True,
        "changed": [{"phase": "Failed"}, "Running"],
        "none": {},
    }


def test_query_of_the_table_for_mysql() -> None:
    """It is only compiled: its JSON is read as text, and it has no clause that MySQL lacks."""
    selection = Selection(frozenset({"team-a"}), ("failed",), datetime(2026, 11, 28, tzinfo=UTC))
    after = "2026-11-28T10:00:00+00:00_00000000-0000-0000-0000-000000000001"
    rows = compat_server.trainings_query(selection, after, 50), compat_server.costs_query(selection, after, "mysql")
    trainings, costs = (" ".join(str(query.compile(dialect=mysql.dialect())).split()) for query in rows)
    assert "THEN CAST(xcom.value AS CHAR) END AS summary" in trainings
    assert "JSON_UNQUOTE(JSON_EXTRACT(xcom.value, %s))" in costs
    for sql in (trainings, costs):
        assert "ORDER BY task_instance.start_date DESC, task_instance.id DESC LIMIT" in sql
        assert "NULLS" not in sql
        assert "json_valid" not in sql
