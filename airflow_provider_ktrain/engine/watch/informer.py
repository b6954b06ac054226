"""Shared informers: one list and watch for any number of subscriptions, as in client-go.

A SharedInformer lists a path once, then follows its watch from the resourceVersion of that list, and passes each change
to the subscriptions whose key matches.

- A stream that is cut resumes at the last resourceVersion that it delivered. Bookmarks, which the API server sends
  about once a minute, move that version forward while nothing changes, so that it doesn't expire.
- If the version has expired all the same, the API server answers 410 Gone. Then the informer lists again and compares
  the list with what it knows: the differences become events, and an object that is missing from the list becomes
  DELETED. So nothing is missed, and nothing is delivered twice.
- Every ten minutes it lists again, in case the watch has missed something.

The informer runs in a task of its own, with an empty context, so it isn't canceled with the subscription that started
it. In a triggerer the context decides to which task's log a line goes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Self

from airflow_provider_ktrain.core.text.output import masked_log
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable, Object, pause_after
from airflow_provider_ktrain.engine.watch.object_index import ObjectIndex
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_uid
from airflow_provider_ktrain.engine.watch.stripping import stripped, with_shared_names
from airflow_provider_ktrain.engine.watch.wakeup import Wakeup

if TYPE_CHECKING:
    import aiohttp

log = masked_log(__name__)

PAGE_SIZE = 100  #: Objects per list request: parsing a page must not block the event loop.
RESYNC_SECONDS = 600.0  #: Interval of the lists that check the watch.
SILENCE_TIMEOUT_SECONDS = 150.0  #: Time without a byte after which a watch counts as dead; bookmarks come every minute.
LINGER_SECONDS = 10.0  #: How long an informer runs on without subscriptions.
BACKOFF_SECONDS = (0.05, 30.0)  #: First and longest pause after a failure.
MAX_RETRY_AFTER_SECONDS = 60.0  #: Longest pause that an answer may ask for: a proxy's page may name hours.
STABLE_STREAM_SECONDS = 1.0  #: A stream that ends earlier counts as a failure, so that the informer pauses.
RELIST_AFTER_FAILURES = 5  #: Failures in a row after which it lists again: the server may have been replaced.
MAX_OUTAGES = 64  #: How many outages are remembered.
RECOVERY_SECONDS = 30.0  #: How long after an outage the cluster may take for what it could not do meanwhile.
MAX_UNAUTHORIZED = 3  #: Responses 401 in a row after which subscriptions get the error.


class Subscription:
    """The objects and events of an informer for one subscriber; a context manager that ends the subscription.

    `objects` has the objects by uid, as last seen. If an object is missing from it, that doesn't prove that it
    doesn't exist: it may be newer than what was delivered last. That `take` returns it is such a proof.

    Get it from `SharedInformer.subscribe`, which describes the parameters.
    """

    __slots__ = ("_changed", "_deleted", "_error", "_informer", "_key", "_new", "_news", "objects", "synced")

    def __init__(self, informer: SharedInformer, key: Key | None, news: Wakeup | None) -> None:
        self.objects: dict[str, Object] = {}
        self.synced = False  #: Whether the first list is complete.
        self._informer, self._key = informer, key
        self._changed: dict[str, None] = {}  # an empty dict is smaller than an empty set
        self._deleted: dict[str, Object] = {}  # by uid, until they are taken
        self._error: Exception | None = None
        self._news = news or Wakeup()
        self._new = False  # whether `take` has something to return

    async def __aenter__(self) -> Self:
        self._informer._add(self, self._key)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._informer._discard(self, self._key)

    def take(self) -> list[Object] | None:
        """The objects that were deleted since the last call, as last seen. None: nothing has changed.

        :raises ApiStatusError: the API server rejects the list or watch. The informer continues to try, so the caller
            may call this again.
        :raises ApiUnavailable: the informer was closed.
        """
        if not self._new:
            return None
        self._new = False
        error, self._error = self._error, None
        if error is not None:
            raise error
        deleted, self._deleted = self.deleted, {}
        return deleted

    @property
    def deleted(self) -> list[Object]:
        """The deleted objects that the next `take` returns. `objects` no longer has them."""
        return list(self._deleted.values())

    def take_changed(self) -> Collection[str]:
        """The uids of objects that were added, changed or removed since the last call, independent of `take`."""
        taken, self._changed = self._changed, {}
        return taken

    def _notify(self) -> None:
        self._new = True
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Let the next `take` raise an error."""
        self._error = error
        self._notify()

    def sync(self) -> None:
        """Record that the first list is complete."""
        if not self.synced:
            self.synced = True
            self._notify()

    def deliver(self, obj: Object, *, deleted: bool = False) -> None:
        """Deliver an object that was added or changed, or one that was deleted or lost the key."""
        uid = obj["metadata"]["uid"]
        if not deleted:
            self.objects[uid] = obj
            self._deleted.pop(uid, None)
        elif uid in self.objects:
            del self.objects[uid]
            self._deleted[uid] = obj
        else:
            return
        self._changed[uid] = None
        if self.synced:  # the first list is delivered as a whole
            self._notify()


