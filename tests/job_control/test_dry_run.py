"""`dry_run=True`: all checks are made, and nothing is created."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_ktrain.core.kinds import MPIJOB
from airflow_provider_ktrain.exceptions import TrainingConfigurationError
from airflow_provider_ktrain.operators.training import MPIJobOperator, PyTorchJobOperator
from tests.clusters import TestCluster, require
from tests.core.manifests import DATA
from tests.job_control.jobs import Jobs

TI = SimpleNamespace(
    dag_id="dag", task_id="train", run_id="run", map_index=-1, id="ti", try_number=1, max_tries=0, xcom_push=print
)


def dry_run(operator: type[Any] = PyTorchJobOperator, **arguments: Any) -> Any:
    return operator(task_id="train", dry_run=True, **arguments).execute({"ti": TI})


def test_valid_job_passes(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    before = jobs.names()
    assert dry_run(image="scratch:1", command=["true"], workers=2, gpus=1) is None
    output = "".join(capfd.readouterr())
    assert f"Dry run: no errors found in PyTorchJob {jobs.namespace}/train-" in output
    assert "nothing was created" in output
    assert jobs.names() <= before


def test_valid_mpijob_passes(jobs: Jobs, cluster: TestCluster) -> None:
    require(cluster, MPIJOB, "v1")
    before = jobs.names()
    assert dry_run(MPIJobOperator, image="scratch:1", command=["true"], workers=2) is None
    assert jobs.names() <= before


@pytest.mark.usefixtures("without_kueue")
def test_warning_of_the_cluster_is_logged(jobs: Jobs, capfd: pytest.CaptureFixture[str]) -> None:
    dry_run(image="scratch", queue_name="team-a")
    output = "".join(capfd.readouterr())
    assert output.count("Kueue is not installed") == 1
    assert output.count("the image has no tag") == 1


def test_all_errors_are_reported_at_once(jobs: Jobs) -> None:
    with pytest.raises(TrainingConfigurationError, match="the namespace does not exist; found nowhere"):
        dry_run(image="scratch:1", namespace="nowhere")
    with pytest.raises(TrainingConfigurationError, match=r"(?s)container-name.*NCCL_DEBUG is in volumeMounts"):
        dry_run(manifest=str(DATA / "practitioner-nccl.yaml"))
    with pytest.raises(TrainingConfigurationError, match=r"the API server refused the manifest .*managedBy: "):
        dry_run(manifest=jobs.build(command=["true"], spec={"runPolicy": {"managedBy": "somebody"}}))


def test_name_in_the_manifest_is_ignored(jobs: Jobs) -> None:
    """Also if it is invalid or too long: the task sets the name of the job."""
    manifest = jobs.build(command=["true"])
    manifest["metadata"]["name"] = "My_Training " * 10
    assert dry_run(manifest=manifest) is None
