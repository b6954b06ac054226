"""The demo's DAG, unchanged, under Airflow's own scheduler, triggerer and API server."""

from __future__ import annotations

import re

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube

pytestmark = [pytest.mark.e2e, pytest.mark.embedded, pytest.mark.xdist_group("e2e-1")]


def test_deferred_task_logs_live_and_frees_the_gpus(airflow: Airflow, kube: Kube) -> None:
    dag, task = "ktrain_demo", "train"
    run = airflow.trigger(dag, {"epochs": 15, "epoch_seconds": 1})  # longer than the worker follows
    wait_for("a worker's process has it", airflow.task_processes)
    airflow.wait_state(dag, run, task, "deferred")
    wait_for("the worker's process is gone", lambda: not airflow.task_processes())

    def lines() -> list[str]:
        return airflow.log(dag, run, task).splitlines()

    before = wait_for("lines of a replica", lambda: [x for x in lines() if "epoch" in x])
    wait_for("more lines while it is deferred", lambda: len([x for x in lines() if "epoch" in x]) > len(before))
    assert airflow.task(dag, run, task)["state"] == "deferred"
    (job,) = kube.jobs()
    links = airflow.links(dag, run, task)
    assert links["Training job"] == f"https://board.example/pytorchjobs/{job['metadata']['name']}"

    airflow.wait_state(dag, run, task, "success")
    log = lines()
    for replica in ("[Master 0]", "[Worker 0]", "[Worker 1]"):
        epochs = [x.partition(": ")[2] for x in log if x.startswith(replica) and " epoch " in x]
        assert [int(e.split()[1]) for e in epochs] == list(range(16)), f"each line of {replica} once and in order"
    assert any(re.search(r" deleted\. .*(no GPUs were left to release|GPUs? released)", x) for x in log), log[-20:]
    assert airflow.xcom(dag, run, task)["epochs"] == 15
    assert not kube.jobs()
    assert not kube.pods()
    assert airflow.links(dag, run, task) == links
