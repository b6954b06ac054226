"""`ktrain run --local`: an embedded cluster for one job, in the working directory, with this machine's GPUs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import PATHS, ROOT, Start
from tests.cli.test_run import IGNORE_SIGTERM, WAIT, job

pytestmark = pytest.mark.embedded("starts a cluster by --local")

NVIDIA_SMI = """#!/bin/sh
echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb)'
echo 'GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-cccc)'
"""


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """Where the embedded cluster keeps its state; it is empty again at the end."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    return directory


def write(tmp_path: Path, script: str, workers: int = 0) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(script, workers=workers)))


def test_containers_run_in_the_working_directory(ktrain: Start, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.sh").write_text("echo trained here")
    write(tmp_path, "sh train.sh")
    command = ktrain("run", "--local", "job.yaml", env={"TMPDIR": str(temporary)})
    assert command.end() == 0, command.output
    assert "[Master 0] trained here" in command.output
    assert "1 simulated GPU" in command.output
    assert not list(temporary.iterdir())


def test_requests_that_exceed_this_machine_are_granted(ktrain: Start, tmp_path: Path) -> None:
    manifest = job("echo trained here")
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"cpu": 5000, "memory": "500Ti", "rdma/hca": 1}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    command = ktrain("run", "--local", "job.yaml", "--timeout", "10m")
    assert command.end() == 0, command.output
    assert "[Master 0] trained here" in command.output


def test_gpus_are_units_of_the_default_accelerator(ktrain: Start) -> None:
    env = {"AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR": "google.com/tpu"}
    command = ktrain("run", "--local", "--gpus", "2", "--", "true", env=env)
    assert command.end() == 0, command.output
    assert "1 node, 4 simulated TPUs." in command.output
    assert " on 4 TPUs (" in command.output


def test_gpus_of_another_vendor_are_simulated(ktrain: Start) -> None:
    env = {"AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR": "amd.com/gpu"}
    command = ktrain("run", "--local", "--gpus", "2", "--", "true", env=env)
    assert command.end() == 0, command.output
    assert "1 node, 4 simulated GPUs (amd.com/gpu)." in command.output
    assert " on 4 GPUs (" in command.output


def test_configured_accelerators_are_counted(ktrain: Start, tmp_path: Path) -> None:
    env = {
        "AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR": "example.com/die",
        "AIRFLOW__KTRAIN__ACCELERATORS": "example.com/die=die|dice",
    }
    command = ktrain("run", "--local", "--gpus", "2", "--workers", "0", "--", "true", env=env)
    assert command.end() == 0, command.output
    assert "1 node, 2 simulated dice." in command.output


@pytest.mark.parametrize("name", ["DEFAULT_ACCELERATOR", "ACCELERATORS"])
def test_an_invalid_accelerator_of_the_environment_exits_2(ktrain: Start, name: str) -> None:
    command = ktrain("run", "--local", "--", "true", env={f"AIRFLOW__KTRAIN__{name}": "tpu"})
    assert command.end() == 2, command.output
    assert f"AIRFLOW__KTRAIN__{name}" in command.output
    assert "expected NAME=UNIT" in command.output


