"""`make chaos`: changes of the access to the API server while a task trains: failing credentials and a changed address.

Airflow reaches the cluster through a forwarder that can move to another port, with a kubeconfig whose exec plugin can
be made to fail. The tests themselves reach it directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes import client, config

from tests.clusters import TestCluster
from tests.e2e.airflow import Airflow, running, wait_for
from tests.e2e.chaos import begin, chaos_airflow, check_end, cluster
from tests.e2e.scenario import Begin

__all__ = ["airflow", "begin", "cluster"]  # fixtures
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
API = "client.authentication.k8s.io/v1"
PLUGIN = """#!/bin/sh
if grep -qx "$TEST_HOSTNAME" {folder}/refused; then echo no role today >&2; exit 1; fi
cat {folder}/credentials
"""


class Forwarder:
    """Forwards HTTP on loopback to an API server; its port can change. A context manager.

    It sends the API server's name as the host, because the embedded cluster accepts no other name.
    """

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text())
        url = urlsplit(content["clusters"][0]["cluster"]["server"])
        self._host, self._at = str(url.hostname), url.port or 443
        configuration = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self._tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            self._tls.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    def __enter__(self) -> Forwarder:
        self._thread.start()
        self.move()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def move(self) -> None:
        """Cut all connections and listen on another port."""
        asyncio.run_coroutine_threadsafe(self._move(), self._loop).result(30)

    async def _move(self) -> None:
        before = self._server
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)  # while the old port is still in use
        self.port = self._server.sockets[0].getsockname()[1]
        if before is not None:
            before.close()
            self._cut()

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._cut()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, to = await asyncio.open_connection(self._host, self._at, ssl=self._tls)
        both = {writer, to}
        self._writers |= both
        own_host, cluster_host = (f"Host: {h}".encode() for h in (f"127.0.0.1:{self.port}", f"{self._host}:{self._at}"))
        try:
            await asyncio.gather(_copy(reader, to, own_host, cluster_host), _copy(answers, writer))
        finally:
            self._writers -= both


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, old: bytes = b"", new: bytes = b"") -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data.replace(old, new) if old else data)
            await writer.drain()
    writer.close()


class ClusterAccess:
    """Airflow's access to the cluster: a kubeconfig with an exec plugin, and the forwarder."""

    def __init__(self, cluster: TestCluster, folder: Path, forwarder: Forwarder) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self._forwarder = forwarder
        self._refused = folder / "refused"
        self._content = yaml.safe_load(cluster.kubeconfig.read_text())
        (folder / "plugin").write_text(PLUGIN.format(folder=folder))
        (folder / "plugin").chmod(0o700)
        token = self._content["users"][0]["user"].get("token", "the forwarder has a client certificate")
        answer = {"apiVersion": API, "kind": "ExecCredential", "status": {"token": token}}
        (folder / "credentials").write_text(json.dumps(answer))
        plugin = {"apiVersion": API, "command": str(folder / "plugin"), "interactiveMode": "Never"}
        self._content["users"][0]["user"] = {"exec": plugin}
        self.refuse()
        self._write()

    def refuse(self, *hosts: str) -> None:
        """Make the exec plugin fail in the processes of these hosts."""
        self._refused.write_text("".join(f"{host}\n" for host in hosts))

    def move(self) -> str:
        """Move the API server to another port and update the kubeconfig; returns its new URL."""
        self._forwarder.move()
        return self._write()

    def _write(self) -> str:
        url = f"http://127.0.0.1:{self._forwarder.port}"
        self._content["clusters"][0]["cluster"] = {"server": url}
        new = self.kubeconfig.with_suffix(".new")
        new.write_text(yaml.safe_dump(self._content))
        os.replace(new, self.kubeconfig)
        return url


@pytest.fixture(scope="module")
def way(cluster: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterAccess]:
    with Forwarder(cluster.kubeconfig) as forwarder:
        yield ClusterAccess(cluster, tmp_path_factory.mktemp("way"), forwarder)


@pytest.fixture(scope="module")
def airflow(cluster: TestCluster, way: ClusterAccess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    extra = {"kube_config_path": str(way.kubeconfig), "namespace": cluster.namespace}
    connection = json.dumps({"conn_type": "kubernetes", "extra": extra})
    with chaos_airflow(cluster, tmp_path_factory, AIRFLOW_CONN_KUBERNETES_DEFAULT=connection) as started:
        yield started


def test_exec_plugin_fails_in_the_triggerer_then_works(begin: Begin, airflow: Airflow, way: ClusterAccess) -> None:
    """The trigger gets no client. The job isn't changed."""
    way.refuse(*(airflow.hosts[name] for name in airflow.triggerers))
    airflow.set_triggerers(*airflow.triggerers)  # the earlier processes keep credentials, which don't expire
    stage = begin("chaos_deferred", seconds=45)
    stage.wait_created()
    stage.wait_line("no role today")
    assert stage.gpus() == 2
    way.refuse()
    check_end(stage, "success")
    stage.check_created(1)


def test_exec_plugin_fails_in_the_worker_then_works(begin: Begin, airflow: Airflow, way: ClusterAccess) -> None:
    """Credentials may work at the next try: the failure isn't final."""
    way.refuse(airflow.hosts["scheduler"])  # workers are its children
    stage = begin("chaos_worker_retries", seconds=5)
    stage.wait_line("no role today")
    way.refuse()
    check_end(stage, "success", try_number=2)


@pytest.mark.parametrize("dag", ["chaos_deferred", "chaos_worker"])
def test_api_server_moves_to_another_port(begin: Begin, way: ClusterAccess, dag: str) -> None:
    stage = begin(dag, seconds=90)
    if dag == "chaos_deferred":
        stage.wait_followed()
    stage.wait_line("[Worker 0] line 3")
    url = way.move()
    later = f"[Worker 0] line {stage.log().count('[Worker 0] line ') + 20}"

    def noticed() -> bool:
        """The log has the new URL, or later lines: a triggerer that used the new URL at once has taken over."""
        return f"is now {url}" in stage.log() or later in stage.log()

    wait_for("the new URL is used", noticed)
    check_end(stage, "success")
    stage.check_lines(90)
