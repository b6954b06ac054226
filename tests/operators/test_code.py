"""`code` of the operators: what runs in the pods of each kind, and what the task logs and stores."""

from __future__ import annotations

import base64
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferred
from kubernetes import client, config

from airflow_provider_ktrain.core.kinds import MPIJOB, TRAINJOB
from airflow_provider_ktrain.decorators.pytorchjob import _PyTorchJobDecoratedOperator
from airflow_provider_ktrain.exceptions import TrainingConfigurationError, TrainingJobError
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator, TrainJobOperator
from tests import clusters
from tests.clusters import TestCluster
from tests.factories import wait_for
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance, Supervisor, supervised
from tests.operators.test_reaper import look

pytestmark = pytest.mark.programs("runs code that was delivered")
SECRET = "hunter2-in-the-code"
PROGRAM = f"""\
import json, os, sys
from lib.model import LOSS
# {SECRET}
print("KTRAIN_RESULT " + json.dumps([LOSS, sys.argv[1:], sorted(os.listdir("."))]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a DAG file, with the directory `training` in it."""
    (tmp_path / "training/lib").mkdir(parents=True)
    (tmp_path / "training/train.py").write_text(PROGRAM)
    (tmp_path / "training/lib/model.py").write_text("LOSS = 0.25\n")
    (tmp_path / "training/notes.txt").write_text("not sent")
    (tmp_path / "training/.ktrainignore").write_text("*.txt\n")
    return tmp_path


def train(instance: Instance, folder: Path, **parameters: Any) -> Any:
    """Train with the directory beside the DAG file; its path is relative."""
    instance.folder = str(folder)
    options = {"code": "training", "command": ["python3", "train.py"], "gpus": None, "deferrable": False}
    return instance.execute(**{**options, **parameters})


def config_maps(instance: Instance) -> list[Any]:
    core = client.CoreV1Api(config.new_client_from_config(str(instance.cluster.kubeconfig)))
    selector = f"ktrain.airflow/run-id={instance.run_id}"
    return list(core.list_namespaced_config_map(instance.cluster.namespace, label_selector=selector).items)


