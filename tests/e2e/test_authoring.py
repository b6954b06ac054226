"""Features built on the operators: functions, checkpoints, sweeps, backfills in a pool."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-2")]


@pytest.mark.embedded("needs the images of examples/")
def test_retry_resumes_from_the_checkpoint(airflow: Airflow) -> None:
    """Attempt 1 fails in epoch 3, as requested; attempt 2 continues from the checkpoint of epoch 2."""
    run = airflow.trigger("resumes")
    ended = airflow.wait_state("resumes", run, "train", "success")
    assert ended["try_number"] == 2
    assert "fails in epoch 3, as requested" in airflow.log("resumes", run, "train", 1)
    second = airflow.log("resumes", run, "train", 2)
    assert "resumed after epoch 2" in second
    assert "epoch 1 loss" not in second
    assert airflow.xcom("resumes", run, "train")["resumed_from"] == 2

    # a task that is cleared while the scheduler ends its run doesn't run again
    airflow.wait_run("resumes", run, "success")
    airflow.clear("resumes", run, "train")  # its first attempt trains from the start, so it fails in epoch 3 again
    wait_for("the try after the clear's first", lambda: airflow.task("resumes", run, "train")["try_number"] == 4)
    airflow.wait_state("resumes", run, "train", "success")
    third = airflow.log("resumes", run, "train", 3)
    assert "epoch 1 loss" in third
    assert "resumed" not in third
    assert "resumed after epoch 2" in airflow.log("resumes", run, "train", 4)


@pytest.mark.embedded("needs the images of examples/")
def test_function_and_mapped_sweep_run_as_jobs(airflow: Airflow) -> None:
    function, sweep = airflow.trigger("ktrain_taskflow"), airflow.trigger("ktrain_sweep")
    airflow.wait_state("ktrain_taskflow", function, "report", "success")
    assert airflow.xcom("ktrain_taskflow", function, "report") == "the mean of 4 numbers is 3.0"
    airflow.wait_state("ktrain_sweep", sweep, "best", "success")
    assert airflow.xcom("ktrain_sweep", sweep, "best")["epochs"] == 4


@pytest.mark.embedded("needs the images of examples/")
def test_function_runs_in_every_rank_of_mpirun(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("ktrain_mpi_function")
    airflow.wait_state("ktrain_mpi_function", run, "report", "success")
    assert airflow.xcom("ktrain_mpi_function", run, "report") == "pi is about 3.141593, computed by 4 ranks"
    log = airflow.log("ktrain_mpi_function", run, "pi")
    assert all(f"[Launcher 0] rank {rank} of 4" in log for rank in range(4))
    wait_for("its pods are gone", lambda: not kube.pods(selector_of("ktrain_mpi_function", run)))


def test_backfill_never_exceeds_its_pool(airflow: Airflow, kube: Kube) -> None:
    """Eight intervals, two GPUs each, a pool of four. Deferred tasks count (include_deferred), as the first two do."""
    if "four_gpus" not in [pool["name"] for pool in airflow.call("GET", "/api/v2/pools")["pools"]]:
        airflow.call("POST", "/api/v2/pools", {"name": "four_gpus", "slots": 4, "include_deferred": True})
    wait_for("the DAG is known", lambda: airflow.known("intervals"))
    airflow.call("PATCH", "/api/v2/dags/intervals", {"is_paused": False})
    month = f"2026-{2 + len(airflow.runs('intervals')) // 8:02}"  # of an earlier attempt, the intervals exist already
    pods, most, over = selector_of("intervals"), [0], threading.Event()

    def watch_pods() -> None:
        for event in kube.watch_pods(pods, over):
            del event
            most[0] = max(most[0], kube.gpus_held(pods))

    watcher = threading.Thread(target=watch_pods, daemon=True)
    watcher.start()
    try:
        long = backfill_month(airflow, kube, month)
    finally:
        over.set()
        watcher.join()
    assert most[0] == 4
    for run in long:
        assert "the triggerer now follows" in airflow.log("intervals", run, "train")


def backfill_month(airflow: Airflow, kube: Kube, month: str) -> list[str]:
    """Run eight intervals to their end. Returns the ids of the first two runs, which defer."""
    pods = selector_of("intervals")
    airflow.backfill("intervals", f"{month}-01", f"{month}-08", max_active_runs=8)

    def of_month() -> list[dict[str, Any]]:
        found = [r for r in airflow.runs("intervals") if (r["logical_date"] or "").startswith(month)]
        assert not [r for r in found if r["state"] == "failed"]
        return found

    wait_for("eight intervals", lambda: len(of_month()) == 8)
    long = [r["dag_run_id"] for r in of_month() if r["logical_date"][8:10] in ("01", "02")]

    def deferred() -> bool:
        return all(airflow.task("intervals", run, "train")["state"] == "deferred" for run in long)

    wait_for("the tasks of the first two are deferred", deferred)
    assert kube.gpus_held(pods) == 4
    kube.let_go(pods, 2)
    wait_for("eight intervals are trained", lambda: [r["state"] for r in of_month()] == ["success"] * 8)
    return long
