"""An experiment tracker sees which task a training belongs to: MLflow's own server, and the program of the how-to."""

from __future__ import annotations

import importlib.util
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import mlflow_server
from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.mlflow_server import Tracking

DAG = "reports_to_mlflow"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.embedded("its programs import MLflow and reach a server on loopback"),
    pytest.mark.xdist_group("e2e-2"),
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow, of the extra `test`"),
]


@pytest.fixture
def tracking(tmp_path: Any) -> Iterator[Tracking]:
    with mlflow_server.running(tmp_path) as started:
        yield started


def tags_of(run: Any) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


def test_mlflow_runs_name_the_task_and_link_to_it(airflow: Airflow, tracking: Tracking) -> None:
    run_id = airflow.trigger(DAG, {"mlflow": tracking.url})
    airflow.wait_state(DAG, run_id, "train", "success")
    wait_for("the result is stored", lambda: "return_value" in airflow.xcom_keys(DAG, run_id, "train"))
    failed, finished = tracking.runs(DAG)
    assert [run["info"]["status"] for run in (failed, finished)] == ["FAILED", "FINISHED"]
    assert {run["info"]["run_name"] for run in (failed, finished)} == {f"train {run_id}"}
    task = {"airflow.dag_id": DAG, "airflow.run_id": run_id, "airflow.task_id": "train", "airflow.map_index": "-1"}
    for run, number in ((failed, "1"), (finished, "2")):
        assert tags_of(run).items() >= {**task, "airflow.try": number, "airflow.attempt": number}.items()
        page = f"{airflow.url}/dags/{DAG}/runs/{urllib.parse.quote(run_id)}/tasks/train"
        assert tags_of(run)["mlflow.note.content"] == f"[Task in Airflow]({page})"
    result = airflow.xcom(DAG, run_id, "train")
    assert result["mlflow_run"].endswith(f"/runs/{finished['info']['run_id']}")
    assert finished["data"]["metrics"][0]["value"] == pytest.approx(result["loss"])
