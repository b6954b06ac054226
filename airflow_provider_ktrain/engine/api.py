"""The Kubernetes API as JSON, through one connection, in one event loop.

Three connection pools, so that nothing waits for what is unlike it: short requests, watches, log streams. The clients
of kubernetes_asyncio know how to authenticate; requests and streams go through sessions of our own, because theirs
share one pool and buffer up to 4 MiB a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.text import clean

if TYPE_CHECKING:
    import aiohttp
    from kubernetes_asyncio.client import ApiClient

    from airflow_provider_ktrain.engine.watch import Hub

Pool = Literal["requests", "watches", "logs"]
MakeClient = Callable[[], Awaitable["ApiClient"]]

POOL_LIMITS: dict[Pool, int] = {"requests": 32, "watches": 0, "logs": 0}  #: connections; 0: others count (StreamBudget)
READ_BUFFER = 64 * 1024  #: bytes; a stream holds at most twice that before TCP holds the server back
CONNECT_TIMEOUT = 15.0  #: seconds


def pause_after(failures: int, first: float, longest: float) -> float:
    """Seconds to wait after so many failures in a row (from 1): twice as long each time, at random between a half and
    the whole of it, so that what lost a server together does not come back together."""
    return random.uniform(0.5, 1) * min(longest, first * 2.0 ** min(failures - 1, 30))


def _parse(body: bytes) -> Any:
    """JSON, with no garbage collection meanwhile: a page of pods is thousands of objects and none of them garbage, but
    they would soon make the collector go through all that the process holds, which stalls the loop."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return json.loads(body)
    finally:
        if collects:
            gc.enable()


class ApiUnavailable(KtrainError):
    """No answer: refused, cut, timed out, no DNS, a TLS handshake that failed. Nothing was retried here."""


