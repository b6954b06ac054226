"""The Kubernetes API as JSON, through one connection, in one event loop.

Short requests, watches and log streams have a connection pool each, so that none waits for another. The clients of
kubernetes_asyncio do the authentication. Requests and streams use sessions of our own, because the sessions of these
clients share one pool and buffer up to 4 MiB per stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.answers import AbsentError, ApiStatusError, ApiUnavailable, Object, interpret
from airflow_provider_ktrain.engine.api.connection_pools import Connection, Pool, serves

if TYPE_CHECKING:
    import aiohttp
    from kubernetes_asyncio.client import ApiClient

__all__ = ["AbsentError", "Api", "ApiStatusError", "ApiUnavailable", "Object", "get", "get_if_allowed", "pause_after"]

MakeClient = Callable[[], Awaitable["ApiClient"]]

CONNECT_TIMEOUT_SECONDS = 15.0
REBUILD_AFTER_FAILURES = 3  #: Failed connection attempts in a row after which the client is rebuilt.
REBUILD_PAUSE_SECONDS = 10.0  #: Pause between two rebuilds because of failed connection attempts.
FAILED_BUILD_PAUSE_SECONDS = 5.0  #: Pause after a client couldn't be built: an exec plugin may be expensive.
FILE_CHECK_SECONDS = 5.0  #: Interval of the check whether the connection's files have changed.
MAX_CLUSTER_LOOKUPS = 10  #: Known objects that are looked up to recognize a cluster at another address.

# why a client is built
FIRST = "first use"
REFUSED = "the API server refused its credentials (401)"
UNREACHABLE = f"{REBUILD_AFTER_FAILURES} connection attempts in a row failed"
CHANGED = "the files of the connection changed"


def pause_after(failures: int, first: float, longest: float) -> float:
    """Exponential backoff in seconds, with jitter so that many clients don't reconnect at the same time.

    :param failures: number of failures in a row, from 1.
    """
    return random.uniform(0.5, 1) * min(longest, first * 2.0 ** min(failures - 1, 30))


async def get(api: Api, path: str, *, timeout: float = 30) -> Object | Absent:
    """The object at a path, or the proof that it doesn't exist.

    :raises ApiStatusError, ApiUnavailable: the request is refused, or the server isn't available.
    """
    try:
        return await api.request("GET", path, timeout=timeout)
    except AbsentError:
        return ABSENT


async def get_if_allowed(api: Api, path: str, *, timeout: float = 30) -> Object | Absent | None:
    """As `get`. None: the right to read the object is missing (403)."""
    try:
        return await get(api, path, timeout=timeout)
    except ApiStatusError as e:
        if e.status == 403:
            return None
        raise


class Api:
    """One Kubernetes API through one connection, in one event loop.

    The client is built on first use. It is rebuilt when the server answers 401 (that request is then repeated once),
    after `REBUILD_AFTER_FAILURES` failed connection attempts in a row, and when `changed` returns True. A rebuilt
    client that reaches another address is used only if it is proven to reach the same cluster: it serves an object that
    `add_known_object` named, or, where none is known, has the same certificate authority.

    One build runs at a time. Requests wait for it, each at most as long as its own timeout.

    :param make_client: builds an authenticated client; called in the event loop, in an empty context.
    :param changed: returns whether the files that the client was built from, such as a kubeconfig, have changed; called
        before a request, at most every `FILE_CHECK_SECONDS`. Default: they never change.
    """

    def __init__(self, make_client: MakeClient, changed: Callable[[], Awaitable[bool]] | None = None) -> None:
        #: The informers of `watch.shared_informer`, by path and selectors.
        self.informers: dict[tuple[str, str, str], object] = {}
        self.stats: Counter[str] = Counter()  #: Requests, watches, logs, rebuilt, unavailable.
        self._make_client = make_client
        self._changed = changed
        self._connection: Connection | None = None
        self._building: asyncio.Task[None] | None = None
        # with the timing.now() until which no other build starts
        self._build_error: tuple[float, Exception] = (0.0, KtrainError())
        self._failures = 0  # failed connection attempts in a row
        self._last_notice = ""  # since the last response
        self._rebuild_at = self._check_at = 0.0  # timing.now() from which a rebuild or check is allowed
        self._known_objects: dict[object, tuple[str, str]] = {}
        self._on_notice: dict[object, tuple[Context, Callable[[str], object]]] = {}
        self._at_close: dict[object, Callable[[], Awaitable[None]]] = {}

    async def cluster(self) -> str:
        """Identifies the cluster without secrets: the API server's URL and a hash of its certificate authority."""
        return (await self._connect()).cluster

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        metadata_only: bool = False,
        timeout: float = 30,
    ) -> Object:
        """Send a request and return the object that answers it: see `answers.interpret`.

        :param path: absolute, such as /api/v1/namespaces/default/pods/p.
        :param body: sent as JSON; that of a PATCH is a JSON merge patch. Default: None, no body.
        :param metadata_only: whether to request the metadata of an object only: a Secret then comes without its data.
            Default: False.
        :param timeout: limit for everything, including the build of a client, in seconds. Default: 30.
        :raises AccessError: no client can be built.
        :raises AbsentError: the object that the path names doesn't exist.
        :raises ApiStatusError: the request is refused, or the server isn't available (`transient`).
        :raises ApiUnavailable: there was no answer. The server may have processed the request.
        """
        import aiohttp

        arguments: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS)}
        if query:
            arguments["params"] = dict(query)
        if body is not None:
            arguments["data"] = json.dumps(body)
            kind = "merge-patch+json" if method == "PATCH" else "json"
            arguments["headers"] = {"Content-Type": f"application/{kind}"}
        if metadata_only:
            arguments["headers"] = {"Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"}
        try:
            async with asyncio.timeout(timeout), self._send("requests", method, path, arguments) as response:
                return interpret(method, path, body, response.status, await response.read())
        except TimeoutError:
            raise ApiUnavailable(f"{method} {path}: no response within {timeout:g} s") from None

    @contextlib.asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        pool: Pool = "watches",
        read_timeout: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A GET whose response is read while it arrives, from `response.content`.

        :param pool: "watches" or "logs": each has its own connections. Default: "watches".
        :param read_timeout: time without a byte after which the connection counts as dead, in seconds. Default: none.
        :raises ApiStatusError: the server rejects the request.
        :raises ApiUnavailable: there is no connection or it is cut, also while the body of the `with` reads.
        """
        import aiohttp

        arguments = {
            "params": dict(query or {}),
            "headers": {"Accept": "application/json, */*", "Accept-Encoding": "identity"},
            "timeout": aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_SECONDS, sock_read=read_timeout),
        }
        async with self._send(pool, "GET", path, arguments) as response:
            try:
                if response.content_type == "text/html":
                    raise ApiUnavailable(f"GET {path}: the response is a page of HTML, not that of the API server")
                yield response
            finally:
                response.close()  # a partly read response can't return to the pool

    @contextlib.asynccontextmanager
    async def _send(
        self, pool: Pool, method: str, path: str, arguments: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request. After a 401, repeat it once with a client that was rebuilt."""
        import aiohttp

        refused: Connection | None = None
        while True:
            async with self._use(await self._connect(refused)) as connection:
                self.stats[pool] += 1
                try:
                    response = await self._answer(connection, pool, method, path, arguments)
                    async with response:
                        if response.status == 401 and refused is None:
                            refused = connection
                            continue
                        if response.status >= 300:
                            retry_after = response.headers.get("Retry-After")
                            interpret(method, path, None, response.status, await response.read(), retry_after)
                        yield response
                        return
                except (aiohttp.ClientError, OSError) as error:
                    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                        raise  # the timeout of the caller
                    self.stats["unavailable"] += 1
                    raise ApiUnavailable(f"{method} {path}: {type(error).__name__}: {error}") from None

    async def _answer(
        self, connection: Connection, pool: Pool, method: str, path: str, arguments: Mapping[str, Any]
    ) -> aiohttp.ClientResponse:
        """Send a request, and count attempts that fail without a response."""
        import aiohttp

        try:
            response = await connection.send(pool, method, path, **arguments)
        except (aiohttp.ClientError, OSError):
            if connection is self._connection:
                self._failures += 1
            raise
        if connection is self._connection:
            self._failures, self._last_notice = 0, ""
        return response

    # the client

    async def _connect(self, refused: Connection | None = None) -> Connection:
        """The connection for a request, which isn't `refused`: that one's credentials were rejected."""
        reason = await self._reason_to_build(refused)
        if reason is not None:
            until, error = self._build_error
            if timing.now() < until:
                if reason in (FIRST, REFUSED):
                    raise error
            else:
                building = self._building
                if building is None:
                    building = asyncio.get_running_loop().create_task(self._build(reason), context=Context())
                    self._building = building
                    building.add_done_callback(self._built)
                await asyncio.wait([building])
                if building.cancelled():  # somebody else has closed the client
                    return await self._connect(refused)
                building.result()
        assert self._connection is not None
        return self._connection

    async def _reason_to_build(self, refused: Connection | None) -> str | None:
        if self._connection is None:
            return FIRST
        if self._connection is refused:
            return REFUSED
        now = timing.now()
        if self._failures >= REBUILD_AFTER_FAILURES and now >= self._rebuild_at:
            return UNREACHABLE
        if self._changed is not None and now >= self._check_at:
            self._check_at = now + FILE_CHECK_SECONDS
            if await self._changed():
                return CHANGED
        return None

    def _built(self, building: asyncio.Task[None]) -> None:
        if self._building is building:
            self._building = None
        if not building.cancelled() and (error := building.exception()) is not None and isinstance(error, Exception):
            self._build_error = (timing.now() + FAILED_BUILD_PAUSE_SECONDS, error)

    async def _build(self, reason: str) -> None:
        """Build a client and replace the present one.

        If the build fails, requests continue to use the present client if it may still work. If the present client
        can't connect, a new client that isn't proven to reach the same cluster is an error.
        """
        old = self._connection
        self._failures = 0
        if reason == UNREACHABLE:
            self._rebuild_at = timing.now() + REBUILD_PAUSE_SECONDS
        try:
            new = await self._new_connection(old)
        except Exception as error:
            if old is not None:
                self._notify(f"The Kubernetes client could not be rebuilt ({reason}): {error}")
            if reason == CHANGED or (reason == UNREACHABLE and not isinstance(error, ApiStatusError)):
                return
            raise
        self._connection = new
        if old is not None:
            self.stats["rebuilt"] += 1
            moved = "" if old.cluster == new.cluster else f"; {old.cluster} is now {new.cluster}"
            if moved or reason != REFUSED:  # an expired token is normal and needs no notice
                self._notify(f"The Kubernetes client was rebuilt: {reason}{moved}")
            old.retired = True
            if not old.users:
                await old.close()

    async def _new_connection(self, old: Connection | None) -> Connection:
        """A connection to the same cluster as the old connection.

        :raises ApiStatusError: 401: it isn't proven to be the same cluster.
        """
        new = Connection(await self._make_client())
        try:
            await new.load()
            if old is None or new.cluster == old.cluster or await self._is_same_cluster(old, new):
                return new
            raise ApiStatusError(
                401,
                "Unauthorized",
                f"{old.cluster} refused the credentials or can't be reached, and the connection now means "
                f"{new.cluster}, which could not be recognized as the same cluster. Nothing was deleted",
            )
        except BaseException:
            await new.close()
            raise

    async def _is_same_cluster(self, old: Connection, new: Connection) -> bool:
        known = list(self._known_objects.values())
        if not known:
            return bool(old.authority) and old.authority == new.authority
        for path, uid in random.sample(known, min(len(known), MAX_CLUSTER_LOOKUPS)):
            if await serves(new, path, uid):
                return True
        return False

    def add_known_object(self, path: str, uid: str) -> Callable[[], None]:
        """Register an object by which the cluster is recognized at another address.

        :return: function that removes it.
        """
        handle = object()
        self._known_objects[handle] = (path, uid)
        return lambda: self._known_objects.pop(handle, None) and None

    def on_notice(self, callback: Callable[[str], object]) -> Callable[[], None]:
        """Register a callback that gets a message when the client was rebuilt, or when that failed.

        :param callback: called in the event loop, in a copy of the present context: in a triggerer, the context decides
            to which task's log a line goes.
        :return: as of `add_known_object`.
        """
        handle = object()
        self._on_notice[handle] = (copy_context(), callback)
        return lambda: self._on_notice.pop(handle, None) and None

    def _notify(self, text: str) -> None:
        """Call the callbacks, once per outage: the client may be rebuilt many times during one."""
        if text == self._last_notice:
            return
        self._last_notice = text
        for context, callback in list(self._on_notice.values()):
            context.run(callback, text)

    @contextlib.asynccontextmanager
    async def _use(self, connection: Connection) -> AsyncIterator[Connection]:
        connection.users += 1
        try:
            yield connection
        finally:
            connection.users -= 1
            if connection.retired and not connection.users:
                await connection.close()

    def at_close(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Register a callback that runs before the connections are closed, for example to stop an informer.

        :return: as of `add_known_object`.
        """
        handle = object()
        self._at_close[handle] = callback
        return lambda: self._at_close.pop(handle, None) and None

    async def close(self) -> None:
        """Run the callbacks of `at_close` and close all connections. A later request opens new ones."""
        for callback in list(self._at_close.values()):
            await callback()
        if self._building is not None:
            self._building.cancel()
            await asyncio.wait([self._building])
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
