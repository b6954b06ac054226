"""Options of `ktrain`: strict checks, directories, JSON, validated arguments, shell completion, colors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from airflow_provider_ktrain.cli import main
from airflow_provider_ktrain.cli.console import Console
from tests.cli.conftest import ROOT
from tests.core.manifests import pytorchjob

GOOD = yaml.safe_dump(pytorchjob())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_unknown_field_is_an_error_with_strict_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = pytorchjob()
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "x"
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(manifest))
    assert main(["check", str(file)]) == 0
    assert " warning unknown-field at " in capsys.readouterr().out
    assert main(["check", "--strict", str(file)]) == 1
    out = capsys.readouterr().out
    assert " error unknown-field at " in out
    assert "1 error, 0 warnings" in out


def test_a_suggestion_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD.replace("kind: PyTorchJob", "kind: PytorchJob"))
    assert main(["check", str(file)]) == 1
    assert " at $.kind: did you mean PyTorchJob? unsupported kind; found 'PytorchJob'" in capsys.readouterr().out


def test_directory_is_expanded_to_its_files_with_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "a.yaml": GOOD,
        "sub/b.json": json.dumps(pytorchjob()),
        "values.yaml": "a: [",
        ".git/c.yaml": "kind: PyTorchJob",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "2 files: 0 errors, 0 warnings\n"
    (tmp_path / "sub" / "bad.yml").write_text("kind: PyTorchJob\nspec: [")
    assert main(["check", str(tmp_path)]) == 1
    assert f"{tmp_path / 'sub' / 'bad.yml'}:2: error manifest at $: invalid YAML" in capsys.readouterr().out


def test_a_directory_without_jobs_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "values.yaml").write_text("a: 1")
    assert main(["check", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no training job in a file that ends in .yaml" in capsys.readouterr().err


def test_cluster_status_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--output", "json", "--state-dir", str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out) == {"running": False}
    assert main(["cluster", "start", "--state-dir", str(tmp_path)]) == 0
    try:
        capsys.readouterr()
        assert main(["cluster", "status", "--output", "json", "--state-dir", str(tmp_path)]) == 0
        state = json.loads(capsys.readouterr().out)
        assert state["running"]
        assert state["kubeconfig"] == str(tmp_path / "kubeconfig")
        assert set(state) == {"running", "pid", "url", "kubeconfig", "ca_file"}  # no token
    finally:
        assert main(["cluster", "stop", "--state-dir", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["cluster", "start", "--gpus-per-node", "-3"],
            "--gpus-per-node: found '-3', expected a whole number, 0 or more",
        ),
        (["cluster", "start", "--nodes", "0"], "--nodes: found '0', expected a whole number, 1 or more"),
        (["cluster", "start", "--port", "70000"], "--port: found '70000', expected a port, 0 to 65535"),
        (["cluster", "fault", "drop", "--seconds", "-1"], "--seconds: found '-1', expected a number of seconds"),
        (["cluster", "fault", "drop", "--seconds", "nan"], "--seconds: found 'nan', expected a number of seconds"),
        (["cluster", "fault", "status", "--status", "200"], "--status: found '200', expected an HTTP status, 400"),
        (["cluster", "fault", "status", "--count", "0"], "--count: found '0', expected a whole number, 1 or more"),
        (["rbac", "-n", "My Team"], "found 'My Team', expected the name of a namespace: up to 63 lower-case"),
    ],
)
def test_arguments_are_validated(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ktrain c", {"check", "cluster"}),
        ("ktrain run --loc", {"--local"}),
        ("ktrain cluster st", {"start", "stop", "status"}),
    ],
)
def test_shells_complete_commands_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", "airflow_provider_ktrain.cli"], env={**os.environ, **asked}, check=True)
    assert {word.strip() for word in answer.read_text().split("\n")} == expected


def test_colors_are_used_on_terminals_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        Console().error("bad\nvery bad")
        return stream.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[31merror: bad\033[0m" in printed(Terminal())
    assert printed(io.StringIO()).partition(" ")[2] == "error: bad\n         very bad\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in printed(Terminal())
