"""The client of kubernetes_asyncio that authenticates requests."""

from __future__ import annotations

from kubernetes_asyncio.client import ApiClient, Configuration


class AuthClient(ApiClient):  # type: ignore[misc]  # kubernetes_asyncio has no types
    """Adds credentials to requests, which `connection_pools.Connection` sends by sessions of its own.

    The base class would build a session with a TLS context, which costs 38 ms, and which nobody uses.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    async def close(self) -> None:
        """There is nothing to close."""
