"""The loop of every controller: a queue of keys that changes fill, one reconcile at a time, retries that back off."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from airflow_provider_ktrain.local.controllers.owners import controller_of
from airflow_provider_ktrain.local.errors import ApiError
from airflow_provider_ktrain.local.resources import Resource
from airflow_provider_ktrain.local.store import Change, Store

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Key = tuple[str, str]  # namespace and name
Clock = Callable[[], float]  # seconds since the epoch

RETRY_BASE, RETRY_CAP = 0.005, 1000.0  # seconds; client-go's default rate limiter


class Controller(Generic[K]):
    """Reconciles keys one after the other, each once however often it changed meanwhile.

    :param reconcile: brings the state of one key about; returns seconds after which to look again, or None. What it
        raises is tried again after a delay that doubles from 5 ms.
    :param clock: seconds since the epoch; a test may turn it forward.
    """

    def __init__(self, store: Store, reconcile: Callable[[K], float | None], clock: Clock = time.time) -> None:
        self._store = store
        self._reconcile = reconcile
        self._clock = clock
        self._watched: list[tuple[Resource, Callable[[Change], Iterable[K]], float]] = []
        self._ready: dict[K, None] = {}  # an ordered set
        self._later: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}  # the earliest time of each key in _later
        self._order = itertools.count()
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()

    def watch(self, resource: Resource, keys: Callable[[Change], Iterable[K]], after: float = 0.0) -> None:
        """Enqueue `keys(change)` at every change of `resource`, and once for all that exist when the loop starts.

        :param after: seconds in which changes are gathered before they are looked at.
        """
        self._watched.append((resource, keys, after))

    def enqueue(self, key: K, after: float = 0.0) -> None:
        """Reconcile `key` soon, or after so many seconds, unless that is to happen earlier already."""
        if after > 0:
            due = self._clock() + after
            if due < self._due.get(key, math.inf):
                self._due[key] = due
                heapq.heappush(self._later, (due, next(self._order), key))
        else:
            self._ready[key] = None
        self._wake.set()

    @property
    def due(self) -> float | None:
        """When the next delayed key is due, in seconds since the epoch."""
        return self._later[0][0] if self._later else None

    def start(self) -> contextlib.ExitStack:
        """Begin to collect changes; closing what is returned ends that."""
        subscriptions = contextlib.ExitStack()
        for resource, keys, after in self._watched:

            def tell(change: Change, keys: Callable[[Change], Iterable[K]] = keys, after: float = after) -> None:
                for key in keys(change):
                    self.enqueue(key, after)

            subscriptions.callback(self._store.subscribe(resource, tell))
            for obj in self._store.list(resource):
                tell(Change(self._store.version, "ADDED", resource, obj))
        return subscriptions

    def step(self) -> bool:
        """Reconcile the next key that is due; False where there is none."""
        while self._later and self._later[0][0] <= self._clock():
            due, _, key = heapq.heappop(self._later)
            if self._due.get(key) == due:
                del self._due[key]
                self._ready[key] = None
        if not self._ready:
            return False
        key = next(iter(self._ready))
        del self._ready[key]
        try:
            again = self._reconcile(key)
        except Exception as error:  # whatever a manifest provokes, the controller goes on with the others
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again = min(RETRY_BASE * 2 ** min(failures - 1, 30), RETRY_CAP)
            if isinstance(error, ApiError | ReconcileError):
                log.debug("%s: %s; again in %.3f s", key, error, again)
            else:
                log.exception("%s: again in %.3f s", key, again)
        else:
            self._failures.pop(key, None)
        if again is not None:
            self.enqueue(key, max(again, 0.001))
        return True

    async def run(self) -> None:
        """Work until cancelled."""
        with self.start():
            while True:
                if self.step():
                    await asyncio.sleep(0)  # the API answers between two reconciles
                    continue
                self._wake.clear()
                wait = None if self.due is None else self.due - self._clock()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), wait)


class ReconcileError(Exception):
    """A reconcile that cannot go on now, as an operator's own error return: it is tried again later."""


def itself(change: Change) -> Iterable[Key]:
    """The changed object's own key."""
    meta = change.object["metadata"]
    return [(meta.get("namespace") or "", meta["name"])]


def controlled_by(resource: Resource) -> Callable[[Change], Iterable[Key]]:
    """The key of the object of `resource` that the changed object names as its controller."""

    def keys(change: Change) -> Iterable[Key]:
        reference = controller_of(change.object)
        if reference and (reference["apiVersion"], reference["kind"]) == (resource.api_version, resource.kind):
            return [(change.object["metadata"].get("namespace") or "", reference["name"])]
        return []

    return keys
