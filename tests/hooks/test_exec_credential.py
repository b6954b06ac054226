"""An exec plugin runs once in a process while its credential is valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.hooks import kubeconfig
from airflow_provider_ktrain.hooks.training import TrainingHook
from tests import clusters
from tests.clusters import TestCluster, least_rights
from tests.hooks.certificates import CERTIFICATE, KEY
from tests.operators.conftest import set_connection
from tests.operators.task_instance import Instance

API = "client.authentication.k8s.io/v1"


class Plugin:
    """A kubeconfig with an exec plugin that counts its runs.

    :param folder: for its files.
    :param content: of a kubeconfig with a token.
    """

    def __init__(self, folder: Path, content: Any) -> None:
        self._folder = folder
        self.token = str(content["users"][0]["user"]["token"])
        script = folder / "plugin"
        script.write_text(f"#!/bin/sh\necho run >> {folder}/runs\ncat {folder}/answer\n")
        script.chmod(0o700)
        content["users"][0]["user"] = {"exec": {"apiVersion": API, "command": str(script), "interactiveMode": "Never"}}
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(content))
        self.returns(token=self.token)

    def returns(self, **status: Any) -> None:
        """Set the `status` that the plugin returns."""
        answer = {"apiVersion": API, "kind": "ExecCredential", "status": status}
        (self._folder / "answer").write_text(json.dumps(answer))

    @property
    def runs(self) -> int:
        """How often it has run."""
        runs = self._folder / "runs"
        return len(runs.read_text().splitlines()) if runs.exists() else 0

    async def configuration(self, *, renew: bool = False) -> Any:
        """A client configuration."""
        return await kubeconfig.configuration("c", None, {"kube_config_path": str(self.kubeconfig)}, renew=renew)


@pytest.fixture(scope="module")
def cluster() -> Iterator[TestCluster]:
    with clusters.cluster() as reached:
        yield reached


@pytest.fixture
def plugin(cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    made = Plugin(tmp_path, least_rights(cluster, "plugin"))
    set_connection(TestCluster(made.kubeconfig, cluster.namespace, cluster.embedded), monkeypatch)
    return made


async def request() -> None:
    """A request with a new client."""
    async with TrainingHook().api() as api:
        await api.request("GET", "/apis/kubeflow.org/v1")


def test_exec_plugin_runs_once_for_a_task(cluster: TestCluster, plugin: Plugin) -> None:
    """For its submission, following and release."""
    with Instance(cluster) as instance:
        instance.execute(command=["true"], deferrable=False)
        assert not instance.jobs()
    assert plugin.runs == 1


async def test_exec_plugin_runs_again_after_a_401(cluster: TestCluster, plugin: Plugin) -> None:
    """Its next credential is used from then on, by clients of other event loops as well."""
    plugin.returns(token="refused", expirationTimestamp=after(hours=1))
    await plugin.configuration()
    plugin.returns(token=plugin.token, expirationTimestamp=after(hours=1))
    await request()
    assert plugin.runs == 2
    await request()
    assert plugin.runs == 2


async def test_refused_credential_is_not_used_if_the_exec_plugin_fails(plugin: Plugin) -> None:
    await plugin.configuration()
    plugin.returns()
    for renew in (True, False):
        with pytest.raises(AccessError, match="the plugin returned neither a token nor a certificate with its key"):
            await plugin.configuration(renew=renew)
    assert plugin.runs == 3


@pytest.mark.parametrize(
    ("seconds", "runs"), [(-1, 2), (kubeconfig.EXPIRY_MARGIN_SECONDS / 2, 2), (3600, 1), (None, 1)], ids=str
)
async def test_exec_plugin_runs_again_after_the_expiry(plugin: Plugin, seconds: float | None, runs: int) -> None:
    expiry = {} if seconds is None else {"expirationTimestamp": after(seconds=seconds)}
    plugin.returns(token="first", **expiry)
    await plugin.configuration()
    plugin.returns(token="second", **expiry)
    configuration = await plugin.configuration()
    assert plugin.runs == runs
    assert configuration.api_key["BearerToken"] == f"Bearer {'first' if runs == 1 else 'second'}"


async def test_exec_plugin_runs_again_after_a_change_of_its_section(plugin: Plugin) -> None:
    await plugin.configuration()
    content = yaml.safe_load(plugin.kubeconfig.read_text())
    content["users"][0]["user"]["exec"]["env"] = [{"name": "ROLE", "value": "other"}]
    plugin.kubeconfig.write_text(yaml.safe_dump(content))
    await plugin.configuration()
    assert plugin.runs == 2


async def test_certificate_of_an_exec_plugin_is_reused(plugin: Plugin) -> None:
    plugin.returns(clientCertificateData=CERTIFICATE, clientKeyData=KEY)
    for _ in range(2):
        configuration = await plugin.configuration()
        assert texts(configuration.cert_file, configuration.key_file) == [CERTIFICATE, KEY]
        assert "BearerToken" not in configuration.api_key
    assert plugin.runs == 1


def after(**span: float) -> str:
    """A timestamp."""
    return (datetime.now(UTC) + timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def texts(*paths: str) -> list[str]:
    return [Path(path).read_text() for path in paths]
