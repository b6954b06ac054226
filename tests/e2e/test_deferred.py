"""The demo's DAG, unchanged, under Airflow's own scheduler, triggerer and API server."""

from __future__ import annotations

import re

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of

pytestmark = [pytest.mark.e2e, pytest.mark.embedded("needs the images of examples/"), pytest.mark.xdist_group("e2e-1")]


def test_deferred_task_logs_live_and_frees_the_gpus(airflow: Airflow, kube: Kube) -> None:
    dag, task = "ktrain_demo", "train"
    number = 60
    run = airflow.trigger(dag, {"epochs": number, "epoch_seconds": 1})  # longer than the worker follows, by far
    mine = selector_of(dag, run)
    wait_for("a worker's process has it", airflow.task_processes)
    airflow.wait_state(dag, run, task, "deferred")
    wait_for("the worker's process is gone", lambda: not airflow.task_processes())

    def lines() -> list[str]:
        return airflow.log(dag, run, task).splitlines()

    before = wait_for("lines of a replica", lambda: [x for x in lines() if "epoch" in x])
    wait_for("more lines while it is deferred", lambda: len([x for x in lines() if "epoch" in x]) > len(before))
    assert airflow.task(dag, run, task)["state"] == "deferred"
    (job,) = kube.jobs(mine)
    links = airflow.links(dag, run, task)
    assert links["Training job"] == f"https://board.example/pytorchjobs/{job['metadata']['name']}"

    airflow.wait_state(dag, run, task, "success")
    log = lines()
    for replica in ("[Master 0]", "[Worker 0]", "[Worker 1]"):
        epochs = [int(x.partition(": ")[2].split()[1]) for x in log if x.startswith(replica) and " epoch " in x]
        assert epochs == list(range(1, number + 1)), f"each line of {replica} once and in order"
    assert any(re.search(r" deleted\.", x) for x in log), log[-20:]
    assert airflow.xcom(dag, run, task)["epochs"] == number
    assert not kube.jobs(mine)
    wait_for("its pods are gone", lambda: not kube.pods(mine))
    assert airflow.links(dag, run, task) == links
