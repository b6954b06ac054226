"""What users see on the pages, by their rights per DAG and per entity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.plugin.rights_site import CATEGORY, DAGS, QUOTE


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[int, str]]]:
    """Status and text of each page, by user."""
    home = tmp_path_factory.mktemp("airflow")
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__CORE__AUTH_MANAGER": "tests.plugin.rights_site.PerEntityAuthManager",
    }
    command = [sys.executable, "-m", "tests.plugin.rights_site", str(home / "answers.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads((home / "answers.json").read_text())
    return {user: {page: (code, text) for page, (code, text) in pages.items()} for user, pages in read.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("user", "readable"),
    [
        ("everything", {"mine", "theirs"}),
        ("one-dag", {"mine"}),
        ("no-xcoms", set()),
        ("no-tasks", set()),
        ("no-logs", {"mine"}),
        ("logs-of-another-dag", {"mine", "theirs"}),
        ("no-entities", set()),
        ("nothing", set()),
    ],
)
def test_page_and_list_need_the_rights_to_task_instances_and_xcoms(
    answers: dict[str, dict[str, tuple[int, str]]], user: str, readable: set[str]
) -> None:
    pages = answers[user]
    for dag in DAGS:
        expected = 200 if dag in readable else 403
        assert (pages[dag][0], pages[f"update of {dag}"][0]) == (expected, expected)
        assert (f"Note in Airflow: note on {dag}" in pages[dag][1]) is (dag in readable)
        for name in ("list", "update of the list"):
            assert (f"dag_id={dag}&" in pages[name][1]) is (dag in readable), name
    for name in ("comparison", "update of the comparison"):
        assert pages[name][0] == (200 if readable == set(DAGS) else 403), name
    assert pages["comparison of one"][0] == 422
    assert pages["before mine"][0] == (404 if "mine" in readable else 403), "there is no run before"


@pytest.mark.parametrize(
    ("user", "with_logs"),
    [
        ("everything", {"mine", "theirs"}),
        ("one-dag", {"mine"}),
        ("no-logs", set()),
        ("logs-of-another-dag", {"theirs"}),
    ],
)
def test_quoted_lines_need_the_right_to_the_logs_of_the_same_dag(
    answers: dict[str, dict[str, tuple[int, str]]], user: str, with_logs: set[str]
) -> None:
    for dag in DAGS:
        for name in (dag, f"update of {dag}"):
            assert (QUOTE in answers[user][name][1]) is (dag in with_logs), name


def test_second_page_leads_back_to_the_newest_trainings(answers: dict[str, dict[str, tuple[int, str]]]) -> None:
    link = '<a href="/ktrain/trainings?">Newest</a>'
    assert link in answers["everything"]["second page"][1]
    assert link not in answers["everything"]["list"][1]


@pytest.mark.parametrize(
    ("user", "quotes"), [("everything", True), ("one-dag", True), ("no-logs", False), ("logs-of-another-dag", True)]
)
def test_table_shows_causes_of_dags_whose_logs_the_user_may_read(
    answers: dict[str, dict[str, tuple[int, str]]], user: str, quotes: bool
) -> None:
    assert (QUOTE in answers[user]["list"][1]) is quotes
    assert (f"({CATEGORY})" in answers[user]["list"][1]) is quotes
    found = answers[user]["list with text"][1]
    assert ("dag_id=mine&" in found) is (user in ("everything", "one-dag"))
