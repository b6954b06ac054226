"""The guides of docs/guides-as-dags.md: each example DAG runs on the embedded cluster."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import urllib.parse
from typing import Any

import pytest

from tests.e2e.airflow import Airflow, wait_for
from tests.e2e.kube import Kube, selector_of, watching

pytestmark = [pytest.mark.e2e, pytest.mark.embedded("needs the images of examples/"), pytest.mark.xdist_group("e2e-4")]


def run(airflow: Airflow, kube: Kube, dag: str, conf: dict[str, Any] | None = None) -> list[str]:
    """Run a DAG until its task `train` succeeds and its pods are gone. Returns the lines of its log."""
    run_id = airflow.trigger(dag, conf)
    airflow.wait_state(dag, run_id, "train", "success")
    wait_for("its pods are gone", lambda: not kube.pods(selector_of(dag, run_id)))
    return airflow.log(dag, run_id, "train").splitlines()


def test_mnist_example_runs_with_gloo_and_simulated_gpus(airflow: Airflow, kube: Kube) -> None:
    with watching(kube) as pods:
        log = run(airflow, kube, "ktrain_mnist_nccl", {"backend": "gloo"})
    assert "[Master 0] Using distributed PyTorch with gloo backend" in log
    assert any(line.startswith("[Worker 0] rank 1 of 2") for line in log)
    accuracy = [float(line.partition("=")[2]) for line in log if line.startswith("[Master 0] accuracy=")]
    assert accuracy[-1] > 0.8
    assert any(" succeeded after " in line for line in log), log[-20:]
    assert {p.metadata.annotations["sidecar.istio.io/inject"] for p in pods.states} == {"false"}


def test_sixteen_pods_run_only_on_the_chosen_hosts(airflow: Airflow, kube: Kube, tmp_path: pathlib.Path) -> None:
    for share in ("lustrenew/share", "lustre/share/images"):
        (tmp_path / share).mkdir(parents=True)
    hosts = ["ktrain-node-1", "ktrain-node-3"]
    with watching(kube) as pods:
        log = run(airflow, kube, "ktrain_allreduce_16_gpus", {"hosts": hosts, "mnt": str(tmp_path), "nccl": ""})
    assert len(pods.nodes) == 16
    assert sorted(pods.nodes.values()) == [h for h in hosts for _ in range(8)]
    assert len([name for name in pods.nodes if "-worker-" in name]) == 15
    spec = pods.of("worker")[-1].spec
    assert spec.containers[0].security_context.capabilities.add == ["IPC_LOCK"]
    assert spec.containers[0].resources.limits == {"nvidia.com/gpu": "1", "rdma/hca": "1"}
    assert "/dev/shm" in [mount.mount_path for mount in spec.containers[0].volume_mounts]
    assert "NCCL_DEBUG" in [entry.name for entry in spec.containers[0].env]
    assert "[Master 0] epoch 0 iteration 400: the sum over 16 ranks is right" in log
    assert any(" succeeded after " in line for line in log), log[-20:]


def test_demo_trains_in_three_replicas(airflow: Airflow, kube: Kube) -> None:
    log = run(airflow, kube, "ktrain_demo", {"epochs": 3})
    for replica in ("[Master 0]", "[Worker 0]", "[Worker 1]"):
        epochs = [line.partition(": ")[2].split()[1] for line in log if line.startswith(replica) and " epoch " in line]
        assert epochs == ["1", "2", "3"]


def test_reaper_finds_no_job_that_is_left_over(airflow: Airflow) -> None:
    run_id = airflow.trigger("ktrain_reaper")
    airflow.wait_state("ktrain_reaper", run_id, "reap", "success")


def test_distributed_pytorch_runs_on_cpus(airflow: Airflow, kube: Kube) -> None:
    log = run(airflow, kube, "ktrain_torchrun_cpu")
    for replica, rank in (("Master 0", 0), ("Worker 0", 1)):
        assert f"[{replica}] rank {rank} world_size 2 result tensor([2])" in log


def scale(airflow: Airflow, kube: Kube, dag: str, **changes: str) -> list[int]:
    """Run a DAG that scales its job. Returns the numbers of ranks in the order in which they trained."""
    run_id = airflow.trigger(dag)
    airflow.wait_state(dag, run_id, "train", "success")
    for task, change in changes.items():
        airflow.wait_state(dag, run_id, task, "success")
        assert change in airflow.xcom(dag, run_id, task)
    wait_for("its pods are gone", lambda: not kube.pods(selector_of(dag, run_id)))
    log = airflow.log(dag, run_id, "train").splitlines()
    sizes = [int(match[1]) for line in log if (match := re.search(r"rank 0 of (\d): from batch", line))]
    assert any(re.search(r"trained: y = (3.0|2.9)", line) for line in log)
    return [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before]


def check_elastic_horovod(airflow: Airflow, kube: Kube) -> None:
    with watching(kube) as pods:
        changes = {"grow": "from 2 to 3 Workers", "shrink": "from 3 to 1 Worker"}
        sizes = scale(airflow, kube, "ktrain_horovod_elastic", **changes)
    assert pods.running("worker") == [0, 1, 2, 3, 2, 1, 0]
    # the pods of two Workers are deleted one after the other: horovodrun may see one of them for a moment
    assert sizes in ([2, 3, 1], [2, 3, 2, 1])


def test_elastic_horovod_continues_while_it_is_scaled(airflow: Airflow, kube: Kube) -> None:
    check_elastic_horovod(airflow, kube)


def test_daily_training_stores_checkpoints_on_the_node(airflow: Airflow, kube: Kube) -> None:
    dag = "ktrain_daily"
    wait_for("the DAG is known", lambda: airflow.known(dag))
    airflow.call("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})
    day = wait_for("the day's run", lambda: airflow.runs(dag))[0]
    run_id = day["dag_run_id"]
    if day["state"] == "failed":  # in the test's first attempt
        airflow.clear(dag, run_id, "train")
    airflow.wait_state(dag, run_id, "train", "success")
    assert list(pathlib.Path(airflow.env["KTRAIN_CHECKPOINTS"]).glob("train-*/last.pt"))
    wait_for("its pods are gone", lambda: not kube.pods(selector_of(dag, run_id)))


def test_torchrun_runs_as_a_trainjob(airflow: Airflow, kube: Kube) -> None:
    log = run(airflow, kube, "ktrain_trainjob")
    for rank in range(2):
        assert any(line.startswith(f"[node {rank}] rank {rank}/2: epoch 5 loss") for line in log)
    assert any(" succeeded after " in line for line in log), log[-20:]


def test_sweep_runs_a_trainjob_per_learning_rate(airflow: Airflow, kube: Kube) -> None:
    """Each job runs a function that torchrun starts on two nodes."""
    run_id = airflow.trigger("ktrain_trainjob_sweep")
    airflow.wait_state("ktrain_trainjob_sweep", run_id, "best", "success")
    assert airflow.xcom("ktrain_trainjob_sweep", run_id, "best")["learning_rate"] == 0.1
    wait_for("its pods are gone", lambda: not kube.pods(selector_of("ktrain_trainjob_sweep", run_id)))


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs optuna, of the extra `test`")
def test_sweep_stops_bad_trials_early_and_takes_the_best(airflow: Airflow, kube: Kube) -> None:
    dag, trials = "ktrain_optuna", range(9)
    run_id = airflow.trigger(dag)
    path = f"/api/v2/dags/{dag}/dagRuns/{urllib.parse.quote(run_id)}/taskInstances/train"
    wait_for("the trials are known", lambda: [t for t in airflow.tasks(dag, run_id) if t["map_index"] == trials[-1]])
    airflow.call("PATCH", f"{path}/{trials[-1]}", {"new_state": "failed"})
    airflow.wait_state(dag, run_id, "best", "success")
    airflow.wait_run(dag, run_id, "success")
    states = {t["map_index"]: t["state"] for t in airflow.tasks(dag, run_id) if t["task_id"] == "train"}
    succeeded = [number for number in trials if states[number] == "success"]
    assert states[trials[-1]] == "failed"
    assert states[6] == "skipped"  # worse than most of any three trials
    assert len(succeeded) >= 3
    results = [airflow.call("GET", f"{path}/xcomEntries/return_value?map_index={n}")["value"] for n in succeeded]
    best = min(results, key=lambda result: result["loss"])
    assert airflow.xcom(dag, run_id, "best")["number"] == best["number"]
    wait_for("its pods are gone", lambda: not kube.pods(selector_of(dag, run_id)))


def test_mpirun_example_runs(airflow: Airflow, kube: Kube) -> None:
    log = run(airflow, kube, "ktrain_mpi_pi")
    ranks = sorted(line.split()[3] for line in log if line.startswith("[Launcher 0] rank"))
    assert ranks == ["0", "1", "2", "3"]
