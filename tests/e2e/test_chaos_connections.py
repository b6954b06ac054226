"""`make chaos`: connections that KubernetesPodOperator accepts, in workers and triggerers.

`tests/hooks/test_kubeconfig.py` compares all extras of a connection with Airflow's own hook.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.clusters import TestCluster
from tests.e2e.airflow import ROOT, Airflow, running
from tests.e2e.chaos import QUICK, begin, check_end, cluster
from tests.e2e.conftest import DAGS
from tests.e2e.scenario import Begin, Stage

__all__ = ["airflow", "begin", "cluster"]  # fixtures
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

# Airflow imports this module in each process; the paths are constants of the client library
LOCAL_SETTINGS = """
from kubernetes_asyncio.config import incluster_config

incluster_config.SERVICE_TOKEN_FILENAME = "{folder}/token"
incluster_config.SERVICE_CERT_FILENAME = "{folder}/ca.crt"
"""


@dataclass(frozen=True)
class Pod:
    """The files of a pod with a service account; Airflow's processes use `folder` for /var/run/secrets/...

    :param folder: empty except within `mounted`.
    :param server: the cluster's entry in its kubeconfig.
    :param token: empty if the kubeconfig has a client certificate instead.
    """

    folder: Path
    server: dict[str, Any]
    token: str

    @property
    def env(self) -> dict[str, str]:
        url = urlsplit(self.server["server"])
        return {"KUBERNETES_SERVICE_HOST": str(url.hostname), "KUBERNETES_SERVICE_PORT": str(url.port or 443)}

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """The service account's files exist."""
        if not self.token:
            pytest.skip("the cluster's kubeconfig has no token")
        authority, token = self.folder / "ca.crt", self.folder / "token"
        authority.write_bytes(base64.b64decode(self.server["certificate-authority-data"]))
        token.write_text(self.token)
        yield
        authority.unlink()
        token.unlink()


@pytest.fixture(scope="module")
def pod(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    token = content["users"][0]["user"].get("token", "")
    return Pod(tmp_path_factory.mktemp("serviceaccount"), content["clusters"][0]["cluster"], token)


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, pod: Pod, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    """An Airflow without `kubernetes_default` and without a default kubeconfig."""
    folder = tmp_path_factory.mktemp("configuration")
    (folder / "airflow_local_settings.py").write_text(LOCAL_SETTINGS.format(folder=pod.folder))
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    content["clusters"][0]["cluster"].pop("certificate-authority-data")
    (folder / "without-ca").write_text(yaml.safe_dump(content))
    extra = {"kube_config_path": str(folder / "without-ca")}
    settings = {
        "AIRFLOW_CONN_KUBERNETES_DEFAULT": "",
        "AIRFLOW_CONN_VERIFIED": json.dumps({"conn_type": "kubernetes", "extra": extra}),
        "AIRFLOW_CONN_UNVERIFIED": json.dumps(
            {"conn_type": "kubernetes", "extra": {**extra, "disable_verify_ssl": True}}
        ),
        "KUBECONFIG": str(folder / "absent"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "TEST_NAMESPACE": cluster.namespace,
    }
    dags = tmp_path_factory.mktemp("dags")
    (dags / "chaos_connections.py").symlink_to(DAGS / "chaos_connections.py")
    with running(tmp_path_factory.mktemp("airflow"), cluster, dags, **QUICK, **pod.env, **settings) as started:
        yield started


def check_deferred_and_trained(stage: Stage) -> None:
    """The worker submitted the job, and a triggerer followed it to the end."""
    stage.wait_followed()
    check_end(stage, "success")
    stage.check_lines(15)


def test_no_connection_and_no_kubeconfig(begin: Begin) -> None:
    stage = begin("chaos_default")
    stage.wait_state("failed")
    assert "No cluster is configured: the connection 'kubernetes_default' is missing or empty" in stage.log()
    assert "Add the connection: airflow connections add kubernetes_default" in stage.log()


def test_service_account_without_a_connection(begin: Begin, pod: Pod) -> None:
    with pod.mounted():
        check_deferred_and_trained(begin("chaos_default"))


def test_disable_verify_ssl(begin: Begin) -> None:
    check_deferred_and_trained(begin("chaos_unverified"))


def test_unknown_certificate_authority(begin: Begin) -> None:
    """Without disable_verify_ssl, the same kubeconfig is rejected."""
    stage = begin("chaos_verified")
    stage.wait_line("certificate verify failed")
    stage.check_created(0)
    try:
        stage.set_state("failed")
    except AssertionError as e:  # on a slow machine, the task has failed before its log could be read
        if "already in failed state" not in str(e):
            raise
