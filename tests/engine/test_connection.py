"""How a connection reaches the API server: without the event loop's threads, by the proxy of the environment."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from kubernetes_asyncio.client import ApiClient

from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.connection_pools import environment_proxy
from tests.apiserver import PODS, PodServer, clients, serving

from .tasks import occupied_threads


async def test_requests_do_not_wait_for_the_threads_of_the_loop() -> None:
    """Triggers of other providers share these threads. The name of the API server is resolved in another thread."""
    kube = PodServer()
    kube.put_pod("a")
    async with clients(kube) as make_client:

        async def by_name() -> ApiClient:
            client = await make_client()
            client.configuration.host = client.configuration.host.replace("127.0.0.1", "localhost")
            return client

        api = Api(by_name)
        try:
            async with occupied_threads():
                assert (await api.request("GET", f"{PODS}/a"))["metadata"]["name"] == "a"
        finally:
            await api.close()


async def test_netrc_does_not_replace_the_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    kube = PodServer()
    kube.put_pod("a")
    async with serving(kube) as api:
        assert (await api.request("GET", f"{PODS}/a"))["metadata"]["name"] == "a"


async def test_plain_http_needs_no_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs 38 ms, and a triggerer has a client for each connection."""

    def fail(**_: object) -> None:
        raise AssertionError("a TLS context was made")

    monkeypatch.setattr(ssl, "create_default_context", fail)
    kube = PodServer()
    kube.put_pod("a")
    async with serving(kube) as api:
        assert (await api.request("GET", f"{PODS}/a"))["metadata"]["name"] == "a"


async def test_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = PodServer()
    kube.put_pod("a")
    async with clients(kube) as make_client:

        async def behind_proxy() -> ApiClient:
            client = await make_client()
            monkeypatch.setenv("HTTP_PROXY", client.configuration.host)
            monkeypatch.setenv("http_proxy", client.configuration.host)
            client.configuration.host = "http://cluster.invalid"
            return client

        api = Api(behind_proxy)
        try:
            assert (await api.request("GET", f"{PODS}/a"))["metadata"]["name"] == "a"
        finally:
            await api.close()


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ({"http_proxy": "http://proxy:3128"}, None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "other, .internal"}, None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "internal.example"}, "http://proxy:3128"),
        ({"https_proxy": "https://proxy:3128"}, None),
    ],
    ids=["none", "for https", "for http only", "NO_PROXY", "NO_PROXY for another host", "reached by TLS"],
)
def test_proxy_depends_on_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], proxy: str | None
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment_proxy("https://user@cluster.internal:6443") == proxy
