"""A proxy before a cluster's API server that records each request, watches and log streams included."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from kubernetes_asyncio import client, config

from airflow_provider_ktrain.engine.api.connection_pools import READ_BUFFER_BYTES
from tests.clusters import TestCluster

VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class RequestLog:
    """The requests that a proxy has received.

    :param kubeconfig: path of a kubeconfig that leads to the proxy.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.lines: list[str] = []  #: method and URL of each request, in order
        self.counts: Counter[str] = Counter()  #: verb and resource, such as `list pods`, or `discovery`

    def take(self) -> Counter[str]:
        """The counts since the previous call."""
        taken, self.counts = self.counts, Counter()
        self.lines = []
        return taken

    def add(self, request: web.Request) -> None:
        """Record a request."""
        self.lines.append(f"{request.method} {request.rel_url}")
        self.counts[_kind_of_request(request.method, request.path, request.query)] += 1


def _kind_of_request(method: str, path: str, query: Any) -> str:
    parts = path.strip("/").split("/")
    if parts[0] == "openapi":
        return "discovery"
    if "namespaces" not in parts:
        return "discovery" if len(parts) <= 3 else f"{VERBS[method]} {parts[-2]}"
    if "follow" in query:
        return "follow pods/log"
    _, _, *resource = parts[parts.index("namespaces") :]
    if len(resource) == 1 and method == "GET":
        return f"{'watch' if 'watch' in query else 'list'} {resource[0]}"
    return f"{VERBS[method]} {'/'.join(resource[::2])}"


@contextlib.contextmanager
def recorded_requests(cluster: TestCluster, directory: Path) -> Iterator[RequestLog]:
    """Record the requests of clients that use the kubeconfig of the log.

    :param directory: for that kubeconfig.
    """
    log = RequestLog(directory / "recorded.kubeconfig")
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with _proxy(cluster, log):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(60), "the proxy doesn't start"
        yield log
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


@contextlib.asynccontextmanager
async def _proxy(cluster: TestCluster, log: RequestLog) -> Any:
    configuration = client.Configuration()
    await config.load_kube_config(str(cluster.kubeconfig), client_configuration=configuration)
    api = client.ApiClient(configuration)
    session = api.rest_client.pool_manager

    async def forward(request: web.Request) -> web.StreamResponse:
        log.add(request)
        headers = {k: v for k, v in request.headers.items() if k in ("Accept", "Content-Type", "Accept-Encoding")}
        await api.update_params_for_auth(headers, [], ["BearerToken"])
        async with session.request(
            request.method,
            configuration.host + request.raw_path,
            data=await request.read(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            return response

    app = web.Application(client_max_size=READ_BUFFER_BYTES * 64)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address,) = runner.addresses
        log.kubeconfig.write_text(yaml.safe_dump(_kubeconfig(f"http://127.0.0.1:{address[1]}")))
        yield
    finally:
        await runner.cleanup()
        await api.close()


def _kubeconfig(server: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        "clusters": [{"name": "proxy", "cluster": {"server": server}}],
        "users": [{"name": "proxy", "user": {}}],
    }
