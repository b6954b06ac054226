"""The loop of every controller: a queue of keys that changes fill, one reconcile at a time, retries that back off."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from typing import ClassVar, Generic, TypeVar

from airflow_provider_ktrain.local.controllers.common import controller_of
from airflow_provider_ktrain.local.events import EventRecorder
from airflow_provider_ktrain.local.objects.errors import ApiError
from airflow_provider_ktrain.local.objects.resources import Resource
from airflow_provider_ktrain.local.objects.store import Change, Obj, Store

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Key = tuple[str, str]  # namespace and name
Clock = Callable[[], float]  # seconds since the epoch

RETRY_BASE, RETRY_CAP = 0.005, 1000.0  # seconds; client-go's default rate limiter


class ReconcileError(Exception):
    """A reconcile that cannot go on now, as an operator's own error return: it is tried again later."""


class Controller(abc.ABC, Generic[K]):
    """Reconciles keys one after the other, each once however often it changed meanwhile.

    :param clock: seconds since the epoch; a test may turn it forward.
    """

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        self.store = store
        self.clock = clock
        self._ready: dict[K, None] = {}  # an ordered set
        self._later: dict[K, float] = {}  # when each is due
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()

    @abc.abstractmethod
    def reconcile(self, key: K) -> float | None:
        """Bring the state of one key about; seconds after which to look again, or None.

        What it raises is tried again after a delay that doubles from 5 ms.
        """

    def watch(self, resource: Resource, keys: Callable[[Change], Iterable[K]], after: float = 0.0) -> None:
        """Enqueue `keys(change)` for all that exist of `resource`, and from now on at every change.

        :param after: seconds in which changes are gathered before they are looked at.
        """

        def tell(change: Change) -> None:
            for key in keys(change):
                self.enqueue(key, after)

        for change in self.store.latest(resource):
            tell(change)
        self.store.subscribe(resource, tell)

    def enqueue(self, key: K, after: float = 0.0) -> None:
        """Reconcile `key` soon, or after so many seconds, unless that is to happen earlier already."""
        if after > 0:
            due = self.clock() + after
            self._later[key] = min(due, self._later.get(key, due))
        else:
            self._ready[key] = None
        self._wake.set()

    @property
    def due(self) -> float | None:
        """When the next delayed key is due, in seconds since the epoch."""
        return min(self._later.values(), default=None)

    def step(self) -> bool:
        """Reconcile the next key that is due; False where there is none."""
        now = self.clock()
        for key in [key for key, due in self._later.items() if due <= now]:
            del self._later[key]
            self._ready[key] = None
        if not self._ready:
            return False
        key = next(iter(self._ready))
        del self._ready[key]
        try:
            again = self.reconcile(key)
        except Exception as error:  # whatever a manifest provokes, the controller goes on with the others
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            again = min(RETRY_BASE * 2 ** min(failures - 1, 30), RETRY_CAP)
            expected = isinstance(error, ApiError | ReconcileError)
            log.log(logging.DEBUG if expected else logging.ERROR, "%s: again in %.3f s", key, again, exc_info=error)
        else:
            self._failures.pop(key, None)
        if again is not None:
            self.enqueue(key, max(again, 0.001))
        return True

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            if self.step():
                await asyncio.sleep(0)  # the API answers between two reconciles
                continue
            self._wake.clear()
            wait = None if self.due is None else self.due - self.clock()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)


class ObjectController(Controller[Key]):
    """A controller of objects of one type and of what they own; it records events about them."""

    resource: ClassVar[Resource]
    owns: ClassVar[tuple[Resource, ...]]
    component: ClassVar[str]  # the name in which it records events
    events_v1: ClassVar[bool] = False  # whether it records them through events.k8s.io

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self.recorder = EventRecorder(store, self.component, events_v1=self.events_v1)
        self.watch(self.resource, itself)
        for resource in self.owns:
            self.watch(resource, controlled_by(self.resource))

    def write_status(self, obj: Obj, status: Obj) -> None:
        """Set the status of an object that was read before, unless it has gone meanwhile."""
        stored = self.store.find(self.resource, obj["metadata"]["namespace"], obj["metadata"]["name"])
        if stored is not None and stored["metadata"]["uid"] == obj["metadata"]["uid"]:
            self.store.update_status(self.resource, stored, status)


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
