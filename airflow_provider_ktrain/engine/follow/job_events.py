"""The events of a job: those of a job that waits for its start by one watch for all such jobs of this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.state.pods.objects import created_at, event_time
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import list_objects
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.watch.informer import SharedInformer, Subscription, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_involved_name, by_involved_uid, by_uid

#: How long to wait for the watch's first list. After that, the events are listed for the job.
FIRST_LIST_SECONDS = 10.0
FORBIDDEN_RETRY_SECONDS = 600.0  #: Pause before the watch is tried again after the API server rejected it (403).
MAX_OBJECTS = 20  #: How many objects' events are listed: the job and its pods, existing ones first.
NO_OBJECT: Key = by_uid("")  #: Key of a subscription that keeps the watch open and gets no events.
#: Namespaces whose events a client may not watch, each with the timing.now() of the next attempt.
_refused: WeakKeyDictionary[Api, dict[str, float]] = WeakKeyDictionary()


class JobEvents:
    """The events of a job, its pods and what is between.

    :param context: of the job. A missing right is logged, to watch events once for each client.
    """

    def __init__(self, context: FollowContext) -> None:
        self._api, self._state, self._log = context.api, context.state, context.log
        self._informer: SharedInformer | None = None
        self._subscription: Subscription | None = None
        self.exist = True  #: Whether there are any; True until they are read.

    async def close(self) -> None:
        """Give up the watch: it ends some seconds after the last job has given it up."""
        subscription, self._informer, self._subscription = self._subscription, None, None
        if subscription is not None:
            await subscription.__aexit__()

    async def watched(self) -> list[Object]:
        """The Warning events, which are enough for a job that doesn't start; without the right to watch, all events.

        The watch stays open until `close`.
        """
        state = self._state
        found: list[Object] = []
        if (informer := await self._watch()) is None:
            await self.read(found)
            return found
        uids, began = {state.ref.uid, *state.pods.uids}, created_at(state.known_job) or 0.0
        between = [by_involved_name(kind, name) for kind, name in state.kind.objects_with_events(state.known_job)]
        known = informer.objects_of([*map(by_involved_uid, uids), *between])
        found += [event for event in known if event["involvedObject"].get("uid") in uids or event_time(event) >= began]
        self.exist = bool(found)
        return found

    async def read(self, found: list[Object], *, first: Collection[str] = (), pods: Iterable[str] = ()) -> bool:
        """Add the events to `found`, as far as they can be read: a diagnosis can do without.

        :param first: uids of pods whose events are read before those of others. Default: none.
        :param pods: names of pods that may have existed. Default: none.
        :return: whether all could be read, of at most MAX_OBJECTS objects.
        """
        ref, job = self._state.ref, self._state.known_job
        path = api_paths.core(ref.namespace, "events")
        began = created_at(job) or 0.0  # objects of an earlier job had the same names
        named = [*self._state.kind.objects_with_events(job), *(("Pod", name) for name in pods)]
        between = [f"involvedObject.kind={kind},involvedObject.name={name}" for kind, name in named]
        uids = self._state.pods.uids
        uids = [ref.uid, *sorted(uids, key=lambda uid: uid not in first)]
        by_uid = [f"involvedObject.uid={uid}" for uid in uids]
        for selector in [*between, *by_uid][:MAX_OBJECTS]:
            try:
                listed = await list_objects(self._api, path, fields=selector, keep=dict)
            except (ApiStatusError, ApiUnavailable) as e:
                self._log.warning(f"Can't read the events of {ref}.\n{e}")
                if isinstance(e, ApiStatusError) and e.status == 403:
                    self.exist = False  # they are never known: a job without pods then has its startup limit
                return False
            found += [event for event in listed if event_time(event) >= began or selector in by_uid]
        self.exist = bool(found)
        return True

    async def _watch(self) -> SharedInformer | None:
        """The watch of the namespace's Warning events, after its first list; None if they can't be watched."""
        namespace = self._state.ref.namespace
        if timing.now() < _refused.get(self._api, {}).get(namespace, 0.0):
            return None
        if self._informer is None:
            path = api_paths.core(namespace, "events")
            informer = shared_informer(self._api, path, field_selector="type=Warning", refusal_level=logging.DEBUG)
            self._subscription = await informer.subscribe(key=NO_OBJECT).__aenter__()
            self._informer = informer
        informer, end = self._informer, timing.now() + FIRST_LIST_SECONDS
        while not informer.is_watching and informer.failure is None and timing.now() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if informer.failure is not None:
            await self.close()
            if isinstance(informer.failure, ApiStatusError) and informer.failure.status == 403:
                self._record_refusal(informer.failure)
        return informer if informer.is_watching else None

    def _record_refusal(self, error: ApiStatusError) -> None:
        """The API server rejects the watch of events; jobs are followed with a list of the events of each."""
        namespace, refused = self._state.ref.namespace, _refused.setdefault(self._api, {})
        if namespace not in refused:
            self._log.info(
                f"Events are listed for each job in {namespace} that doesn't start: the right to watch events "
                f"is missing.\n`ktrain rbac --service-account NAMESPACE:NAME` prints the Role and its binding.\n{error}"
            )
        refused[namespace] = timing.now() + FORBIDDEN_RETRY_SECONDS
