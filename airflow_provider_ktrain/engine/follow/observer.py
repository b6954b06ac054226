"""Observes the job and its pods by two watches, and by what the owner of the training reads.

The API server guarantees no order between the two watches: one may show that the job failed before the other one shows
the pod that failed. A watch may also be seconds behind. So a watch only shows when to look: the owner reads job and
pods before it decides anything irreversible, and `take` brings what it has read into the state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.state.limits import Limit
from airflow_provider_ktrain.core.state.pods.objects import created
from airflow_provider_ktrain.core.state.pods.stopped_pods import Replica, StoppedPod, ends_in_events
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.core.text.output import listed
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import JobRead, list_objects, owner_of, pod_owners, read_job
from airflow_provider_ktrain.engine.api.request_errors import explain
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import phase_of_pod
from airflow_provider_ktrain.engine.watch.informer import Outages, SharedInformer, Subscription, events_of
from airflow_provider_ktrain.engine.watch.stripping import stripped

#: How long after the start a forbidden watch fails the task at once. Later, it may be an outage.
FAIL_FAST_SECONDS = 60.0
FORBIDDEN_GRACE_SECONDS = 600.0  #: How long a watch may be rejected (401, 403) before following fails.
POD_WATCH_LAG_SECONDS = 5.0  #: How long after the job's end to wait for a deleted pod that explains it.
STARTING_DELAY_SECONDS = 1.0  #: How long an operator may take to create the pods of a job one after the other.
_BEFORE_STARTING = (Phase.QUEUED, Phase.SUSPENDED, Phase.PENDING)
MISSED_CHANGES_SECONDS = 5  #: How long the API server may take to deliver changes from before this process.
#: How long to ask again how pods ended. It is longer than a dead watch counts as alive.
UNREAD_HISTORY_SECONDS = 180.0
MAX_NAMED_REPLICAS = 3  #: How many replicas one message names.
UNREAD_GAP_SECONDS = 60.0  #: Longest time between two failed reads of one outage.
SLICE_PODS = 50  #: How many pods' changes are processed before the event loop may do something else.


class Observer(Part):
    """Brings the job's state and output up to date with the watches. Phases, and watches that fail, are logged.

    :param informers: the watches of the job and of its pods, to which `jobs` and `pods` subscribe.
    """

    def __init__(
        self,
        context: FollowContext,
        output: JobOutput,
        queue: QueueFollower,
        informers: Sequence[SharedInformer],
        jobs: Subscription,
        pods: Subscription,
    ) -> None:
        self._api, self._state, self._log, self._news = context.api, context.state, context.log, context.news
        self._fail_fast = context.fail_fast
        self._output, self._queue, self._informers = output, queue, informers
        self._jobs, self._pods = jobs, pods
        self._own = OwnPods(context, pods)
        self._read_at = timing.now()  # when the state was read last
        self._read_pods: dict[str, Object] = {}  # by uid, as `take` got them: a watch may be behind
        # whose changes were read again, by replica and the uid of its newest pod
        self._read_again: set[tuple[Replica, str]] = set()
        self._ends_looked_at = 0  # version of the pods' ends
        self._lost: set[Replica] = set()  # whose ends were looked for in events
        self._unread_since: float | None = None  # when one of these could not be read first, by `timing.now`
        self._unread: tuple[float, float] | None = None  # first and last read that failed, in epoch seconds
        self._outages: Outages | None = None  # in which reads failed; most jobs have none
        self._placed_since: float | None = None  # since when each existing pod has a node, by `timing.now`
        self._rejected_since: float | None = None  # when a watch was first rejected, by `timing.now`

    async def wait(self, timeout: float) -> None:
        """Wait until a watch has changes, the following is asked to stop, or `timeout` seconds have passed."""
        await self._news.wait(timeout)
        for subscription in (self._jobs, self._pods):
            self._record(subscription)

    def _record(self, subscription: Subscription) -> None:
        """Take deletions and errors from a watch. The objects that exist are taken by `update`."""
        try:
            deleted = subscription.take()
        except Exception as error:
            self._bear(error)
            return
        if deleted is None:
            return
        self._rejected_since = None
        for obj in deleted:
            self._mark_deleted(obj)

    def _bear(self, error: Exception) -> None:
        """Warn that a watch is rejected; raise the error if that lasts too long."""
        state, now = self._state, timing.now()
        if self._rejected_since is None:
            self._rejected_since = now
            self._log.warning(f"Can't watch {state.ref}. Trying again.\n{error}")
        refused = isinstance(error, ApiStatusError)  # a proxy's page isn't one, nor a client that can't be renewed
        early = refused and self._fail_fast and (state.phase is None or now - state.began < FAIL_FAST_SECONDS)
        if early or now - self._rejected_since > FORBIDDEN_GRACE_SECONDS:
            if isinstance(error, ApiStatusError | ApiUnavailable):
                resources = f"{state.kind.plural}.{state.kind.group} and pods"
                raise explain(error, "watch", resources, state.ref.namespace)
            raise error

    def _mark_deleted(self, obj: Object) -> None:
        if obj["metadata"]["uid"] == self._state.ref.uid:
            self._state.job = obj
        elif self._state.owns(obj):
            self._state.pods.mark_deleted(obj)
            self._output.mark_deleted(obj)

    async def update(self) -> bool:
        """Bring state and output up to date. Returns whether the phase changed."""
        state = self._state
        if not state.ref.uid and self._jobs.objects:
            state.ref = replace(state.ref, uid=next(iter(self._jobs.objects)))
        job = await self._find_job()
        if job is not None and not self._is_older(0, job, state.job):
            state.job = job
        pods_known, version = self._pods.synced, self._informers[1].version
        if state.job is not None:
            await self._own.find_owners()
            pods_known = self._pods.synced
            for pod in filter(state.owns, self._pods.deleted):
                state.pods.mark_deleted(pod)
                self._output.restarts.mark_deleted(pod)
            for number, (pods, removed) in enumerate(self._own.changes()):
                if number:
                    await asyncio.sleep(0)
                changed = {u: pod for u, pod in pods.items() if not self._is_older(1, pod, self._read_pods.get(u))}
                for uid in pods.keys() - changed.keys():
                    state.pods.record_earlier(pods[uid])
                state.pods.update(changed, removed, timing.utc_now())
                self._output.observe(changed, removed)
            if pods_known:
                state.pods_version = version or state.pods_version
                try:
                    await self._replay_missed_changes()
                except (ApiStatusError, ApiUnavailable):
                    state.uncertain, pods_known = True, False
        await self._queue.update()
        return pods_known and self._update_phase()

    def _is_older(self, watch: int, obj: Object, known: Object | None) -> bool:
        """Whether a watch is behind what was read. A list that began later isn't: after a restore of etcd, the
        resourceVersions may be lower.
        """
        return self._informers[watch].listed_at <= self._read_at and is_older(obj, known)

    async def _replay_missed_changes(self) -> None:
        """Learn how pods ended whose changes no process has seen: before this one watched, or in a cut of its watch.

        An operator may have taken the end of a pod that was evicted meanwhile for a success. A watch from the
        resourceVersion that was seen last shows it, while the API server knows changes since.

        :raises ApiStatusError, ApiUnavailable: this is to be tried again.
        """
        state, before = self._state, str(self._state.pods_before.get("version") or "")
        if not state.pods_before and state.pods.ends_version == self._ends_looked_at:
            return
        unread = {of: version or before for of, version in state.ends.unread.items() if of not in self._read_again}
        versions = [version for version in unread.values() if version]
        if versions:
            oldest = min(versions, key=lambda version: int(version) if version.isdigit() else -1)
            try:
                await self._replay(oldest, unread)
            except (ApiStatusError, ApiUnavailable) as e:
                forgotten = e.status in (400, 410)
                if not forgotten and not self._gives_up():
                    raise
            self._unread_since = None
        self._read_again |= unread.keys()
        self._ends_looked_at = state.pods.ends_version
        state.pods_before = {}

    async def _find_lost_ends(self) -> None:
        """Learn how the last pods of a job ended that has succeeded, if their changes don't show it.

        Events of the pods show it, of the last hour as a rule. It is asked after a read of job and pods: a watch may
        just be late.

        :raises ApiStatusError, ApiUnavailable: this is to be tried again.
        """
        state, why, ends = self._state, "", dict[Replica, StoppedPod | None]()
        if phase_of(state.known_job) is not Phase.SUCCEEDED or not (missing := state.ends.unknown - self._lost):
            return
        try:
            ends = await self._read_ends(missing)
        except (ApiStatusError, ApiUnavailable) as e:
            if not self._gives_up():
                raise
            why = f"\n{e}"
        self._lost |= missing
        for replica, stopped in ends.items():
            state.pods.record_end(replica, stopped)
        if unknown := missing & state.ends.unknown:
            names = listed([state.kind.replica_name(*one) for one in sorted(unknown)], MAX_NAMED_REPLICAS)
            self._log.warning(
                f"The end of pods of {state.ref} was not observed.\nHow they ended can't be read any more: {names}. "
                f"If they were evicted, a success may be incomplete.{why}"
            )

    def _gives_up(self) -> bool:
        """Whether what happened before couldn't be read for long although the API server answers other requests."""
        now = timing.now()
        if self._unread_since is None or any(informer.unreachable_since for informer in self._informers):
            self._unread_since = now
        return now - self._unread_since > UNREAD_HISTORY_SECONDS

    async def _replay(self, version: str, unread: Collection[tuple[Replica, str]]) -> None:
        """Take the changes of pods since a resourceVersion, until the ends of these replicas are known.

        If a pod was stopped or has failed, all changes are taken: another may have replaced it, and be gone as well.

        :param unread: each with the uid of its newest pod; "" if no pod of it was seen.
        """
        state, ref, existing = self._state, self._state.ref, dict(self._state.pods.groups.pods)
        query = {
            "labelSelector": ref.pod_selector, "watch": "true", "resourceVersion": version,
            "timeoutSeconds": str(MISSED_CHANGES_SECONDS),
        }  # fmt: skip
        path, timeout = api_paths.core(ref.namespace, "pods"), 2.0 * MISSED_CHANGES_SECONDS
        found, deleted = set[tuple[Replica, str]](), dict[str, Object]()
        replicas = {replica for replica, _ in unread}
        async with self._api.stream(path, query=query, read_timeout=timeout) as response:
            async for event in events_of(response):
                pod = stripped(event["object"])
                uid, replica = pod["metadata"]["uid"], state.kind.role_of(pod)
                if not state.owns(pod):
                    continue
                if event["type"] == "DELETED" and uid not in existing:
                    state.pods.mark_deleted(pod, is_seen=True)
                    deleted[uid] = pod
                else:
                    state.pods.record_earlier(pod)
                    if uid not in existing or is_older(pod, existing[uid]):
                        continue
                if phase_of_pod(pod) != "Failed":  # else another one may have replaced it
                    found |= {(replica, uid), (replica, "")}
                if found.issuperset(unread) and not ((ends := state.ends).stopped or ends.unknown & replicas):
                    break
        for pod in deleted.values():
            self._output.mark_deleted(pod)

    async def _read_ends(self, missing: Collection[Replica]) -> dict[Replica, StoppedPod | None]:
        """How the pods of these replicas ended by their events: see `ends_in_events`. Without the right to, nothing."""
        state, path = self._state, api_paths.core(self._state.ref.namespace, "events")
        found: list[Object | None] = []

        def of_missing(event: Object) -> Object | None:
            name = str(event["involvedObject"].get("name"))
            return event if state.kind.replica_of(state.known_job, name) in missing else None

        try:
            for reason in ("Started", "Killing"):
                fields = f"involvedObject.kind=Pod,reason={reason}"
                found += await list_objects(self._api, path, fields=fields, keep=of_missing)
        except ApiStatusError as e:
            if e.status != 403:
                raise
        return ends_in_events(state.kind, state.known_job, filter(None, found), missing)

    async def _find_job(self) -> Object | None:
        """The job as it is now, or as it was when it was deleted; None if it isn't known.

        If the watch doesn't have the job, this doesn't prove that the job was deleted: a watch that is older than the
        job may not have it yet, and a watch with a selector reports a job that lost its label as deleted. So the job is
        read from the API server.
        """
        state = self._state
        job = self._jobs.objects.get(state.ref.uid)
        if state.ref.uid and job is None and not state.gone and self._jobs.synced:
            try:
                read = await read_job(self._api, state.ref)
                state.gone, state.uncertain = read is ABSENT, read is not ABSENT
                job = None if read is ABSENT else read
            except (ApiUnavailable, ApiStatusError) as e:
                if self._fail_fast and not e.transient and e.status != 401:  # the watch shows whether that lasts
                    raise
                state.uncertain = True
        elif job is not None:
            state.uncertain = False
        return job or next((last for last in self._jobs.deleted if last["metadata"]["uid"] == state.ref.uid), None)

    def _update_phase(self) -> bool:
        """Update the phase. The pods are known: without them, an end has neither logs nor cause."""
        state = self._state
        if state.job is None and not state.gone:
            return False
        phase = self._queue.phase(
            phase_of(ABSENT if state.job is None else state.job, state.pods.groups.examples(), earlier=state.phase)
        )
        if state.gone and not phase.ended:  # a job that ended and was then deleted (a TTL of 0) keeps its phase
            phase = Phase.GONE
        phase = self._settled(phase)
        if phase is state.phase:
            return False
        self._log.info(state.describe(phase))
        state.enter(phase)
        if phase in (Phase.RUNNING, Phase.RESTARTING):
            self._output.restart_clock(Limit.LOG_STALL, timing.epoch())  # it wrote nothing before because it didn't run
        return True

    def _settled(self, phase: Phase) -> Phase:
        """The phase, but Pending in the first second in which all pods have nodes: more pods may be created."""
        now = timing.now()
        if phase is not Phase.STARTING or self._state.phase not in _BEFORE_STARTING:
            self._placed_since = None
            return phase
        self._placed_since = self._placed_since or now
        return phase if now >= self._placed_since + STARTING_DELAY_SECONDS else Phase.PENDING

    @property
    def due(self) -> float | None:
        """When the phase may change although nothing else has, by `timing.now`; None if it doesn't."""
        since = self._placed_since
        return None if since is None else max(since + STARTING_DELAY_SECONDS, timing.now() + 0.1)

    async def take(self, read: JobRead) -> None:
        """Bring state and output up to date with what was read from the API server.

        :param read: the job, and the pods that existed after it was read.
        :raises ApiStatusError, ApiUnavailable: what happened to pods before can't be read now.
        """
        state = self._state
        self._read_at = timing.now()
        state.gone, state.uncertain = read.job is ABSENT, False
        if read.job is not ABSENT:
            state.job = stripped(read.job)
        pods = self._read_pods = {pod["metadata"]["uid"]: stripped(pod) for pod in read.pods}
        removed = [uid for uid in list(state.pods.groups.pods) if uid not in pods]
        state.pods.update(pods, removed, timing.utc_now())
        if state.job is not None:
            self._output.observe(pods, removed)
            await self._replay_missed_changes()
            await self._find_lost_ends()
        await self._queue.update()
        self._update_phase()
        self._end_unread()

    async def wait_for_explaining_pod(self) -> None:
        """Wait some seconds until the watch shows a pod that explains the end of the job, if none is known.

        The operator may have deleted it before the pods were read (cleanPodPolicy).
        """
        end = timing.now() + POD_WATCH_LAG_SECONDS
        while not self._state.pods_explain_the_end() and timing.now() < end:
            await self.wait(end - timing.now())
            await self.update()

    def record_unread(self, asked: float) -> None:
        """Record that a read for a decision has failed, which began at `asked`, in epoch seconds.

        The watches may not show that: without a leader of etcd, they stay open and silent.
        """
        if self._unread is not None and asked - self._unread[1] > UNREAD_GAP_SECONDS:
            self._end_unread()
        self._unread = (self._unread or (asked, asked))[0], timing.epoch()

    def _end_unread(self) -> None:
        """Record that the API server answers reads again."""
        if self._unread is not None:
            (began, failed), self._unread = self._unread, None
            self._outages = self._outages or Outages()
            self._outages.add(began, min(timing.epoch(), failed + UNREAD_GAP_SECONDS))

    def seconds_away_since(self, at: float) -> float:
        """For how long the API server answered no watch, or no read, since `at`, in epoch seconds."""
        unread = 0.0 if self._outages is None else self._outages.seconds_since(at)
        return max(unread, *(informer.seconds_away_since(at) for informer in self._informers))

    def recovered_at(self, due: float) -> float:
        """When the cluster has had the time to do what it could not do in outages, for a limit that passes at `due`."""
        unread = 0.0 if self._outages is None else self._outages.recovered_at(due)
        return max(unread, *(informer.recovered_at(due) for informer in self._informers))


