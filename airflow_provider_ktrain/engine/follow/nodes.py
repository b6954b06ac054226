"""Reads the nodes of the cluster, at most once in five minutes for all jobs of a process that wait for a node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.state.nodes import Node
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import list_objects

PAGE_SIZE = 100  #: nodes per request: each lists the images that it has
READ_TIMEOUT_SECONDS = 30.0  #: of all pages: the jobs that wait for it look at no limit meanwhile
MAX_AGE_SECONDS = 300.0  #: of a read that only shows when to look


@dataclass
class _Read:
    """The last read of the nodes, or its failure."""

    began: float = -float("inf")  # by `time.monotonic`
    nodes: tuple[Node, ...] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_reads: WeakKeyDictionary[Api, _Read] = WeakKeyDictionary()


async def read_nodes(api: Api, *, fresh: bool = False) -> tuple[Node, ...] | None:
    """All nodes; None if they can't be read: the connection has no right to, or the API server doesn't answer.

    :param fresh: whether the read must begin after this call. Default: False, it is at most MAX_AGE_SECONDS old.
    """
    asked, read = time.monotonic(), _reads.setdefault(api, _Read())
    async with read.lock:
        if read.began < (asked if fresh else asked - MAX_AGE_SECONDS):
            read.began, read.nodes = time.monotonic(), None
            with contextlib.suppress(KtrainError, TimeoutError):
                async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                    read.nodes = tuple(await list_objects(api, api_paths.nodes(), keep=Node.of, page_size=PAGE_SIZE))
        return read.nodes
