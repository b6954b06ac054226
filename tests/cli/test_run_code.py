"""`ktrain run --code`, and jobs without a manifest."""

from __future__ import annotations

import argparse
import uuid
from pathlib import Path

import pytest
import yaml

from airflow_provider_ktrain.cli import main, run
from airflow_provider_ktrain.cli.console import Console
from airflow_provider_ktrain.cli.run_host import RunHost
from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.errors import NoRightError
from airflow_provider_ktrain.core.identity.names import CODE_ANNOTATION, Owner, TaskKey
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from airflow_provider_ktrain.core.manifest.code import CodeFile, pack
from airflow_provider_ktrain.core.manifest.job_request import JobRequest
from airflow_provider_ktrain.core.manifest.overlay import JobOptions, build
from airflow_provider_ktrain.core.manifest.start import run_with_code
from airflow_provider_ktrain.core.prepare import CODE_HINT
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.api.job_calls import find
from tests import clusters
from tests.cli.conftest import Start
from tests.cli.test_run import job
from tests.clusters import TestCluster
from tests.engine.tasks import Lines, MeddledApi, api_of

PROGRAM = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
print("task", os.environ["KTRAIN_DAG_ID"], os.environ["KTRAIN_TASK_ID"])
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A directory with a program, in the working directory."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training/train.py").write_text(PROGRAM)
    return tmp_path / "training"


@pytest.mark.embedded("starts a cluster by --local")
@pytest.mark.usefixtures("code")
def test_command_runs_in_the_code_of_a_job_without_a_manifest(ktrain: Start) -> None:
    command = ktrain("run", "--local", "--code", "training", "--", "python3", "train.py", "--epochs", "3")
    assert command.end() == 0, command.output
    assert "warning" not in command.output
    assert "PyTorchJob default/training-" in command.output
    assert "Code: 1 file, " in command.output
    assert "[Master 0] rank 0 of 2 ['--epochs', '3']" in command.output  # and there was a Worker
    assert "[Master 0] task ktrain-run training" in command.output


@pytest.mark.thorough
@pytest.mark.embedded("starts a cluster by --local")
@pytest.mark.usefixtures("code")
def test_a_file_that_the_code_lacks_is_named_relative_to_it(ktrain: Start) -> None:
    command = ktrain("run", "--local", "--code", "training", "--", "python3", "trian.py")
    assert command.end() == 1, command.output
    (cause,) = [line for line in command.lines if "Master 0 can't find its program in the code that was sent" in line]
    assert "can't open file 'trian.py': [Errno 2]" in cause
    assert "it is relative to the directory of `code` or --code" in command.output


@pytest.mark.thorough
@pytest.mark.embedded("starts a cluster by --local")
@pytest.mark.usefixtures("code")
def test_command_and_code_replace_those_of_a_manifest(ktrain: Start, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job("exit 3", workers=1)))
    command = ktrain(
        "run", "--local", "--workers", "0", "--code", "training/train.py", "job.yaml", "--", "python3", "train.py", "x"
    )
    assert command.end() == 0, command.output
    assert "[Master 0] rank 0 of 1 ['x']" in command.output


def test_saved_manifest_is_loaded_without_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = run_with_code(job("exit 3"), "config-map")
    saved["metadata"]["annotations"] = {CODE_ANNOTATION: "9aa995aa444c91db"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(saved))
    parser = argparse.ArgumentParser()
    run.add_parser(parser.add_subparsers())
    prepared, _ = run.load(
        parser.parse_args(["run", str(tmp_path / "job.yaml")], argparse.Namespace(program=[])), Console()
    )
    assert prepared.manifest["spec"] == job("exit 3")["spec"]
    assert CODE_HINT in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.embedded("starts a cluster by --local")
def test_job_of_a_command_without_a_name(ktrain: Start) -> None:
    command = ktrain("run", "--local", "--", "/")
    assert command.end() == 3, command.output  # the command can't be started
    assert "PyTorchJob default/job-" in command.output


class Behind403(MeddledApi):
    """A proxy denies ConfigMaps. This does not prove that the API server does."""

    async def before(self, method: str, path: str) -> None:
        if method == "POST" and path.endswith("/configmaps"):
            raise ApiStatusError(403, message="<html>denied</html>")


async def test_job_whose_code_cannot_be_sent_is_deleted(cluster: TestCluster) -> None:
    manifest = build("PyTorchJob", JobOptions(image=clusters.IMAGE, command=["true"]))
    owner = Owner(TaskKey("tests", "ktrain-run", "unsent", uuid.uuid4().hex), 1, "ti")
    request = JobRequest(PYTORCHJOB, owner, 1, manifest, code=pack([CodeFile("train.py")]))
    async with api_of(cluster, Behind403) as api:
        log = Lines()
        with pytest.raises(NoRightError):
            await RunHost(api, request, cluster.namespace, log).run()
        assert f"{request.job_name} deleted." in str(log)
        assert (await find(api, PYTORCHJOB, cluster.namespace, request.job_name))[1] is ABSENT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local"], "found neither FILE nor a command"),
        (["--", "python3", "train.py"], "--image is missing: add --image NAME"),
        (["--image", "i=.", "--", "true"], "--image NAME=DIR and --gpus-per-node need --local"),
        (["--image", "i", "--image", "j=.", "--", "true"], "--image NAME=DIR and --gpus-per-node need --local"),
        (
            ["--image", "i", "--code", "missing", "--", "true"],
            "--code: the code can't be read: No such file or directory; found missing; "
            f"expected a readable file or directory, absolute or relative to {Path.cwd()}",
        ),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err.replace("\n", "; ")
    assert "bundle" not in err, "a DAG bundle is a term of Airflow"
