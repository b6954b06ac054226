"""Trainings beside each other: what a comparison shows, without Airflow's database and without a browser."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import Environment, PackageLoader

from airflow_provider_ktrain.compat_server import UNREADABLE, Listed, TaskRecord
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.plugin.application import key_of
from airflow_provider_ktrain.plugin.stored_texts import HIDDEN_CAUSE
from airflow_provider_ktrain.plugin.training_table import comparison
from tests.plugin.test_views import KEY

TEMPLATES = Environment(loader=PackageLoader("airflow_provider_ktrain.plugin"), autoescape=True)
TEMPLATES.globals.update(root="/ktrain", airflow="")


def training(run: str, state: str = "success", **summary: Any) -> Listed:
    return Listed("", TaskRecord(TaskInstanceId("dag", run, "train"), state, 1, 0.0, 60.0), summary)


def test_curves_have_all_steps_and_facts_only_what_differs() -> None:
    before = training("a", metrics={"loss": [0.5, 0.4]}, parameters={"lr": "0.1", "seed": "1"}, usage={"held": 60.0})
    after = training("b", metrics={"loss": [0.3, 0.3]}, parameters={"lr": "0.2", "seed": "1"}, usage={"held": 120.0})
    curves = {"loss": [[0, 1.0], [10, 0.5]]}, {"loss": [[0, 1.0], [5, "NaN"], [10, 0.3]], "accuracy": [[0, 1]]}
    shown = comparison([(before, {"series": curves[0]}, True), (after, {"series": curves[1]}, True)], 100.0)
    assert shown.labels == ["A", "B"]
    assert shown.series == {"loss": [[0, 5, 10], [1.0, None, 0.5], [1.0, "NaN", 0.3]]}, "one point is no curve"
    assert ("loss: last (best)", ["0.5 (0.4)", "0.3 (0.3)"]) in shown.facts
    assert ("lr", ["0.1", "0.2"]) in shown.facts
    assert ("GPU time", ["1 min", "2 min"]) in shown.facts
    assert "seed" not in dict(shown.facts)
    text = TEMPLATES.get_template("compare.html").render(view=shown, query="")
    assert "/ktrain/training?dag_id=dag&amp;run_id=b&amp;task_id=train&amp;map_index=-1" in text
    assert not shown.active


def test_gpu_time_that_is_not_all_says_so() -> None:
    retried = Listed("", TaskRecord(KEY, "success", 3, 0.0, 60.0), {"usage": {"tries": 1, "held": 60.0}})
    used = {"tries": 1, "held": 60.0}
    shown = comparison([(retried, None, True), (training("a", usage=used), None, True)], 100.0)
    assert ("GPU time counted", ["this try only", ""]) in shown.facts


def test_durations_of_running_trainings_run_on_in_the_browser() -> None:
    shown = comparison([(training("a", "running"), None, True), (training("b"), None, True)], 100.0)
    text = TEMPLATES.get_template("compare.html").render(view=shown, query="")
    assert text.count("data-rate=") == 1


def test_causes_need_the_right_to_the_logs() -> None:
    failed = training("a", "failed", cause="a line of the log", category="user code")
    shown = comparison([(failed, None, False), (failed, None, True)], 100.0)
    assert dict(shown.facts)["Cause"] == [HIDDEN_CAUSE, "a line of the log"]


def test_training_that_cannot_be_read_breaks_no_comparison() -> None:
    odd = Listed("", TaskRecord(KEY, "deferred", 1, None, None), UNREADABLE)
    shown = comparison([(odd, UNREADABLE, True), (training("a"), {"series": {"loss": [[1, 2], [[], 3]]}}, True)], 100.0)
    assert [row["state"] for row in shown.rows] == ["can't be read", "Succeeded"]
    assert shown.active


@pytest.mark.parametrize("query", ["", "dag_id=a&run_id=b", "dag_id", "%ff"])
def test_training_of_a_request_that_is_incomplete(query: str) -> None:
    assert key_of(query) is None
    assert key_of("dag_id=a+b&run_id=r%2B1&task_id=t&map_index=3") == TaskInstanceId("a b", "r+1", "t", 3)