def is_older(obj: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    """Whether an object that a watch shows is older than what was read. resourceVersions of one kind are ordered."""
    versions = [str(((one or {}).get("metadata") or {}).get("resourceVersion") or "") for one in (obj, known)]
    return all(version.isdigit() for version in versions) and int(versions[0]) < int(versions[1])


class OwnPods:
    """Finds the changes of a job's pods. It looks only at pods that the watch has changed."""

    def __init__(self, context: FollowContext, pods: Subscription) -> None:
        self._api, self._state, self._pods = context.api, context.state, pods
        # dicts in place of sets, because most jobs have no pods yet, and an empty set takes three times the memory
        self._asked = {"": None}  # owners of pods that the API server was asked about
        self._unseen: dict[str, None] = {}  # uids of changed pods that `changes` has not looked at yet
        self._unasked: dict[str, None] = {}  # uids of changed pods that `find_owners` has not looked at yet
        self._own: dict[str, None] = {}  # uids
        self._decided_by: object = None  # what the last decisions depended on

    async def find_owners(self) -> None:
        """Ask the API server to which job pods belong that don't show it, once for each new owner."""
        ref, taken = self._state.ref, self._pods.take_changed()
        self._unseen |= dict.fromkeys(taken)
        if not self._state.kind.behavior.pod_owner_label:
            return
        self._unasked |= dict.fromkeys(taken)
        changed = [pod for uid in self._unasked if (pod := self._pods.objects.get(uid)) is not None]
        unknown = [pod for pod in changed if owner_of(pod, ref) not in self._asked]
        with contextlib.suppress(ApiUnavailable, ApiStatusError):
            if unknown:
                self._state.pod_owners |= await pod_owners(self._api, ref, unknown)
                self._asked |= {owner_of(pod, ref): None for pod in unknown}
            self._unasked = {}

    def changes(self) -> Iterator[tuple[dict[str, Object], list[str]]]:
        """The changes since the last call, in parts of at most SLICE_PODS pods, oldest pods first; at least one part.

        A part has new pods, and pods that have changed, by uid, and the uids of pods that the job no longer has.
        The event loop may do something else between two parts. What the caller doesn't take remains for the next call.
        """
        state, pods = self._state, self._pods.objects
        self._unseen |= dict.fromkeys(self._pods.take_changed())
        if (decided_by := state.ownership) != self._decided_by:
            self._decided_by = decided_by
            self._unseen |= dict.fromkeys((*pods, *self._own))
        uids = sorted(self._unseen, key=lambda uid: created(pods.get(uid, {})))
        for begin in range(0, len(uids) or 1, SLICE_PODS):
            part = uids[begin : begin + SLICE_PODS]
            for uid in part:
                self._unseen.pop(uid, None)
            yield self._look_at(part)

    def _look_at(self, uids: Iterable[str]) -> tuple[dict[str, Object], list[str]]:
        changed: dict[str, Object] = {}
        removed: list[str] = []
        for uid in uids:
            pod = self._pods.objects.get(uid)
            if pod is not None and self._state.owns(pod):
                changed[uid] = pod
                self._own[uid] = None
            elif uid in self._own:
                removed.append(uid)
                del self._own[uid]
        return changed, removed