def test_program_runs_in_the_directory_beside_the_dag(
    instance: Instance, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(instance, folder, args=["--epochs", "3"], workers=1) == [0.25, ["--epochs", "3"], ["lib", "train.py"]]
    log = capsys.readouterr().out
    found = re.search(r"Code: 2 files, \d+ bytes \(\d+ bytes packed\), hash (\w{16})\.", log)
    assert found
    assert instance.ti is not None
    assert instance.ti.xcoms["job"]["code"] == found[1]
    assert SECRET not in log + str(instance.ti.xcoms) + str(dict(instance.store))
    assert not instance.jobs()


def test_code_is_not_in_the_triggers_arguments(
    instance: Instance, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sh", "-c", "sleep 600"]
    deferred = train(instance, folder, deferrable=True, command=command)
    assert isinstance(deferred, TaskDeferred)
    (job,) = instance.jobs()
    (sent,) = config_maps(instance)
    assert [owner.uid for owner in sent.metadata.owner_references] == [job["metadata"]["uid"]]
    (archive,) = sent.binary_data.values()
    everything = str(deferred.trigger.serialize()) + str(dict(instance.store)) + capsys.readouterr().out
    assert archive[:40] not in everything
    assert SECRET not in everything
    assert base64.b64decode(archive)


def test_retry_after_a_success_names_the_code(instance: Instance, folder: Path) -> None:
    train(instance, folder, retries=1)
    assert instance.ti is not None
    job = instance.ti.xcoms["job"]
    assert len(job["code"]) == 16
    train(instance, folder, retries=1, number=2)
    assert instance.ti.xcoms["job"] == job


def test_saved_manifest_is_submitted_without_its_code(instance: Instance, folder: Path) -> None:
    train(instance, folder, on_finish_action="keep_job")
    (saved,) = instance.jobs()
    built = PyTorchJobOperator(task_id="again", manifest=saved).build_manifest(saved)
    pod = built["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["python3", "train.py"]
    assert "volumes" not in pod


def test_reaper_leaves_no_config_map(instance: Instance, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", instance.run_id)
    train(instance, folder, deferrable=True, command=["sh", "-c", "sleep 600"])
    assert config_maps(instance)
    with supervised(Supervisor(TaskInstanceState.FAILED)):
        reaper, found = look(instance, dry_run=False)
        assert len(reaper.second_look(instance.context, found)) == 1
    wait_for("the ConfigMap is gone", lambda: not config_maps(instance))


def test_kept_job_keeps_its_config_map(instance: Instance, folder: Path) -> None:
    train(instance, folder, on_finish_action="keep_job")
    assert len(instance.jobs()) == len(config_maps(instance)) == 1
    instance.delete()
    wait_for("the ConfigMap is gone", lambda: not config_maps(instance))


def test_function_imports_modules_of_the_code(instance: Instance, folder: Path) -> None:
    def function() -> Any:
        from lib.model import LOSS  # type: ignore[import-not-found]

        return LOSS

    instance.folder = str(folder)
    result = instance.execute(
        operator=_PyTorchJobDecoratedOperator, python_callable=function, code="training", gpus=None, deferrable=False
    )
    assert result == 0.25


def test_too_large_code_is_final_and_names_the_largest_file(instance: Instance, folder: Path) -> None:
    (folder / "training/weights.bin").write_bytes(os.urandom(800 * 1024))
    with pytest.raises(TrainingConfigurationError, match=r"80\d\.\d KiB packed, at most 700\.0 KiB") as error:
        train(instance, folder)
    assert "weights.bin (800.0 KiB)" in str(error.value)
    assert not instance.jobs()


def test_missing_directory_fails_the_task_and_not_the_dag(instance: Instance, folder: Path) -> None:
    with pytest.raises(TrainingJobError, match="code: the code 'trainin' does not exist") as error:
        train(instance, folder, code="trainin")
    assert str(folder) in str(error.value)
    assert not isinstance(error.value, TrainingConfigurationError), "the bundle may be late"


def test_directory_that_cannot_be_looked_up_is_worth_a_retry(instance: Instance, folder: Path) -> None:
    with pytest.raises(TrainingJobError, match="code: the code can't be read: File name too long") as error:
        train(instance, folder, code="x" * 300)
    assert not isinstance(error.value, TrainingConfigurationError)


def test_dry_run_creates_neither_job_nor_config_map(instance: Instance, folder: Path) -> None:
    assert train(instance, folder, dry_run=True) is None
    assert not instance.jobs()
    assert not config_maps(instance)


@pytest.mark.parametrize("operator", [PyTorchJobOperator, MPIJobOperator, TrainJobOperator])
def test_code_without_a_command_is_refused(
    cluster: TestCluster, instance: Instance, folder: Path, operator: Any
) -> None:
    clusters.require(cluster, operator.kind)
    workers = {"workers": 1} if operator is MPIJobOperator else {}
    with pytest.raises(TrainingConfigurationError, match="code needs a command, because the image's own ENTRYPOINT"):
        train(instance, folder, operator=operator, command=None, **workers)


@pytest.mark.thorough
@pytest.mark.embedded("needs an image with mpirun")
@pytest.mark.skipif(not shutil.which("mpirun", path=Path(sys.executable).parent), reason="needs Open MPI")
@pytest.mark.parametrize("version", [pytest.param("v1", marks=pytest.mark.thorough), "v2beta1"])
def test_ranks_of_an_mpijob_run_in_the_directory(
    version: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "training/rank.py").write_text(
        "import os; from lib.model import LOSS; print('rank', os.environ['OMPI_COMM_WORLD_RANK'], LOSS, flush=True)"
    )
    with clusters.cluster(mpi_api=version) as cluster:
        set_connection(cluster, monkeypatch)
        with Instance(cluster, MPIJOB, version) as instance:
            command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "python3", "rank.py"]
            train(instance, folder, operator=MPIJobOperator, workers=2, command=command)
    log = capfd.readouterr().out
    assert all(f"[Launcher 0] rank {rank} 0.25" in log for rank in range(2))


def test_node_of_a_trainjob_runs_in_the_directory(
    cluster: TestCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_connection(cluster, monkeypatch)
    with Instance(cluster, TRAINJOB) as instance:
        result = train(instance, folder, operator=TrainJobOperator, runtime="torch-distributed", nodes=2)
    assert result == [0.25, [], ["lib", "train.py"]]
