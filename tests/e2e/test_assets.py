"""Asset events of trainings under Airflow's own scheduler, triggerer and API server."""

from __future__ import annotations

import urllib.parse
from typing import Any

import pytest

from tests.e2e.airflow import Airflow, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-2")]


def events(airflow: Airflow, dag: str, run: str) -> dict[str, dict[str, Any]]:
    """The extra of the asset events of a run's tasks, by the asset's name. Airflow writes them with the success."""
    query = urllib.parse.urlencode({"source_dag_id": dag, "source_run_id": run})
    found = airflow.call("GET", f"/api/v2/assets/events?{query}")["asset_events"]
    return {event["name"]: event["extra"] for event in found}


def unpause(airflow: Airflow, dag: str) -> set[str]:
    """Let the asset events from now on start runs of a DAG. Returns the ids of the runs that it has already.

    An earlier attempt of the test may have left a run that waits for an approval.
    """
    wait_for(f"the DAG {dag} is known", lambda: airflow.known(dag))
    airflow.call("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})
    runs = airflow.runs(dag)
    for run in runs:
        if run["state"] in ("queued", "running"):
            path = f"/api/v2/dags/{dag}/dagRuns/{urllib.parse.quote(run['dag_run_id'])}"
            airflow.call("PATCH", path, {"state": "failed"})
    return {run["dag_run_id"] for run in runs}


def trained(airflow: Airflow, dag: str, run: str) -> dict[str, Any]:
    """The extra of the training's asset, which is what its XComs contain, without secrets."""
    extra: dict[str, Any] = wait_for("the event of the asset", lambda: events(airflow, dag, run).get("e2e_trained"))
    assert extra["usage"]["held"] > 0
    assert extra == {
        "version": 1,
        "result": {"loss": 0.5, "model_uri": f"s3://e2e/{run}", "password": "***"},
        "model_uri": f"s3://e2e/{run}",
        "metrics": airflow.xcom(dag, run, "train", "metrics"),
        "usage": airflow.xcom(dag, run, "train", "usage"),
        "job": airflow.xcom(dag, run, "train", "job"),
    }
    return extra


def test_event_of_a_training_in_a_worker(airflow: Airflow) -> None:
    run = airflow.trigger("assets_in_worker")
    airflow.wait_state("assets_in_worker", run, "train", "success")
    trained(airflow, "assets_in_worker", run)


def test_event_of_a_deferred_training_and_its_alias_starts_a_dag(airflow: Airflow) -> None:
    consumer = "assets_consumer"
    earlier = unpause(airflow, consumer)
    run = airflow.trigger("assets_deferred")
    airflow.wait_state("assets_deferred", run, "train", "deferred")
    airflow.wait_state("assets_deferred", run, "train", "success")
    extra = trained(airflow, "assets_deferred", run)
    model = f"s3://e2e/{run}"
    assert events(airflow, "assets_deferred", run)[model] == extra

    def received() -> list[Any] | None:
        states = {r["dag_run_id"]: r["state"] for r in airflow.runs(consumer) if r["dag_run_id"] not in earlier}
        assert "failed" not in states.values()
        values = [airflow.xcom(consumer, run, "receive") for run, state in states.items() if state == "success"]
        return next((value for value in values if model in str(value)), None)

    assert wait_for("a run for the alias", received) == [[model, extra]]
