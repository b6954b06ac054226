from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from tests.clusters import REAL, TestCluster
from tests.operators.task_instance import Instance
from tests.operators.virtual_cluster import virtual_cluster
from tests.operators.virtual_instance import VirtualInstance


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Instance]:
    """A task instance in virtual time, unless it has the mark `programs`; `of_each_kind` sets its kind."""
    kind = getattr(request, "param", PYTORCHJOB)
    if REAL or request.node.get_closest_marker("programs"):
        cluster: TestCluster = request.getfixturevalue("cluster")
        set_connection(cluster, monkeypatch)
        with Instance(cluster, kind) as made:
            yield made
        return
    with virtual_cluster(tmp_path) as virtual:
        set_connection(virtual, monkeypatch)
        with VirtualInstance(virtual, kind) as made_virtual:
            yield made_virtual


@pytest.fixture
def celery_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this version of Airflow's Celery provider the installed one: `make test-executors` installs another."""

    def install(version: str) -> None:
        folder = tmp_path / f"apache_airflow_providers_celery-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {compat.CELERY_PROVIDER}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def set_connection(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the default connection to this cluster."""
    extra = {"kube_config_path": str(cluster.kubeconfig), "namespace": cluster.namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", "tests")
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "0.5")
