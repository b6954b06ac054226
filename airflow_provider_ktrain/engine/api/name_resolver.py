"""Resolves host names in threads of its own."""

from __future__ import annotations

import functools
import socket

from aiohttp.abc import AbstractResolver, ResolveResult

from airflow_provider_ktrain.engine.api.threads import in_thread


class NameResolver(AbstractResolver):
    """As aiohttp's default resolver, but names are not resolved in the event loop's threads, which may be occupied."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host."""
        look_up = functools.partial(
            socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=found, proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found, _, protocol, _, address in await in_thread(look_up)
        ]  # fmt: skip

    async def close(self) -> None:
        """Nothing is held open."""
