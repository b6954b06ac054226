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

from airflow_provider_ktrain.cli import main, run
from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.cli.exit_codes import ExitCode, of_error
from airflow_provider_ktrain.core.errors import (
    KtrainError,
    ManifestError,
    RuntimeMismatchError,
    UnreachableError,
    VersionNotServedError,
)
from tests.cli.conftest import PATHS
from tests.core.manifests import pytorchjob

MODULE = "airflow_provider_ktrain.cli"
GOOD = yaml.safe_dump(pytorchjob())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_unknown_field_is_an_error_with_strict_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = pytorchjob()
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["newInKubernetes"] = "x"
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


def test_an_example_on_tpus_has_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = Path(__file__).parents[2] / "example_dags" / "manifests" / "tpu.yaml"
    assert main(["check", str(manifest)]) == 0
    assert capsys.readouterr().out == "1 file: 0 errors, 0 warnings\n"


def test_a_directory_without_jobs_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "values.yaml").write_text("a: 1")
    assert main(["check", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no training job in a file that ends in .yaml" in capsys.readouterr().err


def test_cluster_passes_its_arguments_to_ktrain_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "status", "--output", "json", "--state-dir", str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out) == {"running": False}
    with pytest.raises(SystemExit) as ended:
        main(["cluster", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ktrain-cluster")


@pytest.mark.parametrize("words", [["cluster", "start"], ["run", "--local", "--", "true"]])
def test_a_missing_embedded_cluster_is_named_with_the_extra_that_has_it(words: list[str]) -> None:
    program = (
        "import sys; sys.modules['ktrain_embedded'] = None; from airflow_provider_ktrain import cli; exit(cli.main())"
    )
    command, env = [sys.executable, "-c", program, *words], {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == ExitCode.CLUSTER
    assert "isn't installed; install the extra `local` of airflow-provider-ktrain" in done.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "--workers", "-3"], "--workers: found '-3', expected a whole number, 0 or more"),
        (["run", "--image", "=x"], "--image: 'x' is not a directory"),
        (["run", "--image", ""], "--image: found '', expected NAME or NAME=DIR"),
        (["rbac", "-n", "My Team"], "found 'My Team', expected the name of a namespace: up to 63 lower-case"),
        (
            ["rbac", "-n", "x", "--service-account", "system:serviceaccount:airflow:worker"],
            "found 'system:serviceaccount:airflow:worker', expected NAME or NAMESPACE:NAME",
        ),
        (["rbac", "-n", "x", "--service-account", "airflow:"], "found 'airflow:', expected NAME or NAMESPACE:NAME"),
    ],
)
def test_arguments_are_validated(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("run --local --code src python train.py --lr 3", "ktrain run --local --code src -- python train.py --lr 3"),
        ("run job.yaml --local --epochs 3", "ktrain run job.yaml --local -- --epochs 3"),
    ],
)
def test_a_forgotten_separator_is_explained(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert f"If they belong to the command of the replicas, put -- before it: {line}\n" in capsys.readouterr().err


def test_run_suggests_the_name_of_a_misspelled_resource(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, file = pytorchjob(), tmp_path / "job.yaml"
    container = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"nvida.com/gpu": 1}}
    file.write_text(yaml.safe_dump(manifest))
    assert main(["run", str(file), "--kubeconfig", str(tmp_path / "absent")]) == ExitCode.CLUSTER
    assert "resource-name at $" in (warning := capsys.readouterr().out)
    assert "did you mean nvidia.com/gpu?" in warning


@pytest.mark.parametrize("words", ["run --unknown", "check job.yaml --unknown", "rbac -n x --unknown"])
def test_an_unknown_option_prints_the_usage_of_its_command(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    command, error = words.split()[0], capsys.readouterr().err
    assert error.startswith(f"usage: ktrain {command} ")
    assert f"ktrain {command}: error: unexpected arguments: --unknown" in error


def test_a_command_in_place_of_a_manifest_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--local", "sh"]) == 2
    assert "found the command 'sh', expected a manifest; put `--` before a command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ktrain c", {"check", "cluster"}),
        ("ktrain run --loc", {"--local"}),
    ],
)
def test_shells_complete_commands_and_options(line: str, expected: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "PYTHONPATH": PATHS,
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", MODULE], env={**os.environ, **asked}, check=True)
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


def test_best_value_of_a_metric_is_left_out_where_it_is_the_last() -> None:
    values = {"last": 0.25, "step": 4, "best": 0.25, "best_step": 4}
    assert run._metric("loss", values) == "loss: 0.25 at step 4"
    assert run._metric("loss", values | {"step": 6}) == "loss: 0.25 at step 6, best 0.25 at step 4"
    assert run._metric("loss", {"last": 0.25, "step": 4}) == "loss: 0.25 at step 4"


def test_rbac_without_a_service_account_prints_the_role_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rbac", "-n", "training"]) == 0
    assert [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)] == ["Role"]


def test_rbac_prints_the_right_to_read_nodes_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes are not in a namespace, so it is a ClusterRole with a binding of its own."""
    assert main(["rbac", "-n", "training", "--service-account", "airflow:worker"]) == 0
    assert "nodes" not in capsys.readouterr().out
    assert main(["rbac", "-n", "training", "--service-account", "airflow:worker", "--nodes"]) == 0
    _, role, _, binding = yaml.safe_load_all(capsys.readouterr().out)
    assert (role["kind"], binding["kind"]) == ("ClusterRole", "ClusterRoleBinding")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "ktrain-nodes-training"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "worker", "namespace": "airflow"}]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ManifestError("no command"), ExitCode.INVALID),
        (RuntimeMismatchError("the patch names a job that the runtime doesn't have"), ExitCode.INVALID),
        (VersionNotServedError("the manifest is for another version"), ExitCode.INVALID),
        (UnreachableError("no answer"), ExitCode.CLUSTER),
    ],
)
def test_exit_code_of_a_manifest_that_does_not_fit_the_cluster(error: KtrainError, expected: ExitCode) -> None:
    """A task retries it, because the runtime may change; the command was given something invalid."""
    assert of_error(error) == expected
