"""Reads a part of the log of one container with one request, beside what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError
from airflow_provider_ktrain.engine.logs.emitter import LineSplitter
from airflow_provider_ktrain.engine.logs.reader import NO_LOG_TEXT, PEEK_TIMEOUT_SECONDS
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget


async def read_log(
    api: Api,
    budget: StreamBudget,
    namespace: str,
    pod: str,
    query: Mapping[str, str],
    take: Callable[[bytes], None],
) -> int:
    """The size of the response to a request for a log. ApiStatusError where the kubelet has no such log.

    :param take: called with each block of whole lines, and with what follows the last line end.
    """
    lines, size = LineSplitter(), 0
    async with (
        budget.slot(),
        api.stream(
            f"{api_paths.core(namespace, 'pods', pod)}/log", query=query, pool="logs", read_timeout=PEEK_TIMEOUT_SECONDS
        ) as response,
    ):
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if (block := lines.feed(chunk)) is not None:
                take(block)
    if lines.unended_line.startswith(NO_LOG_TEXT):
        raise ApiStatusError(404, "NotFound", lines.unended_line.decode(errors="replace"))
    if lines.unended_line:
        take(lines.unended_line)
    return size
