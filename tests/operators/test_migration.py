"""The TrainJobs that docs/how-to/migrate-to-trainjob.md names run unchanged."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from airflow_provider_ktrain.core.kinds import TRAINJOB
from airflow_provider_ktrain.operators.training import TrainJobOperator
from tests import clusters
from tests.clusters import TestCluster
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.embedded("needs the images of examples/, and runtimes"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

ROOT = pathlib.Path(__file__).parents[2]
MANIFESTS = ROOT / "example_dags" / "manifests"
REGISTRY = "registry.example/"
IMAGES = {"pytorch-demo": "demo", "pytorch-mnist": "mnist", "pytorch-allreduce": "allreduce"}


def documented(name: str) -> dict[str, Any]:
    """The manifest in the file with this name."""
    return dict(yaml.safe_load((MANIFESTS / f"{name}.yaml").read_text()))


@pytest.fixture(scope="module")
def trainer() -> Iterator[TestCluster]:
    images = {REGISTRY + image: ROOT / "examples" / folder for image, folder in IMAGES.items()}
    with clusters.cluster(images=images, gpus=8, resources={"rdma/hca": "8"}) as reached:
        yield reached


@pytest.fixture
def task(trainer: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    set_connection(trainer, monkeypatch)
    with Instance(trainer, TRAINJOB) as made:
        yield made


def run(task: Instance, manifest: dict[str, Any], capfd: pytest.CaptureFixture[str], **parameters: Any) -> str:
    """Run the job to its end. Returns the task's log."""
    task.execute(operator=TrainJobOperator, manifest=manifest, deferrable=False, **parameters)
    assert not task.jobs()
    return capfd.readouterr().out


def test_migrated_cpu_job_runs(task: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    log = run(task, documented("trainjob_torchrun_cpu"), capfd)
    for rank in range(2):
        assert f"[node {rank}] rank {rank} world_size 2 result tensor([2])" in log


def test_migrated_mnist_job_runs(task: Instance, capfd: pytest.CaptureFixture[str]) -> None:
    log = run(task, documented("trainjob_mnist_nccl"), capfd, args=["--epochs", "1"], nproc_per_node=1)
    assert "[node 0] Using distributed PyTorch with gloo backend" in log
    assert "[node 1] rank 1 of 2" in log
    assert "[node 0] accuracy=" in log


def test_migrated_all_reduce_job_runs(
    task: Instance, capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    manifest = documented("trainjob_allreduce")
    (node,) = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert [volume["hostPath"]["path"] for volume in pod["volumes"]] == ["/dev/shm", "/mnt/lustrenew/share"]
    pod["volumes"][1]["hostPath"]["path"] = str(tmp_path)
    log = run(task, manifest, capfd, nodes=4, env={"LD_PRELOAD": ""})
    assert "[node 0] epoch 0 iteration 400: the sum over 4 ranks is right" in log
    assert "rank 3 of 4: done" in log
