"""The transport over HTTP, on 127.0.0.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from aiohttp import web
from kubernetes_asyncio.client import Configuration

from airflow_provider_ktrain.engine.api.auth_client import AuthClient
from airflow_provider_ktrain.engine.api.client import Api, MakeClient
from tests.apiserver.faults import Lost
from tests.apiserver.messages import Request, Response
from tests.apiserver.server import ApiServer, Stream

T = TypeVar("T")


class _Connection:
    """A request on its way; a `Connection` of the server's faults."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._transport = request.transport

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close it when what was written has been sent."""
        if self._transport is not None:
            self._transport.close()


async def respond(api: ApiServer, request: web.BaseRequest) -> web.StreamResponse:
    """Answer one request."""
    connection = _Connection(request)
    api.connections[id(connection)] = connection
    try:
        answer = await api.handle(await _parsed(request))
    except Lost:
        connection.abort()
        return web.Response()
    finally:
        api.connections.pop(id(connection))
    if isinstance(answer, Response):
        headers = {"Content-Type": answer.content_type, **answer.headers}
        return web.Response(status=answer.status, body=answer.data, headers=headers)
    api.streams[id(connection)] = connection
    try:
        return await _stream(api, request, connection, answer)
    finally:
        api.streams.pop(id(connection))


async def _parsed(request: web.BaseRequest) -> Request:
    data = await request.read()
    try:
        body = json.loads(data) if data else None
    except ValueError:
        body = None
    actor = request.headers.get("Authorization", "").removeprefix("Bearer ")
    line = f"{request.method} {request.rel_url}"
    return Request(request.method, request.path, dict(request.query), body, request.headers, actor, line)


async def _stream(
    api: ApiServer, request: web.BaseRequest, connection: _Connection, answer: Stream
) -> web.StreamResponse:
    """Send pieces until the stream ends, is cut, or its client is gone."""
    response = web.StreamResponse(headers={"Content-Type": answer.content_type})
    response.enable_chunked_encoding()
    await response.prepare(request)
    left = api.cut_after()
    with contextlib.suppress(ConnectionError):
        async with contextlib.aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if left is None or len(piece) < left:
                    await response.write(piece)
                    api.sent += 1
                    left = None if left is None else left - len(piece)
                    continue
                await response.write(piece[:left])
                api.cuts += 1
                if not api.clean_cuts:
                    await asyncio.sleep(0)
                    connection.close()
                break
    return response


# servers


@contextlib.asynccontextmanager
async def served(api: ApiServer) -> AsyncIterator[str]:
    """Serve the API in the running loop; yields its URL. It may be served at several addresses."""
    answering: set[asyncio.Task[Any]] = set()  # aiohttp forgets those whose client is gone

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            return await respond(api, request)
        finally:
            answering.discard(task)

    runner = web.ServerRunner(web.Server(handle), shutdown_timeout=0.01)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        api.break_connections()
        await runner.cleanup()
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)


class InThread:
    """An API server that is served in a thread of its own, for tests that block their own.

    :param make: makes the server, in that thread.
    """

    def __init__(self, make: Callable[[], ApiServer]) -> None:
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._stop, self._started = asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="test-apiserver", daemon=True)
        self.url = ""

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.api = self._make()
        async with served(self.api) as self.url:
            self._started.set()
            await self._stop.wait()

    def call(self, work: Callable[[], T]) -> T:
        """Call a function in the server's thread."""

        async def called() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(60)

    def __enter__(self) -> InThread:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


# clients


async def make_client(url: str, token: str = "") -> AuthClient:
    """A client that authenticates, as the product makes it.

    :param token: its credentials, which name it as an actor. Default: none.
    """
    configuration = Configuration(host=url)
    if token:
        configuration.api_key["BearerToken"] = f"Bearer {token}"
    return AuthClient(configuration)


@contextlib.asynccontextmanager
async def connected(url: str, actor: str = "") -> AsyncIterator[Api]:
    """The product's client of the API at this URL."""
    api = Api(lambda: make_client(url, actor))
    try:
        yield api
    finally:
        await api.close()


@contextlib.asynccontextmanager
async def clients(api: ApiServer) -> AsyncIterator[MakeClient]:
    """Serve the API; yields a function that makes clients with its present token."""
    async with served(api) as url:

        def make() -> Awaitable[AuthClient]:
            return make_client(url, api.token)

        yield make


@contextlib.asynccontextmanager
async def serving(api: ApiServer) -> AsyncIterator[Api]:
    """Serve the API; yields the product's client of it."""
    async with clients(api) as make:
        made = Api(make)
        try:
            yield made
        finally:
            await made.close()


def kubeconfig(directory: Path, url: str, namespace: str, token: str = "") -> Path:
    """Write a kubeconfig that leads to the server."""
    path = directory / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "test",
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
                "clusters": [{"name": "test", "cluster": {"server": url}}],
                "users": [{"name": "test", "user": {"token": token} if token else {}}],
            }
        )
    )  # fmt: skip
    return path
