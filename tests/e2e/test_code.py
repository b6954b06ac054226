"""`code` under Airflow's own scheduler, triggerer and API server."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from airflow_provider_ktrain.core.kinds import kind_of
from tests.clusters import TestCluster, require
from tests.e2e.airflow import Airflow, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("e2e-1")]
MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent)


def config_maps(cluster: TestCluster, dag: str) -> list[Any]:
    core = client.CoreV1Api(config.new_client_from_config(str(cluster.kubeconfig)))
    return list(core.list_namespaced_config_map(cluster.namespace, label_selector=f"ktrain.airflow/dag-id={dag}").items)


@pytest.mark.parametrize(
    ("kind", "replica"),
    [
        ("TrainJob", "node 1"),
        pytest.param(
            "MPIJob", "Launcher 0",
            marks=[
                pytest.mark.embedded("needs an image with mpirun"),
                pytest.mark.skipif(not MPIRUN, reason="needs Open MPI"),
            ],
        ),
    ],
)  # fmt: skip
def test_program_runs_in_the_code_beside_the_dag(
    airflow: Airflow, cluster: TestCluster, kind: str, replica: str
) -> None:
    require(cluster, kind_of(kind), runtime="torch-distributed")
    dag = f"sends_code_{kind.lower()}"
    run = airflow.trigger(dag)
    airflow.wait_state(dag, run, "train", "success")
    wait_for("the result is stored", lambda: "return_value" in airflow.xcom_keys(dag, run, "train"))
    assert airflow.xcom(dag, run, "train") == {"trained": True}
    found = wait_for(
        "the code is in the log", lambda: re.search(r"Code: 2 files, .* hash (\w+)", airflow.log(dag, run, "train"))
    )
    assert airflow.xcom(dag, run, "train", "job")["code"] == found[1]
    wait_for(
        "the line of a replica", lambda: f"[{replica}] greeting: hello from the code" in airflow.log(dag, run, "train")
    )
    wait_for("job and ConfigMap are gone", lambda: not config_maps(cluster, dag))


def test_retry_adopts_the_job_with_its_code_and_a_kill_leaves_nothing(airflow: Airflow, cluster: TestCluster) -> None:
    dag = "sends_code_for_long"
    run = airflow.trigger(dag)
    wait_for("training", lambda: "[Master 0] greeting" in airflow.log(dag, run, "train"))
    airflow.kill_task(dag, run, "train", signal.SIGKILL)
    wait_for("the retry adopts", lambda: "Adopting it." in _log(airflow, dag, run, 2))
    (sent,) = config_maps(cluster, dag)
    airflow.set_state(dag, run, "train", "failed")
    wait_for("its ConfigMap is gone", lambda: not config_maps(cluster, dag))
    assert sent.metadata.annotations["ktrain.airflow/code"] in _log(airflow, dag, run, 1)


def _log(airflow: Airflow, dag: str, run: str, number: int) -> str:
    """The log of a try; empty before it begins."""
    return airflow.log(dag, run, "train", number) if airflow.task(dag, run, "train")["try_number"] >= number else ""


def test_code_that_is_too_large_fails_the_task_at_once(airflow: Airflow, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(os.urandom(800 * 1024))
    run = airflow.trigger("sends_given_code", {"code": str(tmp_path)})
    ended = airflow.wait_state("sends_given_code", run, "train", "failed")
    assert ended["try_number"] == 1
    reason = r"the code is too large: .*weights\.bin \(800\.0 KiB\)"
    wait_for("the reason", lambda: re.search(reason, airflow.log("sends_given_code", run, "train"), re.DOTALL))