class Outages:
    """When the API server did not answer. All times are epoch seconds."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float]] = deque(maxlen=MAX_OUTAGES)

    def add(self, began: float, ended: float) -> None:
        """Add one that has ended."""
        self._ended.append((began, ended))

    def seconds_since(self, at: float) -> float:
        """How long they lasted since `at`."""
        return math.fsum(max(ended - max(began, at), 0.0) for began, ended in self._ended)

    def recovered_at(self, due: float) -> float:
        """When the cluster has had as much time as the last outage took, at most RECOVERY_SECONDS.

        Where one outage follows another, the time between them counts: what happened before `due` is known when the API
        server could be reached for RECOVERY_SECONDS since then.

        :param due: when a limit passes.
        """
        if not self._ended:
            return 0.0
        began, ended = self._ended[-1]
        since = max(due, self._ended[0][0])  # before the first one, this process may not have run
        reached = max(ended - since - self.seconds_since(since), 0.0)
        return ended + min(ended - began, max(RECOVERY_SECONDS - reached, 0.0))


class SharedInformer:
    """One list and watch of a path for many subscriptions. Get it from `shared_informer()`."""

    def __init__(
        self,
        api: Api,
        path: str,
        label_selector: str = "",
        field_selector: str = "",
        *,
        refusal_level: int = logging.WARNING,
    ) -> None:
        self.stats: Counter[str] = Counter()  #: Numbers of lists, watches, events, cuts and expired versions.
        self.unreachable_since: float | None = None  #: The `timing.now()` of the first failure to reach it.
        self._outages = Outages()  # earlier ones
        self.failure: Exception | None = None  #: Why the server rejects requests, while it does.
        self._api = api
        self._path = path
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._selectors = {name: value for name, value in selectors.items() if value}
        self._objects = ObjectIndex()
        self._subscriptions: dict[Key | None, tuple[Subscription, ...]] = {}  # mostly one for each key
        self._synced = False
        #: The resourceVersion up to which all changes were delivered; "" while this isn't known: list next.
        self.version = ""
        self.listed_at = -math.inf  #: The `timing.now()` at which the last complete list began.
        self._resync_at = 0.0
        self._failures = 0  # in a row
        self._refusal_level = refusal_level
        self._opened: float | None = None  # timing.now() at which the present stream began
        self._logged_unreachable = False
        self._task: asyncio.Task[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._key = (path, label_selector, field_selector)  # among the shared informers
        self._detach: Callable[[], None] = lambda: None  # removes the callback from the Api

    @property
    def is_watching(self) -> bool:
        """Whether the first list is complete and the watch is open, as far as is known."""
        reached = self.unreachable_since is None and self.failure is None
        return self._task is not None and self._synced and self._opened is not None and reached

    def seconds_away_since(self, at: float) -> float:
        """For how long the API server could not be reached since `at`, in epoch seconds."""
        now = timing.epoch()
        began = now if self.unreachable_since is None else now - (timing.now() - self.unreachable_since)
        return self._outages.seconds_since(at) + now - min(max(began, at), now)

    def recovered_at(self, due: float) -> float:
        """As of `Outages`, or later while the API server can't be reached."""
        return self._outages.recovered_at(due) if self.unreachable_since is None else timing.epoch() + RECOVERY_SECONDS

    def objects_of(self, keys: Iterable[Key]) -> list[Object]:
        """The objects that have one of these keys, as last seen."""
        return self._objects.having(keys)

    def subscribe(self, *, key: Key | None = None, news: Wakeup | None = None) -> Subscription:
        """A subscription, which begins when its context is entered. This doesn't wait for the first list.

        :param key: of the objects, from `object_keys`. Always set it where there are many subscriptions. Default: all
            objects.
        :param news: set when `take` has something to return, for a coroutine that waits for several subscriptions.
            Default: none.
        """
        return Subscription(self, key, news)

    def _add(self, subscription: Subscription, key: Key | None) -> None:
        self._start()
        self._subscriptions[key] = (*self._subscriptions.get(key, ()), subscription)
        for obj in self._objects.having((key,)):
            subscription.deliver(obj)
        if self._synced:
            subscription.sync()
        if self.failure is not None:
            subscription.fail(self.failure)

    def _discard(self, subscription: Subscription, key: Key | None) -> None:
        others = tuple(other for other in self._subscriptions.pop(key, ()) if other is not subscription)
        if others:
            self._subscriptions[key] = others
        if not self._subscriptions and self._task is not None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._stop, context=Context())

    def _start(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name=f"watch {self._path}", context=Context()
            )
            self._detach = self._api.at_close(self.close)

    async def close(self) -> None:
        """Stop watching; subscriptions get ApiUnavailable."""
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.wait([task])

    def _stop(self) -> None:
        """End the watch because nobody subscribes any more."""
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        self._api.informers.pop(self._key, None)
        self._detach()
        if self._lingering is not None:
            self._lingering.cancel()
        self._synced = False
        self.version = ""
        self._objects.clear()
        self._fail(ApiUnavailable(f"the watch of {self._path} was closed"))

    async def _run(self) -> None:
        while True:
            try:
                pause = await self._cycle()
            except Exception as error:  # as where a line can't be logged: all jobs of a triggerer depend on this watch
                self._fail(error)
                pause = BACKOFF_SECONDS[0]
            await asyncio.sleep(pause)

    async def _cycle(self) -> float:
        """List if due, then watch until the stream ends. Returns the pause before the next cycle, in seconds."""
        wait: float | None = None
        clean, self._opened = False, None
        try:
            if not self.version or timing.now() >= self._resync_at:
                await self._list()
            await self._watch()
            clean = True
        except ApiUnavailable as error:
            wait = error.retry_after
            if error.page and 400 <= error.page < 500:  # such as a path that isn't served any more
                self._record_refused(error)
            else:
                self._record_unreachable(error)
        except ApiStatusError as error:
            wait = error.retry_after
            if error.status == 410:  # the resourceVersion has expired
                self.version = ""
                self.stats["expired"] += 1
            elif error.transient:
                self._record_unreachable(error)
            elif error.status != 401 or self._failures + 1 >= MAX_UNAUTHORIZED:
                self._record_refused(error)
        except Exception as error:
            # the client couldn't be built, or a response isn't a Kubernetes object
            self._record_refused(error)
        if self._stream_was_stable():
            self._failures = 0
            if clean:
                return 0
        self._failures += 1
        if self._failures >= RELIST_AFTER_FAILURES:
            self.version = ""
        return max(pause_after(self._failures, *BACKOFF_SECONDS), min(wait or 0.0, MAX_RETRY_AFTER_SECONDS))

    def _stream_was_stable(self) -> bool:
        return self._opened is not None and timing.now() - self._opened >= STABLE_STREAM_SECONDS

    def _record_unreachable(self, error: ApiUnavailable | ApiStatusError) -> None:
        """Log an outage once. A cut stream that can be reopened at once isn't logged."""
        self.stats["cuts"] += 1
        if self.unreachable_since is None:
            self.unreachable_since = timing.now()
        elif not self._logged_unreachable:
            self._logged_unreachable = True
            log.warning("Watch of %s failed. Trying again.\n%s", self._path, error)

    def _record_refused(self, error: Exception) -> None:
        """Log once that the watch is rejected, and pass the error to the subscriptions."""
        if self.failure is None:
            log.log(self._refusal_level, "Watch of %s was rejected. Trying again.\n%s", self._path, error)
        self.failure = error
        self._fail(error)

    def _record_reached(self) -> None:
        """Log the end of an outage that was logged."""
        if self.unreachable_since is not None:
            seconds = timing.now() - self.unreachable_since
            self._outages.add(timing.epoch() - seconds, timing.epoch())
            if self._logged_unreachable:
                log.info("Watch of %s works again after %.0f s", self._path, seconds)
        self.unreachable_since, self._logged_unreachable = None, False
        self.failure = None

    async def _list(self) -> None:
        """List all objects and deliver the differences from the known ones, without blocking the event loop."""
        began = timing.now()
        uids: set[str] = set()
        changed: list[Object] = []
        query = {**self._selectors, "limit": str(PAGE_SIZE)}
        while True:
            self.stats["lists"] += 1
            try:
                page = await self._api.request("GET", self._path, query=query)
            except ApiStatusError as error:
                if error.status != 410 or "continue" not in query:
                    raise
                uids, changed = set(), []
                query = dict(self._selectors)  # the continue token has expired: list all at once
                continue
            kind = {"apiVersion": page.get("apiVersion"), "kind": str(page.get("kind", "")).removesuffix("List")}
            for item in page.pop("items", None) or ():
                uids.add(item["metadata"]["uid"])
                if not self._objects.is_current(item):
                    changed.append({**kind, **stripped(item)})
            more = page["metadata"].get("continue")
            if not more:
                break
            query["continue"] = more
        for obj in self._objects.outside(uids):
            self._remove(obj)
        for number, obj in enumerate(changed, 1):
            self._upsert(obj)
            if not number % PAGE_SIZE:
                await asyncio.sleep(0)
        self.version, self.listed_at = page["metadata"]["resourceVersion"], began
        self._resync_at = timing.now() + RESYNC_SECONDS * random.uniform(0.9, 1.1)
        self._synced = True
        for subscription in self._subscribed(list(self._subscriptions)):
            subscription.sync()
        self._record_reached()

    async def _watch(self) -> None:
        """Follow changes until the stream ends, at the latest when the next list is due."""
        query = {
            **self._selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self.version,
            "timeoutSeconds": str(max(1, round(self._resync_at - timing.now()))),
        }
        self.stats["watches"] += 1
        async with self._api.stream(self._path, query=query, read_timeout=SILENCE_TIMEOUT_SECONDS) as response:
            self._record_reached()
            self._opened = timing.now()
            async for event in events_of(response):
                self._event(event)
                self._failures = 0

    def _event(self, event: dict[str, Any]) -> None:
        obj = event["object"]
        self.stats["events"] += 1
        self.version = obj["metadata"]["resourceVersion"]
        if event["type"] == "DELETED":
            self._remove(stripped(obj))
        elif event["type"] != "BOOKMARK":
            self._upsert(with_shared_names(stripped(obj)))

    def _upsert(self, obj: Object) -> None:
        if self._objects.is_current(obj):
            return
        before, keys = self._objects.put(obj)
        for subscription in self._subscribed((None, by_uid(obj["metadata"]["uid"]), *keys)):
            subscription.deliver(obj)
        for subscription in self._subscribed(key for key in before if key not in keys):
            subscription.deliver(obj, deleted=True)

    def _remove(self, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        before = self._objects.remove(uid)
        if before is None:
            return
        for subscription in self._subscribed((None, by_uid(uid), *before)):
            subscription.deliver(obj, deleted=True)

    def _subscribed(self, keys: Iterable[Key | None]) -> Iterator[Subscription]:
        for key in keys:
            yield from self._subscriptions.get(key, ())

    def _fail(self, error: Exception) -> None:
        for subscription in self._subscribed(list(self._subscriptions)):
            subscription.fail(error)


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a watch, until its stream ends.

    :raises ApiStatusError: the API server ends the watch with an error, such as 410 Gone.
    """
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            try:
                event: dict[str, Any] = json.loads(line)
            except ValueError as error:
                raise ApiUnavailable(f"invalid watch event: {line[:200]!r}") from error
            if not isinstance(event, dict) or not {"type", "object"} <= event.keys():
                raise ApiUnavailable(f"invalid watch event: {line[:200]!r}")
            if event["type"] == "ERROR":
                why = event["object"]
                raise ApiStatusError(why.get("code") or 500, why.get("reason") or "", why.get("message") or "")
            yield event


def shared_informer(
    api: Api, path: str, *, label_selector: str = "", field_selector: str = "", refusal_level: int = logging.WARNING
) -> SharedInformer:
    """The informer of this path and these selectors for this Api.

    It starts with the first subscription and stops some seconds after the last one has ended.
    """
    # The Api holds them, so a new Api for the same connection never gets an informer that is being closed.
    key = (path, label_selector, field_selector)
    informer = api.informers.get(key)
    if not isinstance(informer, SharedInformer):
        informer = api.informers[key] = SharedInformer(api, *key, refusal_level=refusal_level)
    return informer
