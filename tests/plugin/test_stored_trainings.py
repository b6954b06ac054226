"""What the list of running trainings reads from real databases: records and statuses of Airflow's own models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import database

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [database.SQLITE, pytest.param(database.POSTGRESQL, marks=pytest.mark.thorough)])
def test_statuses_of_50_trainings_are_read_in_one_query(
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
        "newest_first": True,
        "record": ["deferred", 2, True],
        "queries": 1,
        "right": True,
        "changed": [{"phase": "Failed"}, "Running"],
        "none": {},
        "not_active": [],
    }
