"""`ktrain run --code`, and jobs without a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from airflow_provider_ktrain.cli import main
from tests.cli.conftest import Start
from tests.cli.test_run import job

PROGRAM = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])\n"


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory with a program, in the working directory."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training/train.py").write_text(PROGRAM)
    return tmp_path / "training"


@pytest.mark.embedded
@pytest.mark.usefixtures("code")
def test_command_runs_in_the_code_of_a_job_without_a_manifest(ktrain: Start) -> None:
    command = ktrain("run", "--local", "--code", "training", "--", "python3", "train.py", "--epochs", "3")
    assert command.end() == 0, command.output
    assert "PyTorchJob default/training-" in command.output
    assert "Code: 1 file, " in command.output
    assert "[Master 0] rank 0 of 2 ['--epochs', '3']" in command.output  # and there was a Worker


@pytest.mark.embedded
@pytest.mark.usefixtures("code")
def test_command_and_code_replace_those_of_a_manifest(ktrain: Start, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("exit 3", workers=1)))
    command = ktrain(
        "run", "--local", "--workers", "0", "--code", "training/train.py", "job.yaml", "--", "python3", "train.py", "x"
    )
    assert command.end() == 0, command.output
    assert "[Master 0] rank 0 of 1 ['x']" in command.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local"], "found neither FILE nor a command"),
        (["--", "python3", "train.py"], "--image: expected the image of the job"),
        (["--image", "i", "--image", "j=.", "--", "true"], "--image and --gpus-per-node need --local"),
        (["--image", "i", "--code", "missing", "--", "true"], "code: the code can't be read: No such file"),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
