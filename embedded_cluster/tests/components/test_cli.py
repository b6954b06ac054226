"""`ktrain-cluster`: its state as JSON, and validated arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ktrain_embedded.cli import main
from ktrain_embedded.cluster import running


def stop(state_dir: Path) -> None:
    """Stop the cluster that this process has started, and wait for its end as a shell does."""
    found = running(state_dir)
    assert found is not None
    assert main(["stop", "--state-dir", str(state_dir)]) == 0
    os.waitpid(found["pid"], 0)


def test_status_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--output", "json", "--state-dir", str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out) == {"running": False}
    assert main(["start", "--state-dir", str(tmp_path)]) == 0
    try:
        capsys.readouterr()
        assert main(["status", "--output", "json", "--state-dir", str(tmp_path)]) == 0
        state = json.loads(capsys.readouterr().out)
        assert state["running"]
        assert state["kubeconfig"] == str(tmp_path / "kubeconfig")
        assert set(state) == {"running", "pid", "url", "kubeconfig", "ca_file"}  # no token
    finally:
        stop(tmp_path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["start", "--gpus-per-node", "-3"], "--gpus-per-node: found '-3', expected a whole number, 0 or more"),
        (["start", "--nodes", "0"], "--nodes: found '0', expected a whole number, 1 or more"),
        (["start", "--port", "70000"], "--port: found '70000', expected a port, 0 to 65535"),
        (["start", "--resource", "cpu=abc"], "--resource: cpu is not a quantity: 'abc'; expected a number"),
        (["fault", "drop", "--seconds", "-1"], "--seconds: found '-1', expected a number of seconds"),
        (["fault", "drop", "--seconds", "nan"], "--seconds: found 'nan', expected a number of seconds"),
        (["fault", "status", "--status", "200"], "--status: found '200', expected an HTTP status, 400"),
        (["fault", "status", "--count", "0"], "--count: found '0', expected a whole number, 1 or more"),
    ],
)
def test_arguments_are_validated(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_errors_name_the_command_that_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fault", "clear", "--state-dir", str(tmp_path)]) == 1
    expected = "ktrain-cluster: no cluster is running; start one with: ktrain-cluster start\n"
    assert capsys.readouterr().err == expected


def test_a_fault_names_the_option_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = ("--state-dir", str(tmp_path))
    assert main(["start", *state]) == 0
    try:
        capsys.readouterr()
        for fault, needed in (("drop", "seconds"), ("status", "status"), ("evict", "pod"), ("lose", "node")):
            assert main(["fault", fault, *state]) == 1
            assert capsys.readouterr().err == f"ktrain-cluster: {fault} needs --{needed}\n"
        assert main(["fault", "lose", "--node", "absent", *state]) == 1
        assert capsys.readouterr().err == "ktrain-cluster: node 'absent' does not exist\n"
    finally:
        stop(tmp_path)