def test_an_image_may_have_a_directory_of_its_own(ktrain: Start, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    write(tmp_path, "ls")
    image = job("")["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["image"]
    command = ktrain("run", "--local", "job.yaml", "--image", f"{image}=mine")
    assert command.end() == 0, command.output
    assert "[Master 0] file" in command.output


def test_ctrl_c_stops_the_cluster(ktrain: Start, tmp_path: Path, temporary: Path) -> None:
    write(tmp_path, WAIT)
    command = ktrain("run", "--local", "job.yaml", env={"TMPDIR": str(temporary)})
    command.wait_for("[Master 0] ready")
    command.interrupt()
    assert command.end() == 130, command.output
    assert not list(temporary.iterdir())


def test_second_ctrl_c_suggests_nothing_for_a_cluster_that_ends(ktrain: Start, tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(IGNORE_SIGTERM, grace=20)))
    command = ktrain("run", "--local", "job.yaml", env={"TMPDIR": str(temporary)})
    command.wait_for("[Master 0] ready")
    command.interrupt()
    command.wait_for("SIGINT: deleting the job")
    command.interrupt()
    assert command.end() == 130, command.output
    assert "error: The embedded cluster ends now, and all pods with it." in command.output
    assert "kubectl" not in command.output
    assert not list(temporary.iterdir())


@pytest.fixture
def fake_gpus(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine on which nvidia-smi lists three GPUs."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": PATHS}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_cluster_starts_leaves_nothing(
    ktrain: Start, tmp_path: Path, temporary: Path, number: signal.Signals, status: int
) -> None:
    write(tmp_path, WAIT)
    command = ktrain("run", "--local", "job.yaml", env={"TMPDIR": str(temporary)})
    command.wait_for("Starting an embedded cluster")
    command.interrupt(number)
    assert command.end() == status, command.output
    assert not list(temporary.glob("ktrain-*"))


def test_each_replica_sees_only_its_own_gpus(ktrain: Start, tmp_path: Path, fake_gpus: dict[str, str]) -> None:
    write(tmp_path, "echo sees $CUDA_VISIBLE_DEVICES in order $CUDA_DEVICE_ORDER; sleep 15", workers=2)
    command = ktrain("run", "--local", "job.yaml", env=fake_gpus)
    assert command.end() == 0, command.output
    assert "1 node, 3 GPUs" in command.output
    seen = re.findall(r"\[(?:Master|Worker) \d\] sees (\S+) in order PCI_BUS_ID", command.output)
    assert sorted(seen) == ["0", "1", "2"]


def test_make_test_gpu_runs_one_rank_for_each_gpu(fake_gpus: dict[str, str]) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "scripts" / "test_gpu.py"), "--backend", "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **fake_gpus})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed: 3 ranks with gloo" in done.stdout


def test_the_other_documents_of_the_file_are_created_first(ktrain: Start, tmp_path: Path) -> None:
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"EPOCHS": "7"}}
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    manifest = job("touch /data/file && echo $EPOCHS epochs with $(ls /data)")
    pod = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    pod["containers"][0] |= {
        "envFrom": [{"configMapRef": {"name": "settings"}}], "volumeMounts": [{"name": "v", "mountPath": "/data"}],
    }  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all([settings, claim, manifest]))
    command = ktrain("run", "--local", "job.yaml")
    assert command.end() == 0, command.output
    assert "ConfigMap settings created." in command.output
    assert "7 epochs with file" in command.output


def test_an_object_that_is_not_served_is_an_error(ktrain: Start, tmp_path: Path) -> None:
    other = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all([other, job("true")]))
    command = ktrain("run", "--local", "job.yaml")
    assert command.end() == 4, command.output
    assert "the embedded cluster doesn't serve Deployment of apps/v1: remove it from the file" in command.output


def test_the_namespace_of_the_manifest_is_created(ktrain: Start, tmp_path: Path) -> None:
    manifest = job("echo done")
    manifest["metadata"]["namespace"] = "training"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    command = ktrain("run", "--local", "job.yaml")
    assert command.end() == 0, command.output
    assert "PyTorchJob training/train-" in command.output


def test_hanging_example_names_replica_function_and_line(ktrain: Start) -> None:
    """As docs/how-to/hangs.md shows it, with fewer replicas."""
    program = ["torchrun", "--nproc-per-node", "2", "train.py"]
    words = ["--code", ROOT / "examples/hang", "--workers", "1", "--timeout", "90s", "--", *program]
    command = ktrain("run", "--local", *words)
    assert command.end() == 124, command.output
    line = "Not finished after 1 min 30 s: rank 2 of Worker 0 is in load_batch (train.py:17), "
    assert line + "3 other ranks wait in all_reduce (train.py:27)" in command.output
