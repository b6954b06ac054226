"""The Warning events of a namespace, by one watch for all jobs of this process that wait for their start."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError
from airflow_provider_ktrain.engine.job_requests import Log
from airflow_provider_ktrain.engine.watch.informer import SharedInformer, Subscription, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_uid

Object = dict[str, Any]
FIRST_LIST_SECONDS = 10.0  #: for the first list of the events, after which they are listed for the job
FORBIDDEN_RETRY_SECONDS = 600.0  #: until the watch is tried again after the API server rejected it (403)
NO_OBJECT: Key = by_uid("")  #: of a subscription that keeps the watch open and gets no events
#: for each client, the namespaces whose events it may not watch, with the time.monotonic() of the next attempt
_refused: WeakKeyDictionary[Api, dict[str, float]] = WeakKeyDictionary()


class WarningEvents:
    """A context manager that keeps the watch open while one job waits for its start.

    :param api: client for the cluster.
    :param namespace: of the job.
    :param log: where a missing right is logged, once for each client.
    """

    def __init__(self, api: Api, namespace: str, log: Log) -> None:
        self._api, self._namespace, self._log = api, namespace, log
        self._informer: SharedInformer | None = None
        self._subscription: Subscription | None = None

    @property
    def is_open(self) -> bool:
        """Whether the events are watched for this job."""
        return self._informer is not None

    async def __aenter__(self) -> WarningEvents:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give up the watch: it ends some seconds after the last job has given it up."""
        subscription, self._informer, self._subscription = self._subscription, None, None
        if subscription is not None:
            await subscription.__aexit__()

    async def about(self, keys: Iterable[Key]) -> list[Object] | None:
        """The Warning events about some objects. None: they can't be watched.

        :param keys: `watch.by_involved_uid` and `watch.by_involved_name`.
        """
        if time.monotonic() < _refused.get(self._api, {}).get(self._namespace, 0.0):
            return None
        if self._informer is None:
            path = api_paths.core(self._namespace, "events")
            informer = shared_informer(self._api, path, field_selector="type=Warning", refusal_level=logging.DEBUG)
            self._subscription = await informer.subscribe(key=NO_OBJECT).__aenter__()
            self._informer = informer
        if not await self._is_known(self._informer):
            return None
        return self._informer.objects_of(keys)

    async def _is_known(self, informer: SharedInformer) -> bool:
        """Whether the events are listed and watched; waits for the first list."""
        end = time.monotonic() + FIRST_LIST_SECONDS
        while not informer.is_watching and informer.failure is None and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if informer.failure is not None:
            await self.close()
            if isinstance(informer.failure, ApiStatusError) and informer.failure.status == 403:
                self._note_refusal(informer.failure)
        return informer.is_watching

    def _note_refusal(self, error: ApiStatusError) -> None:
        """The API server rejects the watch of events; jobs are followed with a list of the events of each."""
        refused = _refused.setdefault(self._api, {})
        if self._namespace not in refused:
            self._log.info(
                f"Events are listed for each job in {self._namespace} that doesn't start: the right to watch events "
                f"is missing. `ktrain rbac` prints the Role.\n{error}"
            )
        refused[self._namespace] = time.monotonic() + FORBIDDEN_RETRY_SECONDS
