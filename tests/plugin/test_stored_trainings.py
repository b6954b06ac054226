"""What the table of trainings reads from real databases: records and statuses of Airflow's own models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.dialects import mysql

from airflow_provider_ktrain import compat_server
from airflow_provider_ktrain.compat_server import MAX_FIELD_CHARS, UNREADABLE, Selection
from tests.e2e import database

ROOT = Path(__file__).resolve().parents[2]
SO_FAR = {"usage": {"held": "9.5", "wasted": None}}


def cost(state: str | None, cause: str, category: str | None = None, used: Sequence[str | None] = (None,) * 3) -> Any:
    """The fields of a summary that are summed up or searched."""
    held, wasted, tries = used
    usage = {"held": held, "wasted": wasted, "tries": tries}
    return {"state": state, "category": category, "cause": cause, "usage": usage}


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
        "summary": [{"version": 1, "state": "running", "cause": "run-0"}, "deferred", 2],
        "queries": [1, 1, 1, 1],
        "costs": [
            ["success", 2, cost("succeeded", "run-0"), {"usage": {"held": None, "wasted": None}}],
            ["deferred", 2, cost("running", "run-0"), {"usage": {"held": None, "wasted": None}}],  # it is too large
            ["deferred", 2, cost("running", "run-0"), UNREADABLE],
            ["deferred", 2, cost("running", "run-0"), UNREADABLE],
            ["deferred", 2, UNREADABLE, SO_FAR],
            ["deferred", 2, UNREADABLE, SO_FAR],
            ["deferred", 2, {"version": 1, "usage": {"held": 7, "wasted": 1}, "cause": "of a text"}, SO_FAR],
            ["deferred", 2, cost(None, "x" * MAX_FIELD_CHARS, "user code", ["60.5", None, "1"]), SO_FAR],
            ["deferred", 2, cost("running", "run-0"), SO_FAR],
        ],
        "by id": True,
        "after": True,
        "of a DAG": 48,
        "ended": ["earlier"],
        "of two seconds": ["run-1", "run-0"],
        "of a task": 1,
        "by key": [{"version": 1, "state": "running", "cause": "run-7"}, {}, False],
        "page": [{"version": 1, "usage": {"held": 7, "wasted": 1}, "cause": "of a text"}, {}, {}, None],
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
