"""A pytest plugin: the fixture `ktrain_cluster`, an embedded cluster for tests of your own DAGs.

pytest loads this module in every session of an environment that has the package, so importing it must stay cheap:
neither Airflow nor the embedded cluster is imported until a test uses the fixture.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from airflow_provider_ktrain.embedded import EmbeddedCluster

__all__ = ["KtrainCluster", "ktrain_cluster", "ktrain_cluster_options"]

CONNECTION = "AIRFLOW_CONN_KUBERNETES_DEFAULT"
DEPLOYMENT = "AIRFLOW__KTRAIN__DEPLOYMENT_ID"


@dataclass(frozen=True)
class KtrainCluster:
    """What the fixture `ktrain_cluster` returns.

    :param kubeconfig: path of the cluster's kubeconfig, for `kubectl` and for clients.
    :param namespace: a namespace that only this test uses. It is the namespace of the connection.
    :param connection: the Airflow connection to the cluster and the namespace, as JSON.
    """

    kubeconfig: Path
    namespace: str
    connection: str

    def create_namespace(self, name: str) -> None:
        """Create another namespace, for DAGs that name one. Its jobs are not deleted at the end of the test.

        :param name: the namespace. It may exist already.
        """
        self._change("create_namespace", {"metadata": {"name": name}})

    def delete(self) -> None:
        """Delete the namespace of the test with everything in it. The fixture calls this at the end."""
        self._change("delete_namespace", self.namespace)

    def _change(self, method: str, namespace: Any) -> None:
        from kubernetes import client, config

        with config.new_client_from_config(str(self.kubeconfig)) as api:
            try:
                getattr(client.CoreV1Api(api), method)(namespace)
            except client.ApiException as e:
                if e.status != 409:  # the namespace exists, or is being deleted
                    raise


@pytest.fixture(scope="session")
def ktrain_cluster_options() -> Mapping[str, Any]:
    """Options of the cluster. Override this fixture in your conftest.py to change them.

    Keys are the parameters of `EmbeddedCluster`: `images` (directory by image name; `*` for every other image),
    `nodes`, `gpus_per_node`, `resources`, `mpi_api`. Default: 8 simulated GPUs, and all images run in the directory in
    which pytest was started.
    """
    return {}


@pytest.fixture(scope="session")
def _ktrain_embedded_cluster(ktrain_cluster_options: Mapping[str, Any]) -> Iterator[EmbeddedCluster]:
    """One cluster for the session; it starts when the first test needs it."""
    from airflow_provider_ktrain import embedded

    options = {"gpus_per_node": 8, "images": {"*": os.getcwd()}, **ktrain_cluster_options}
    with embedded.running(**options) as cluster:
        yield cluster


@pytest.fixture
def ktrain_cluster(
    _ktrain_embedded_cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KtrainCluster]:
    """An embedded cluster with a namespace for this test, and the Airflow connection `kubernetes_default` to it.

    The connection is set in the environment variable AIRFLOW_CONN_KUBERNETES_DEFAULT, so `dag.test()` uses it.
    """
    embedded, namespace = _ktrain_embedded_cluster, f"test-{secrets.token_hex(4)}"
    extra = {"kube_config_path": str(embedded.kubeconfig), "namespace": namespace}
    connection = json.dumps({"conn_type": "kubernetes", "extra": extra})
    monkeypatch.setenv(CONNECTION, connection)
    monkeypatch.setenv(DEPLOYMENT, namespace)
    cluster = KtrainCluster(embedded.kubeconfig, namespace, connection)
    cluster.create_namespace(namespace)
    yield cluster
    cluster.delete()
