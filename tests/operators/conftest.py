from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from airflow_provider_ktrain.core.kinds import PYTORCHJOB
from tests.clusters import TestCluster
from tests.operators.task_instance import Instance


@pytest.fixture
def instance(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Instance]:
    """A task instance in its own deployment; `of_each_kind` sets its kind. Its job is deleted at the end."""
    set_connection(cluster, monkeypatch)
    with Instance(cluster, getattr(request, "param", PYTORCHJOB)) as made:
        yield made


def set_connection(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point the default connection to this cluster."""
    extra = {"kube_config_path": str(cluster.kubeconfig), "namespace": cluster.namespace}
    monkeypatch.setenv("AIRFLOW_CONN_KUBERNETES_DEFAULT", json.dumps({"conn_type": "kubernetes", "extra": extra}))
    monkeypatch.setenv("AIRFLOW__KTRAIN__DEPLOYMENT_ID", "tests")
    monkeypatch.setenv("AIRFLOW__KTRAIN__WORKER_SECONDS", "0.5")