class ApiStatusError(KtrainError):
    """The API server said no.

    :param status: the HTTP status.
    :param reason: the Status' reason, such as NotFound or AlreadyExists.
    :param message: what the server said.
    :param details: the Status' details: name, kind, causes, retryAfterSeconds.
    """

    def __init__(
        self, status: int, reason: str = "", message: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if reason else f"{status}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.details = dict(details or {})

    @classmethod
    def of(cls, status: int, body: bytes, retry_after: str | None = None) -> ApiStatusError:
        """From an answer's body: a Status object, or whatever a proxy in between has written."""
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            said = {"message": body[:500].decode(errors="replace").strip()}
        said = clean(said)  # a proxy's error page may be binary; messages go to logs and databases
        details = dict(said.get("details") or {})
        if retry_after and retry_after.isdigit():
            details.setdefault("retryAfterSeconds", int(retry_after))
        return cls(status, said.get("reason") or "", said.get("message") or "", details)

    @property
    def not_found(self) -> bool:
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """409: it exists already, or it has changed since it was read."""
        return self.status == 409

    @property
    def gone(self) -> bool:
        """410: a resource version or a continue token that has expired."""
        return self.status == 410

    @property
    def transient(self) -> bool:
        """Whether the same request may well succeed a little later."""
        return self.status in (408, 429) or self.status >= 500

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait, where it says so."""
        seconds = self.details.get("retryAfterSeconds")
        return float(seconds) if isinstance(seconds, int | float) else None


class _Connection:
    """One client and its sessions. Retired by a 401, closed when the last stream that uses it has ended."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self.users = 0
        self.retired = False
        self._sessions: dict[Pool, aiohttp.ClientSession] = {}
        self._tls: ssl.SSLContext | None = None

    @property
    def _configuration(self) -> Any:
        return self.client.configuration

    @functools.cached_property
    def cluster(self) -> str:
        """The API server's URL and a short hash of the authority that it is trusted by, where the client names one.

        127.0.0.1:6443, the usual end of a tunnel, is many clusters; each has an authority of its own.
        """
        configuration = self._configuration
        url = urlsplit(str(configuration.host))
        named = url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")
        try:
            authority = b"".join(Path(configuration.ssl_ca_cert or "").read_bytes().split())
        except OSError:
            return named
        return f"{named} (CA {hashlib.sha256(authority).hexdigest()[:10]})"

    async def send(self, pool: Pool, method: str, path: str, **arguments: Any) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", **arguments.pop("headers", {})}
        await self.client.update_params_for_auth(headers, [], ["BearerToken"])
        configuration = self._configuration
        if configuration.proxy:
            arguments.update(proxy=configuration.proxy, proxy_headers=configuration.proxy_headers)
        if configuration.tls_server_name:
            arguments["server_hostname"] = configuration.tls_server_name
        return await self._session(pool).request(method, configuration.host + path, headers=headers, **arguments)

    def _session(self, pool: Pool) -> aiohttp.ClientSession:
        import aiohttp

        if pool not in self._sessions:
            connector = aiohttp.TCPConnector(limit=POOL_LIMITS[pool], ssl=self._tls_context())
            agent = {"User-Agent": "airflow-provider-ktrain"}
            self._sessions[pool] = aiohttp.ClientSession(
                connector=connector, trust_env=True, read_bufsize=READ_BUFFER, headers=agent
            )
        return self._sessions[pool]

    def _tls_context(self) -> ssl.SSLContext:
        """As kubernetes_asyncio builds it, once for all pools."""
        if self._tls is None:
            configuration = self._configuration
            tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
            if configuration.cert_file:
                tls.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
            if not configuration.verify_ssl:
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
            if getattr(configuration, "disable_strict_ssl_verification", False):
                tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
            self._tls = tls
        return self._tls

    async def close(self) -> None:
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()
        await self.client.close()


class Api:
    """One Kubernetes API through one connection, in one event loop.

    The client is built on first use and once more whenever the server answers 401; that request is then repeated once,
    unless the new client is another cluster's.

    :param make_client: builds an authenticated client; called in the loop.
    """

    def __init__(self, make_client: MakeClient) -> None:
        self.hubs: dict[tuple[str, str, str], Hub] = {}  #: of `watch.hub`, by path and selectors
        self.stats: Counter[str] = Counter()  #: requests, watches, logs, rebuilt, unavailable
        self._make_client = make_client
        self._connection: _Connection | None = None
        self._building = asyncio.Lock()
        self._at_close: dict[object, Callable[[], Awaitable[None]]] = {}

    async def cluster(self) -> str:
        """What identifies the cluster, and no secret: the API server's URL, and a hash of its certificate authority."""
        return (await self._connect(None)).cluster

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 30,
    ) -> dict[str, Any]:
        """One request and its answer, parsed; {} where there is no JSON object in it.

        :param path: absolute, such as /api/v1/namespaces/default/pods/p.
        :param body: sent as JSON where it is not None.
        :param timeout: seconds for everything, a connection included.
        :raises ApiStatusError: for every status from 300 on.
        :raises ApiUnavailable: where no answer came. Whether the request was carried out is not known then.
        """
        import aiohttp

        arguments: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=timeout)}
        if query:
            arguments["params"] = dict(query)
        if body is not None:
            arguments["data"] = json.dumps(body)
            arguments["headers"] = {"Content-Type": content_type}
        try:
            async with self._send("requests", method, path, arguments) as response:
                read = await response.read()
        except TimeoutError as error:
            raise ApiUnavailable(f"{method} {path}: no answer within {timeout:g} s") from error
        try:
            answer = _parse(read) if read.lstrip()[:1] == b"{" else {}
        except ValueError as error:
            raise ApiUnavailable(f"{method} {path}: the answer is no JSON: {read[:200]!r}") from error
        return answer if isinstance(answer, dict) else {}

    @contextlib.asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        pool: Pool = "watches",
        read_timeout: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A GET whose answer is read as it comes, by `response.content`.

        :param pool: "watches" or "logs": each has connections of its own.
        :param read_timeout: seconds without a byte after which the connection counts as dead; None: for ever.
        :raises ApiStatusError: where the server refuses.
        :raises ApiUnavailable: where there is no connection or it is cut, also while the body of the `with` reads.
        """
        import aiohttp

        arguments = {
            "params": dict(query or {}),
            "headers": {"Accept": "application/json, */*", "Accept-Encoding": "identity"},
            "timeout": aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT, sock_read=read_timeout),
        }
        async with self._send(pool, "GET", path, arguments) as response:
            try:
                yield response
            finally:
                response.close()  # what is not read to its end cannot go back to the pool

    @contextlib.asynccontextmanager
    async def _send(
        self, pool: Pool, method: str, path: str, arguments: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        refused: _Connection | None = None
        while True:
            async with self._use(await self._connect(refused)) as connection:
                self.stats[pool] += 1
                try:
                    response = await connection.send(pool, method, path, **arguments)
                    async with response:
                        if response.status == 401 and refused is None:
                            refused = connection
                            continue
                        if response.status >= 300:
                            raise ApiStatusError.of(
                                response.status, await response.read(), response.headers.get("Retry-After")
                            )
                        yield response
                        return
                except (aiohttp.ClientError, OSError) as error:
                    if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                        raise  # the caller's own limit
                    self.stats["unavailable"] += 1
                    raise ApiUnavailable(f"{method} {path}: {type(error).__name__}: {error}") from error

    async def _connect(self, refused: _Connection | None) -> _Connection:
        """The connection; a new one in place of one whose credentials were refused."""
        async with self._building:
            old = self._connection
            if old is None or old is refused:
                new = _Connection(await self._make_client())
                if old is not None and new.cluster != old.cluster:
                    await new.close()
                    raise ApiStatusError(
                        401,
                        "Unauthorized",
                        f"{old.cluster} refused the credentials, and the connection means {new.cluster} by now",
                    )
                self._connection = new
                if old is not None:
                    self.stats["rebuilt"] += 1
                    old.retired = True
                    if not old.users:
                        await old.close()
            assert self._connection is not None
            return self._connection

    @contextlib.asynccontextmanager
    async def _use(self, connection: _Connection) -> AsyncIterator[_Connection]:
        connection.users += 1
        try:
            yield connection
        finally:
            connection.users -= 1
            if connection.retired and not connection.users:
                await connection.close()

    def at_close(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Have something that lives on this Api, such as a hub, ended before its connections are closed.

        :return: what takes that back.
        """
        handle = object()
        self._at_close[handle] = callback
        return lambda: self._at_close.pop(handle, None) and None

    async def close(self) -> None:
        """End what lives on this Api and close all connections. A later request builds them anew."""
        for callback in list(self._at_close.values()):
            await callback()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
