"""The control loop. Changes add keys to a queue, keys are reconciled one at a time, and errors are retried."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable
from typing import ClassVar, Generic, TypeVar

from ktrain_embedded.controllers.common import condition, controller_of, seconds
from ktrain_embedded.events import EventRecorder
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.resources import Resource
from ktrain_embedded.objects.store import Change, Obj, Store

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Key = tuple[str, str]  # namespace and name
Clock = Callable[[], float]  # seconds since the epoch

RETRY_BASE, RETRY_CAP = 0.005, 1000.0  # seconds; client-go's default rate limiter


class ReconcileError(Exception):
    """The reconcile failed and is retried later, like an error that an operator's Reconcile returns."""


class Controller(abc.ABC, Generic[K]):
    """Reconciles keys one after the other. Several changes of a key lead to one reconcile.

    :param clock: returns seconds since the epoch. Tests can pass a clock that they advance.
    """

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        self.store = store
        self.clock = clock
        self._ready: dict[K, None] = {}  # an ordered set
        self._later: dict[K, float] = {}  # due time of each key
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()

    @abc.abstractmethod
    def reconcile(self, key: K) -> float | None:
        """Reconcile one key. Returns the seconds until the next reconcile, or None.

        If it raises an exception, it is retried after a delay that starts at 5 ms and doubles.
        """

    def watch(self, resource: Resource, keys: Callable[[Change], Iterable[K]], after: float = 0.0) -> None:
        """Enqueue `keys(change)` for all existing objects of `resource` and for each later change.

        :param after: seconds by which the reconcile is delayed, so that changes are batched.
        """

        def tell(change: Change) -> None:
            for key in keys(change):
                self.enqueue(key, after)

        for change in self.store.latest(resource):
            tell(change)
        self.store.subscribe(resource, tell)

    def enqueue(self, key: K, after: float = 0.0) -> None:
        """Reconcile `key` now, or after `after` seconds unless it is already due earlier."""
        if after > 0:
            due = self.clock() + after
            self._later[key] = min(due, self._later.get(key, due))
        else:
            self._ready[key] = None
        self._wake.set()

    @property
    def due(self) -> float | None:
        """The time at which the next delayed key is due, in seconds since the epoch."""
        return min(self._later.values(), default=None)

    def step(self) -> bool:
        """Reconcile the next key that is due. False if no key is due."""
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
        except Exception as error:  # an object that causes an error must not stop the controller
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
                await asyncio.sleep(0)  # lets the API server respond between two reconciles
                continue
            self._wake.clear()
            wait = None if self.due is None else self.due - self.clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):  # wait_for of Python 3.11 may drop a cancellation
                    await self._wake.wait()


class ObjectController(Controller[Key]):
    """A controller of one resource type and of the objects that its objects own. It records events about them."""

    resource: ClassVar[Resource]
    owns: ClassVar[tuple[Resource, ...]]
    component: ClassVar[str]  # the component in its events
    events_v1: ClassVar[bool] = False  # whether it records events through events.k8s.io

    def __init__(self, store: Store, clock: Clock = time.time) -> None:
        super().__init__(store, clock)
        self.recorder = EventRecorder(store, self.component, events_v1=self.events_v1)
        self.watch(self.resource, itself)
        for resource in self.owns:
            self.watch(resource, controlled_by(self.resource))

    def write_status(self, obj: Obj, status: Obj) -> None:
        """Set the status of an object, unless the object has been deleted since it was read."""
        stored = self.store.find(self.resource, obj["metadata"]["namespace"], obj["metadata"]["name"])
        if stored is not None and stored["metadata"]["uid"] == obj["metadata"]["uid"]:
            self.store.update_status(self.resource, stored, status)

    def expire(self, obj: Obj, success: str) -> float | None:
        """Delete an object that has ended in the foreground after its TTL. Returns the seconds until then.

        :param success: the condition of an object that has succeeded.
        """
        meta, status, ttl = obj["metadata"], obj["status"], obj["spec"].get("ttlSecondsAfterFinished")
        ended = condition(status, success) or condition(status, "Failed")
        if ttl is None or ended is None:
            return None
        left = float(seconds(ended["lastTransitionTime"]) + ttl - self.clock())
        if left > 0:
            return left
        self.store.delete(self.resource, meta["namespace"], meta["name"], propagation="Foreground", uid=meta["uid"])
        return None


def itself(change: Change) -> Iterable[Key]:
    """The key of the changed object."""
    meta = change.object["metadata"]
    return [(meta.get("namespace") or "", meta["name"])]


def controlled_by(resource: Resource) -> Callable[[Change], Iterable[Key]]:
    """The key of the changed object's controller, if the controller is a `resource`."""

    def keys(change: Change) -> Iterable[Key]:
        reference = controller_of(change.object)
        if reference and (reference["apiVersion"], reference["kind"]) == (resource.api_version, resource.kind):
            return [(change.object["metadata"].get("namespace") or "", reference["name"])]
        return []

    return keys
