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
from tests.isolation import directory_of_pods

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


def until_files(folder: str, number: int) -> str:
    """A shell command that waits until a directory has so many files: until so many replicas have written theirs."""
    return f"while [ $(ls {folder} | wc -l) -lt {number} ]; do sleep 0.1; done"


def write(tmp_path: Path, script: str, workers: int = 0) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(script, workers=workers)))


@pytest.mark.thorough
def test_a_file_runs_in_directories_of_this_machine_with_the_other_objects_that_it_has(
    ktrain: Start, tmp_path: Path, temporary: Path
) -> None:
    """The namespace is created, and requests that exceed this machine are granted."""
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"EPOCHS": "7"}}
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    (tmp_path / "mine").mkdir()
    for file, text in {"train.sh": "echo trained here", "mine/train.sh": "echo trained in mine"}.items():
        (tmp_path / file).write_text(text)
    script = f"sh train.sh; touch /data/$HOSTNAME; {until_files('/data', 2)}; echo $EPOCHS epochs"
    manifest = job(script, workers=1)
    manifest["metadata"]["namespace"] = "training"
    for role, image in (("Master", "any"), ("Worker", "special")):
        pod = manifest["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
        pod["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
        pod["containers"][0] |= {
            "image": image, "envFrom": [{"configMapRef": {"name": "settings"}}],
            "volumeMounts": [{"name": "v", "mountPath": "/data"}],
            "resources": {"limits": {"cpu": 5000, "memory": "500Ti", "rdma/hca": 1, "nvidia.com/gpu": 1}},
        }  # fmt: skip
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all([settings, claim, manifest]))
    words = ["job.yaml", "--image", "special=mine", "--timeout", "10m"]
    command = ktrain("run", "--local", *words, env={"TMPDIR": str(temporary)})
    assert command.end() == 0, command.output
    assert "PyTorchJob training/train-" in command.output
    assert "1 node, 2 simulated GPUs." in command.output
    assert "ConfigMap settings created." in command.output
    assert "[Master 0] trained here" in command.output
    assert "[Worker 0] trained in mine" in command.output
    assert "[Master 0] 7 epochs" in command.output
    assert not list(temporary.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("accelerator", "simulated", "counted"),
    [
        ("google.com/tpu", "4 simulated TPUs", "4 TPUs"),
        pytest.param("amd.com/gpu", "4 simulated GPUs (amd.com/gpu)", "4 GPUs", marks=pytest.mark.thorough),
        pytest.param("example.com/die", "4 simulated dice", "4 dice", marks=pytest.mark.thorough),
    ],
)
def test_gpus_are_units_of_the_default_accelerator(
    ktrain: Start, accelerator: str, simulated: str, counted: str
) -> None:
    env = {
        "AIRFLOW__KTRAIN__DEFAULT_ACCELERATOR": accelerator,
        "AIRFLOW__KTRAIN__ACCELERATORS": "example.com/die=die|dice",
    }
    command = ktrain("run", "--local", "--gpus", "2", "--", "true", env=env)
    assert command.end() == 0, command.output
    assert f"1 node, {simulated}." in command.output
    assert f" on {counted} (" in command.output


@pytest.mark.parametrize("name", ["DEFAULT_ACCELERATOR", "ACCELERATORS"])
def test_an_invalid_accelerator_of_the_environment_exits_2(ktrain: Start, name: str) -> None:
    command = ktrain("run", "--local", "--", "true", env={f"AIRFLOW__KTRAIN__{name}": "tpu"})
    assert command.end() == 2, command.output
    assert f"AIRFLOW__KTRAIN__{name}" in command.output
    assert "expected NAME=UNIT" in command.output


def test_ctrl_c_stops_the_cluster(ktrain: Start, tmp_path: Path, temporary: Path) -> None:
    write(tmp_path, WAIT)
    command = ktrain("run", "--local", "job.yaml", env={"TMPDIR": str(temporary)})
    command.wait_for("[Master 0] ready")
    command.interrupt()
    assert command.end() == 130, command.output
    assert not list(temporary.iterdir())


@pytest.mark.thorough
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
    (tmp_path / "started").mkdir()
    together = f"touch started/$HOSTNAME; {until_files('started', 3)}"
    write(tmp_path, f"echo sees $CUDA_VISIBLE_DEVICES in order $CUDA_DEVICE_ORDER; {together}", workers=2)
    command = ktrain("run", "--local", "job.yaml", env=fake_gpus)
    assert command.end() == 0, command.output
    assert "1 node, 3 GPUs" in command.output
    seen = re.findall(r"\[(?:Master|Worker) \d\] sees (\S+) in order PCI_BUS_ID", command.output)
    assert sorted(seen) == ["0", "1", "2"]


@pytest.mark.thorough
def test_make_test_gpu_runs_one_rank_for_each_gpu(fake_gpus: dict[str, str]) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "scripts" / "test_gpu.py"), "--backend", "gloo"]
    with directory_of_pods():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **fake_gpus})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed: 3 ranks with gloo" in done.stdout


@pytest.mark.thorough
def test_an_object_that_is_not_served_is_an_error(ktrain: Start, tmp_path: Path) -> None:
    other = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all([other, job("true")]))
    command = ktrain("run", "--local", "job.yaml")
    assert command.end() == 4, command.output
    assert "the embedded cluster doesn't serve Deployment of apps/v1: remove it from the file" in command.output


@pytest.mark.thorough
def test_hanging_example_names_replica_function_and_line(ktrain: Start) -> None:
    """As docs/how-to/hangs.md shows it, with fewer replicas."""
    program = ["torchrun", "--nproc-per-node", "2", "train.py"]
    words = ["--code", ROOT / "examples/hang", "--workers", "1", "--timeout", "90s", "--", *program]
    command = ktrain("run", "--local", *words)
    assert command.end() == 124, command.output
    line = "Not finished after 1 min 30 s: rank 2 of Worker 0 is in load_batch (train.py:17), "
    assert line + "3 other ranks wait in all_reduce (train.py:27)" in command.output
