"""`ktrain check`: its output for people and for CI."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml

from airflow_provider_ktrain import __version__
from airflow_provider_ktrain.cli import main
from airflow_provider_ktrain.core.checks import check
from airflow_provider_ktrain.core.kinds import PYTORCHJOB

from .manifests import DATA, mpijob, pytorchjob, trainjob

GOOD = yaml.safe_dump(pytorchjob())
HINT = f"hint: {PYTORCHJOB.platform_hint}\n"


def test_version_is_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"ktrain {__version__}\n"


def test_exit_status_is_0_without_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(GOOD)
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == "1 file: 0 errors, 0 warnings\n"


def test_exit_status_is_0_with_warnings_and_1_with_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DATA / "torchrun-cpu.yaml")]) == 0
    assert f"{DATA / 'torchrun-cpu.yaml'}:14: warning image-tag at $.spec" in capsys.readouterr().out
    assert main(["check", str(DATA / "torchrun-cpu.yaml"), str(DATA / "practitioner-nccl.yaml")]) == 1
    out = capsys.readouterr().out
    assert f"{DATA / 'practitioner-nccl.yaml'}:104: error wrong-list at $.spec.pytorchReplicaSpecs.Worker" in out
    assert out.endswith("2 files: 4 errors, 6 warnings\n")


def test_json_output_has_one_entry_per_problem(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "practitioner-nccl.yaml")
    assert main(["check", file, "--output", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found[2] == {
        "file": file,
        "line": 104,
        "level": "error",
        "code": "wrong-list",
        "path": "$.spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].volumeMounts[5]",
        "message": "NCCL_DEBUG is in volumeMounts, but is an entry of env",
        "found": "{name, value}",
        "expected": "{name, mountPath}",
        "hint": "move it to env",
    }


def test_every_job_of_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = mpijob()
    del wrong["spec"]["mpiReplicaSpecs"]["Launcher"]
    file = tmp_path / "two.yaml"
    file.write_text(f"{GOOD}---\nkind: ConfigMap\n---\n{yaml.safe_dump(wrong)}")
    assert main(["check", str(file)]) == 1
    out = capsys.readouterr().out
    assert "error launcher-count at $.spec.mpiReplicaSpecs.Launcher" in out


def test_several_jobs_in_a_file_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A task and `ktrain run` refuse the file, because one task is one job."""
    file = tmp_path / "two.yaml"
    file.write_text(f"{GOOD}---\n{GOOD}")
    assert main(["check", str(file)]) == 1
    second = len(GOOD.splitlines()) + 2
    expected = f"{file}:{second}: error several-jobs at $: another training job in this file"
    assert capsys.readouterr().out.splitlines()[0].startswith(expected)
    file.write_text(GOOD)
    assert main(["check", str(file), str(DATA / "torchrun-cpu.yaml")]) == 0


def test_other_documents_of_the_file_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: settings}}\n---\n{GOOD}")
    assert main(["check", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"{file}:5: warning beside at $: ConfigMap settings is not submitted" in out


@pytest.mark.parametrize(("text", "line"), [("a: 1\nb: [", 2), ("kind: ConfigMap\n", 1), ("", 1), ("a: 1\na: 2\n", 2)])
def test_file_without_a_training_job_is_an_error(
    text: str, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().out.startswith(f"{file}:{line}: error ")


def test_template_expressions_are_checked_after_rendering(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    text = GOOD.replace("image: registry/train:1", "image: {{ params.image }}").replace(
        "replicas: 1", "replicas: {{ n }}"
    )
    file.write_text(f"{{# a comment #}}\n{text}")
    assert text.count("{{") == 4
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == "1 file: 0 errors, 0 warnings\n"
    file.write_text(text.replace("name: pytorch\n", "name: other\n"))
    assert main(["check", str(file)]) == 1
    assert "error container-name" in capsys.readouterr().out


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "example_dags" / "manifests").glob("*.yaml")), ids=lambda f: f.name
)
def test_example_manifests_have_no_errors(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(file)]) == 0, capsys.readouterr().out


def test_the_demo_has_no_warnings() -> None:
    """They would be the first lines that a new user sees."""
    text = (Path(__file__).parents[2] / "example_dags" / "manifests" / "pytorch_demo.yaml").read_text()
    params = {"image": "pytorch-demo:latest", "epochs": 5, "epoch_seconds": 0.3, "gpus": 1}
    assert check(yaml.safe_load(jinja2.Template(text).render(params=params))) == []


