"""The GPUs of this machine: what nvidia-smi lists, and which pod sees which."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ktrain_embedded.node.gpus import Gpus, devices

TWO = "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-7fe2a1b0)\n"
MIG = (
    "GPU 0: NVIDIA A100 (UUID: GPU-5d5ba0d6)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)\n"
    "  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)\n"
    "GPU 1: NVIDIA A100 (UUID: GPU-7fe2a1b0)\n"
)


def nvidia_smi(directory: Path, output: str, status: int = 0) -> None:
    """A program of this name that prints the output."""
    (directory / "output").write_text(output)
    program = directory / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {directory}/output\nexit {status}\n')
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("listed", "visible", "found"),
    [
        (TWO, None, ["0", "1"]),
        (TWO, "1", ["1"]),
        (TWO, "GPU-5d", ["0"]),
        (TWO, "", []),
        (MIG, None, ["MIG-c6d4f1ef", "MIG-cba663e8", "1"]),
        (MIG, "MIG-cba663e8", ["MIG-cba663e8"]),
        ("No devices were found\n", None, []),
    ],
)
def test_devices_are_those_of_nvidia_smi_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, visible: str | None, found: list[str]
) -> None:
    nvidia_smi(tmp_path, listed)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert devices({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == found


def test_no_devices_without_a_working_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices({}) == []
    nvidia_smi(tmp_path, TWO, status=9)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    assert devices({}) == []


def seen(gpus: Gpus, uid: str, count: int) -> str:
    return gpus.take(uid, count)["CUDA_VISIBLE_DEVICES"]


def test_real_gpus_are_assigned_individually() -> None:
    gpus = Gpus(["0", "1", "2", "3"])
    assert seen(gpus, "a", 2) == "0,1"
    assert seen(gpus, "b", 1) == "2"
    assert seen(gpus, "a", 2) == "0,1"  # a restart sees the same
    gpus.free("a")
    assert seen(gpus, "c", 3) == "0,1,3"


def test_simulated_gpus_are_not_visible() -> None:
    assert seen(Gpus([]), "a", 8) == ""
    assert seen(Gpus(["0"]), "a", 0) == ""
