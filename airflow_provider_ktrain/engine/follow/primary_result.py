"""The result that the primary prints, also if it was too large for the handover and is read again from the log."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.result import LEFT_OUT, MARKER_PREFIX, find_result, keep_result_line
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.messages import Handover
from airflow_provider_ktrain.engine.logs.emitter import LineSplitter, LogLine
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget
from airflow_provider_ktrain.engine.request_errors import retry_transient

PATIENCE_SECONDS = 600.0  #: for an API server that can't be reached while the training runs
END_SECONDS = 20.0  #: to wait for the result at the end
READ_TIMEOUT_SECONDS = 10.0  #: without a byte
#: read from the second of the result line on: no later line before the handover has a result, or its first part
MAX_READ_BYTES = 32 * 1024 * 1024


class PrimaryResult:
    """The last result line of the primary replica.

    :param api: client for the cluster.
    :param namespace: of the job.
    :param budget: of log streams.
    :param handover: from the process that followed the job before.
    """

    def __init__(self, api: Api, namespace: str, budget: StreamBudget, handover: Handover) -> None:
        self._api, self._namespace, self._budget = api, namespace, budget
        self.line = handover.result_line  #: see `core.logs.result.keep_result_line`; "" if there is none
        #: where the log has it: `pod`, `container`, and `time` of the line, or of the first numbered one
        self.origin = {name: str(value) for name, value in mapping(handover.result_from).items()}
        self._left_out = bool(self.origin) and not self.line
        self._reading: asyncio.Task[None] | None = None

    def take(self, source: LogLine, text: str, written: str) -> None:
        """Take one line of the primary.

        :param source: names its container.
        :param text: of the line.
        :param written: its time.
        """
        held = keep_result_line(self.line, text) if MARKER_PREFIX in text else self.line
        if held == self.line:
            return
        if not self._left_out and not (self.line and held.startswith(self.line)):
            self.origin = {"pod": source.pod, "container": source.container, "time": written} if written else {}
        self.line = held

    def start(self) -> None:
        """Begin to read a line that was left out of the handover. Further calls change nothing."""
        if self._left_out and self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read_again(PATIENCE_SECONDS))

    async def close(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def complete(self) -> None:
        """Wait some seconds until a line that was left out is read. It is called before the pods are deleted."""
        if self._reading is not None and self._reading.done():
            self._reading = None
        self.start()
        if self._left_out and self._reading is not None:
            await asyncio.wait([self._reading], timeout=END_SECONDS)

    def find(self, kind: Kind, job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> tuple[Any, str]:
        """The result, and what is wrong with it: see `core.logs.result.find_result`."""
        if self._left_out and not self.line:
            pod = self.origin.get("pod", "")
            return None, f"{LEFT_OUT}it was too large for the trigger, and the log of {pod} can't be read again"
        return find_result(kind, job, pods, self.line)

    async def _read_again(self, seconds: float) -> None:
        """Read the line from the log of the container's newest run, or of the one before it."""
        for query in ({}, {"previous": "true"}):
            with contextlib.suppress(ApiStatusError, ApiUnavailable):
                read = functools.partial(self._read, query)
                found = await retry_transient(read, time.monotonic() + seconds)
                if found and self._left_out:
                    self.line = functools.reduce(keep_result_line, self.line.split("\n"), found)
                    self._left_out = False
                    return

    async def _read(self, query: Mapping[str, str]) -> str:
        """The result line in the log from the second of `origin` on."""
        path = f"{api_paths.core(self._namespace, 'pods', self.origin.get('pod', ''))}/log"
        since = f"{self.origin.get('time', '')[:19]}Z"
        query = {"container": self.origin.get("container", ""), "sinceTime": since, **query}
        query["limitBytes"] = str(MAX_READ_BYTES)
        found, lines = "", LineSplitter()
        async with (
            self._budget.slot(),
            self._api.stream(path, query=query, pool="logs", read_timeout=READ_TIMEOUT_SECONDS) as response,
        ):
            async for chunk in response.content.iter_any():
                if block := lines.feed(chunk):
                    found = _kept(found, block)
        return _kept(found, lines.unended_line)


def _kept(found: str, block: bytes) -> str:
    """The result line after more lines of the log."""
    if MARKER_PREFIX.encode() not in block:
        return found
    return functools.reduce(keep_result_line, block.decode("utf-8", "replace").split("\n"), found)