def test_manifest_is_read_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD))
    assert main(["check", "-"]) == 0
    assert "0 errors" in capsys.readouterr().out


@pytest.mark.parametrize("others", ["", "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\n"])
def test_misspelled_kind_in_a_directory_is_reported(
    others: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "wrong.yaml").write_text(GOOD.replace("kind: PyTorchJob", "kind: PytorchJob") + others)
    (tmp_path / "web.yaml").write_text("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: web}\n")
    (tmp_path / "cron.yaml").write_text("apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: cron}\n")
    other = "apiVersion: sagemaker.services.k8s.aws/v1alpha1\nkind: TrainingJob\nmetadata: {name: other}\n"
    (tmp_path / "sagemaker.yaml").write_text(other)
    assert main(["check", str(tmp_path)]) == 1
    error, summary = capsys.readouterr().out.splitlines()
    assert error.startswith(f"{tmp_path / 'wrong.yaml'}:")
    assert "did you mean PyTorchJob?" in error
    assert summary == "2 files: 1 error, 0 warnings"


def test_misspelled_kind_beside_a_training_job_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"{GOOD}---\nkind: TrainingJob\nmetadata: {{name: other}}\n")
    assert main(["check", str(file)]) == 0
    assert "TrainingJob other is not submitted, only the training job is: did you mean TrainJob?" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("arguments", [["--output", "json"], []])
def test_closed_pipe_ends_the_command_without_a_traceback(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "airflow_provider_ktrain.cli", "check", str(DATA / "practitioner-nccl.yaml")]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run([*command, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr.replace(HINT, "")) == (128 + signal.SIGPIPE, "")


def test_exit_status_is_2_for_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "absent.yaml")]) == 2
    assert "absent.yaml can't be read: No such file or directory" in capsys.readouterr().err
    nowhere = str(tmp_path / "kubeconfig")
    assert main(["check", "--server", "--kubeconfig", nowhere, str(DATA / "torchrun-cpu.yaml")]) == 2
    assert f"the kubeconfig {nowhere} does not exist: set --kubeconfig" in capsys.readouterr().err
    assert main(["check", str(DATA / "torchrun-cpu.yaml"), "--namespace", "training"]) == 2
    assert "need --server" in capsys.readouterr().err
    with pytest.raises(SystemExit) as e:
        main(["check"])
    assert e.value.code == 2


def test_problems_in_a_list_have_the_line_of_their_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = pytorchjob()
    wrong["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = 2
    file = tmp_path / "list.yaml"
    file.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [pytorchjob(), wrong]}))
    assert main(["check", str(file)]) == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if " error master-count " in x]
    number = int(line.removeprefix(f"{file}:").partition(":")[0])
    assert file.read_text().splitlines()[number - 1].strip() == "replicas: 2"
    assert "error master-count at $.spec.pytorchReplicaSpecs.Master.replicas" in line


def test_errors_are_first_and_each_level_is_in_the_order_of_the_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = pytorchjob()
    replicas = wrong["spec"]["pytorchReplicaSpecs"]
    del replicas["Master"]["restartPolicy"], replicas["Master"]["replicas"]
    replicas["Worker"]["template"]["spec"]["containers"][0] |= {"image": "trainer", "comand": ["true"]}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(wrong, sort_keys=False))
    assert main(["check", "--output", "json", str(file)]) == 1
    found = [(problem["level"], problem["line"]) for problem in json.loads(capsys.readouterr().out)]
    assert len(found) > 3
    assert found == sorted(found)


def test_users_of_pytorchjob_get_one_hint_about_their_platform(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = {"a": pytorchjob(), "b": pytorchjob(), "c": trainjob()}
    for name, manifest in manifests.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(manifest))
    assert main(["check", *(str(tmp_path / f"{name}.json") for name in manifests)]) == 0
    (hint,) = capsys.readouterr().err.splitlines()
    assert hint.startswith("hint: Kubeflow's platform releases after 26.03 contain Kubeflow Trainer 2")
    assert main(["check", str(tmp_path / "c.json")]) == 0
    assert capsys.readouterr().err == ""
