"""The events that Airflow's OpenLineage provider sends for deferred trainings, under Airflow's own processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.conftest import DAGS, PATIENCE

pytest.importorskip("airflow.providers.openlineage", reason="needs apache-airflow-providers-openlineage")

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-2")]
DAG = "lineage"
Event = dict[str, Any]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the events, each in a file of its own."""
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, events: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow that sends events. The other tests' Airflow doesn't, because each event takes a process."""
    dags, home = tmp_path_factory.mktemp("dags"), tmp_path_factory.mktemp("airflow")
    for name in ("lineage.py", "training"):
        (dags / name).symlink_to(DAGS / name)
    settings = {
        "AIRFLOW__OPENLINEAGE__DISABLED": "False",
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "file", "log_file_path": str(events / "event")}),
        "AIRFLOW__OPENLINEAGE__EXECUTION_TIMEOUT": "300",  # on a loaded machine, the default of 10 s is not enough
        "AIRFLOW__KTRAIN__WORKER_SECONDS": "0",
    }
    with running(home, cluster, dags, **PATIENCE, **settings) as started:
        yield started


def sent(events: Path, task: str, kind: str) -> list[Event]:
    """The events of a task with the facet of trainings."""
    found: list[Event] = []
    for file in events.iterdir():
        try:
            event = json.loads(file.read_text())
        except ValueError:  # it is being written
            continue
        if event["eventType"] == kind and event["job"]["name"] == f"{DAG}.{task}":
            found.append(event)
    return found


def test_events_of_deferred_trainings_have_their_facts(airflow: Airflow, events: Path) -> None:
    run = airflow.trigger(DAG)
    airflow.wait_state(DAG, run, "train", "success")
    airflow.wait_state(DAG, run, "fails", "failed")
    wait_for("a deferral", lambda: "Deferred: " in airflow.log(DAG, run, "train"))
    wait_for("a deferral", lambda: "Deferred: " in airflow.log(DAG, run, "fails"))
    (complete,) = wait_for("the COMPLETE event", lambda: sent(events, "train", "COMPLETE"))
    (fail,) = wait_for("the FAIL event", lambda: sent(events, "fails", "FAIL"))
    starts = sent(events, "train", "START")
    assert len(starts) >= 2, "one before the deferral and one after it"
    start = starts[0]

    asked = start["run"]["facets"]["ktrain_training"]
    assert (asked["job"], asked["replicas"]) == ({"kind": "PyTorchJob"}, {"Master": 1, "Worker": 1})

    ran = complete["run"]["facets"]["ktrain_training"]
    wait_for("the XComs", lambda: {"job", "usage"} <= airflow.xcom_keys(DAG, run, "train"))
    job, usage = (airflow.xcom(DAG, run, "train", key) for key in ("job", "usage"))
    assert ran["job"] | {"code": ran["codeHash"]} == job
    assert ran["gpuSeconds"] | {"gpus": ran["gpus"]} == usage
    assert (ran["phase"], ran["replicas"]) == ("Succeeded", {"Master": 1, "Worker": 1})
    assert asked["codeHash"] == ran["codeHash"]
    assert {event["run"]["runId"] for event in starts} == {complete["run"]["runId"]}
    assert [(found["namespace"], found["name"]) for found in complete["outputs"]] == [("s3://models", "lineage")]

    failed = fail["run"]["facets"]
    assert failed["ktrain_training"]["cause"]["category"] == "user code"
    assert failed["ktrain_training"]["job"]["uid"] == airflow.xcom(DAG, run, "fails", "job")["uid"]
    assert failed["errorMessage"]["message"].startswith(failed["ktrain_training"]["cause"]["summary"])
    assert not [file for file in events.iterdir() if "swordfish" in file.read_text()]
