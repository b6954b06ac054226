"""Asset events of trainings under Airflow's own scheduler, triggerer and API server; the example DAGs of assets."""

from __future__ import annotations

import urllib.parse
from typing import Any

import pytest

from tests.e2e.airflow import Airflow, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-1")]


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


def started(airflow: Airflow, dag: str, earlier: set[str]) -> str:
    """The id of the run that an asset event starts."""

    def new() -> list[str]:
        return [run["dag_run_id"] for run in airflow.runs(dag) if run["dag_run_id"] not in earlier]

    return wait_for(f"a run of {dag}", new)[0]


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


def update(airflow: Airflow, name: str, **extra: Any) -> None:
    """Create an event of an asset."""
    assets = airflow.call("GET", f"/api/v2/assets?name_pattern={name}")["assets"]
    (asset,) = (asset["id"] for asset in assets if asset["name"] == name)
    airflow.call("POST", "/api/v2/assets/events", {"asset_id": asset, "extra": extra})


def decide(airflow: Airflow, run: str, option: str) -> str:
    """Answer the request for an approval as a person does in the UI. Returns its subject.

    Airflow 3.3 fails a task that resumes before the scheduler has seen the end of the process that asked: "executor
    finished with state success, but the task instance's state attribute is queued".
    """
    airflow.wait_state("ktrain_promote", run, "approve", "awaiting_input", "deferred")

    def ended() -> bool:
        lines = (airflow.home / "scheduler.out").read_text().splitlines()
        return any("Received executor event" in line and "'approve'" in line and run in line for line in lines)

    wait_for("the process that asked has ended", ended)
    path = f"/api/v2/dags/ktrain_promote/dagRuns/{urllib.parse.quote(run)}/taskInstances/approve/-1/hitlDetails"
    subject = airflow.call("GET", path)["subject"]
    airflow.call("PATCH", path, {"chosen_options": [option]})
    airflow.wait_state("ktrain_promote", run, "approve", "success")
    return str(subject)


def promoted(airflow: Airflow, run: str) -> dict[str, Any] | None:
    """The extra of the event of the promoted model."""
    return events(airflow, "ktrain_promote", run).get("ktrain_example_promoted_model")


@pytest.mark.embedded("needs the images of examples/")
def test_new_data_leads_to_a_model_that_a_person_promotes(airflow: Airflow) -> None:
    earlier = {dag: unpause(airflow, dag) for dag in ("ktrain_retrain", "ktrain_promote")}
    airflow.trigger("new_data")
    retrain, promote = (started(airflow, dag, runs) for dag, runs in earlier.items())
    airflow.wait_state("ktrain_promote", promote, "evaluate", "success")
    model = airflow.xcom("ktrain_retrain", retrain, "train")["model_uri"]
    evaluation = airflow.xcom("ktrain_promote", promote, "evaluate")
    assert model.startswith("file://")
    assert evaluation["model_uri"] == model
    assert promoted(airflow, promote) is None
    assert decide(airflow, promote, "Approve") == f"Promote {model}?"
    airflow.wait_state("ktrain_promote", promote, "promote", "success")
    wait_for("the event of the promoted model", lambda: promoted(airflow, promote) == evaluation)

    airflow.wait_run("ktrain_promote", promote, "success")
    before = unpause(airflow, "ktrain_promote")
    update(airflow, "ktrain_example_model", model_uri=model)  # one that is as good
    rejected = started(airflow, "ktrain_promote", before)
    decide(airflow, rejected, "Reject")
    airflow.wait_state("ktrain_promote", rejected, "promote", "skipped")
    airflow.wait_run("ktrain_promote", rejected, "success")
    assert promoted(airflow, rejected) is None

    before = unpause(airflow, "ktrain_promote")
    update(airflow, "ktrain_example_promoted_model", loss=-1)
    update(airflow, "ktrain_example_model", model_uri=model)
    worse = started(airflow, "ktrain_promote", before)
    airflow.wait_state("ktrain_promote", worse, "evaluate", "failed")
    wait_for("nobody is asked", lambda: airflow.task("ktrain_promote", worse, "approve")["state"] == "upstream_failed")


def test_only_good_models_start_a_dag(airflow: Airflow) -> None:
    """A training that doesn't meet `require` fails for good, in a worker and deferred, and sends no event."""
    dag, consumer = "required", "required_consumer"
    earlier = unpause(airflow, consumer)
    run = airflow.trigger(dag)
    for host in ("worker", "deferred"):
        airflow.wait_state(dag, run, f"good_{host}", "success")
        airflow.wait_state(dag, run, f"bad_{host}", "failed")
        assert "return_value" not in airflow.xcom_keys(dag, run, f"bad_{host}")
        log = airflow.log(dag, run, f"bad_{host}")  # of its only try, although it has a retry
        assert "TrainingRequirementError: val_accuracy is 0.87, required >= 0.9" in log

    def received() -> bool:
        states = {r["dag_run_id"]: r["state"] for r in airflow.runs(consumer) if r["dag_run_id"] not in earlier}
        assert "failed" not in states.values()
        runs = [airflow.xcom(consumer, run, "receive") for run, state in states.items() if state == "success"]
        tasks = sorted(name for run in runs for name in run)
        assert not [name for name in tasks if name.startswith("bad")]
        return tasks == ["good_deferred", "good_worker"]

    wait_for("the runs for the good models", received)
