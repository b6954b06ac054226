from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from airflow_provider_ktrain.cli import main
from tests import clusters
from tests.clusters import TestCluster
from tests.job_control.jobs import Jobs

Check = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def cluster_v2() -> Iterator[TestCluster]:
    """A cluster that serves MPIJob v2beta1."""
    with clusters.cluster(gpus=8, mpi_api="v2beta1") as reached:
        yield reached


@pytest.fixture
def jobs(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs in the namespace of the connection `kubernetes_default`; they are deleted at the end."""
    yield from _jobs(cluster, monkeypatch)


@pytest.fixture
def jobs_v2(cluster_v2: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    yield from _jobs(cluster_v2, monkeypatch)


def _jobs(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    extra = {"kube_config_path": str(cluster.kubeconfig), "namespace": cluster.namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    with Jobs(cluster) as made:
        yield made


@pytest.fixture
def check(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Run `ktrain check` for a manifest and a cluster or a kubeconfig. Returns its exit status and output."""

    def run(
        manifest: dict[str, Any], target: TestCluster | pathlib.Path, *more: str
    ) -> tuple[int, list[dict[str, Any]]]:
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(manifest))
        if isinstance(target, TestCluster):
            more = ("--namespace", target.namespace, *more)
            target = target.kubeconfig
        status = main(["check", str(file), "--server", "--kubeconfig", str(target), "--output", "json", *more])
        return status, json.loads(capsys.readouterr().out)

    return run
