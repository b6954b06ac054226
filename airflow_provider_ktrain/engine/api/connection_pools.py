"""One authenticated client and its connection pools, as `engine.api.client.Api` builds and replaces them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from airflow_provider_ktrain.core.errors import AccessError
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.engine.api.threads import in_thread

if TYPE_CHECKING:
    import aiohttp
    from kubernetes_asyncio.client import ApiClient

Pool = Literal["requests", "watches", "logs"]

#: Connections; 0: no limit here (StreamBudget limits streams).
POOL_LIMITS: dict[Pool, int] = {"requests": 32, "watches": 0, "logs": 0}
READ_BUFFER_BYTES = 64 * 1024  #: A stream buffers at most twice that before TCP flow control stops the server.
LOOKUP_TIMEOUT_SECONDS = 10.0  #: Limit to look up an object that identifies the cluster.


class Connection:
    """One client and its sessions. A rebuild retires it; it is closed when its last stream has ended.

    Requests never wait for the event loop's own threads, because the other triggers of a triggerer can occupy all of
    them. So aiohttp may neither resolve names nor read the environment there, which it does for each request.
    """

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self._configuration: Any = client.configuration
        self.users = 0
        self.retired = False
        self._sessions: dict[Pool, aiohttp.ClientSession] = {}
        self._tls: ssl.SSLContext | bool = True  # for all pools, by `load`; True if the URL isn't https
        self._proxy: str | None = None  # by `load`

    @functools.cached_property
    def cluster(self) -> str:
        """The API server's URL and a short hash of its certificate authority, if the client has one.

        Many clusters have the URL 127.0.0.1:6443, because it is the usual end of a tunnel. Their authorities differ.
        """
        return f"{self.url} (CA {self.authority})" if self.authority else self.url

    @functools.cached_property
    def url(self) -> str:
        """The API server's URL without credentials and query, so that errors can contain it."""
        url = urlsplit(str(self._configuration.host))
        return url._replace(netloc=url.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")

    @functools.cached_property
    def authority(self) -> str:
        """A short hash of the certificate authority. Empty: the client has none."""
        try:
            authority = b"".join(Path(self._configuration.ssl_ca_cert or "").read_bytes().split())
        except OSError:
            return ""
        return hashlib.sha256(authority).hexdigest()[:10]

    async def load(self) -> None:
        """Read the certificate files and the environment, in a thread.

        :raises AccessError: a file can't be read.
        """

        def read() -> None:
            if self.url.startswith("https:"):
                self._tls = self._tls_context()
            self._proxy = self._configuration.proxy or environment_proxy(self._configuration.host)
            _ = self.cluster

        try:
            await in_thread(read)
        except (OSError, ValueError) as error:
            files = (self._configuration.ssl_ca_cert, self._configuration.cert_file, self._configuration.key_file)
            raise AccessError(
                f"The connection's certificates can't be read. Check {', '.join(filter(None, files))}.\n{error}"
            ) from None

    async def send(self, pool: Pool, method: str, path: str, **arguments: Any) -> aiohttp.ClientResponse:
        """Send an authenticated request, by the proxy of the client or of the environment.

        The caller releases the response.
        """
        headers = {"Accept": "application/json", **arguments.pop("headers", {})}
        await self.client.update_params_for_auth(headers, [], ["BearerToken"])
        configuration = self._configuration
        if self._proxy:
            arguments.update(proxy=self._proxy, proxy_headers=configuration.proxy_headers)
        if configuration.tls_server_name:
            arguments["server_hostname"] = configuration.tls_server_name
        # a redirect leads to another server, such as a login page, which would get the token
        arguments["allow_redirects"] = False
        return await self._session(pool).request(method, configuration.host + path, headers=headers, **arguments)

    def _session(self, pool: Pool) -> aiohttp.ClientSession:
        import aiohttp

        from airflow_provider_ktrain.engine.api.name_resolver import NameResolver

        if pool not in self._sessions:
            connector = aiohttp.TCPConnector(limit=POOL_LIMITS[pool], ssl=self._tls, resolver=NameResolver())
            agent = {"User-Agent": "airflow-provider-ktrain"}
            self._sessions[pool] = aiohttp.ClientSession(
                connector=connector, read_bufsize=READ_BUFFER_BYTES, headers=agent
            )
        return self._sessions[pool]

    def _tls_context(self) -> ssl.SSLContext:
        """The same TLS context that kubernetes_asyncio builds."""
        configuration = self._configuration
        tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            tls.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
        if not configuration.verify_ssl:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        if getattr(configuration, "disable_strict_ssl_verification", False):
            tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return tls

    async def close(self) -> None:
        """Close the sessions of all pools, then the client."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for session in sessions:
            await session.close()
        await self.client.close()


def environment_proxy(url: str) -> str | None:
    """The proxy for a URL by the environment: HTTPS_PROXY, HTTP_PROXY, NO_PROXY. None: there is none.

    A proxy that is reached by TLS is ignored, as aiohttp does.
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
    return None if proxy is None or proxy.startswith("https:") else proxy


async def serves(connection: Connection, path: str, uid: str) -> bool:
    """Whether the server has the object with this path and uid."""
    import aiohttp

    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_SECONDS), await connection.send("requests", "GET", path) as response:
            found = json.loads(await response.read()) if response.status == 200 else {}
    except (aiohttp.ClientError, OSError, ValueError):
        return False
    return mapping(mapping(found).get("metadata")).get("uid") == uid
