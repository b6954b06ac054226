"""Parameters that users of KubernetesPodOperator know, under Airflow's own scheduler, triggerer and API server."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-2")]


def jobs_of(kube: Kube, dag: str) -> list[dict[str, Any]]:
    return [job for job in kube.jobs() if job["metadata"]["labels"]["ktrain.airflow/dag-id"] == dag]


def test_exit_code_skips_the_task_and_releases_the_job(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("skips")
    airflow.wait_state("skips", run, "train", "skipped")
    airflow.wait_state("skips", run, "after", "skipped")
    log = airflow.log("skips", run, "train")
    assert "Master 0 failed with exit code 99" in log
    wait_for("the job is gone", lambda: not jobs_of(kube, "skips"))


def test_default_deferrable_and_do_xcom_push(airflow: Airflow, kube: Kube) -> None:
    """The configuration of this DAG's processes sets default_deferrable to False."""
    dag = "worker_without_xcoms"
    run = airflow.trigger(dag)
    airflow.wait_state(dag, run, "train", "success")
    assert "the triggerer now follows" not in airflow.log(dag, run, "train")
    links = {"_link_TrainingJobLink", "_link_TrainingPageLink"}
    assert airflow.xcom_keys(dag, run, "train") == {"job", "ktrain_status", *links}
    assert airflow.links(dag, run, "train")["Training job"]
    wait_for("the job is gone", lambda: not jobs_of(kube, dag))


def test_job_that_has_only_a_part_of_its_nodes_is_released(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("partial_start")
    airflow.wait_state("partial_start", run, "train", "up_for_retry")
    log = airflow.log("partial_start", run, "train")
    assert "holds 32 GPUs in 4 pods, but Worker" in log
    assert "(partial_start_timeout): " in log
    wait_for("the GPUs are free", lambda: kube.gpus_held("ktrain.airflow/dag-id=partial_start") == 0)
    assert not jobs_of(kube, "partial_start")


def test_training_that_hangs_but_logs_is_released(airflow: Airflow, kube: Kube) -> None:
    run = airflow.trigger("no_progress")
    airflow.wait_state("no_progress", run, "train", "up_for_retry")
    log = airflow.log("no_progress", run, "train")
    assert "the triggerer now follows" in log
    assert "reported no step higher than 7 for 20 s (progress_timeout)" in log
    wait_for("the job is gone", lambda: not jobs_of(kube, "no_progress"))
    assert kube.gpus_held("ktrain.airflow/dag-id=no_progress") == 0


def test_retry_avoids_the_node_with_a_broken_gpu(airflow: Airflow) -> None:
    run = airflow.trigger("avoids_nodes")
    ended = airflow.wait_state("avoids_nodes", run, "train", "success")
    assert ended["try_number"] == 2
    first, second = (airflow.log("avoids_nodes", run, "train", number) for number in (1, 2))
    if tuple(map(int, version("apache-airflow-core").split(".")[:2])) < (3, 3):
        assert "avoid_failed_nodes has no effect" in first
        return
    assert "(avoid_failed_nodes)" in first
    assert "The job avoids 1 node on which earlier tries failed." in second
    assert ": Master 0 has a broken GPU" in second
    assert "[Master 0] trained" in second
