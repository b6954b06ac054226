"""Observes the job and its pods by two watches, and sends requests to the API server if a watch proves nothing.

The API server guarantees no order between the two watches: one may show that the job failed before the other one shows
the pod that failed. A watch may also be seconds behind. So nothing irreversible is decided because a watch does *not*
show something: the API server is read before a job counts as deleted or as another try's, and before a diagnosis
without the pod that explains it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.own_pods import OwnPods
from airflow_provider_ktrain.engine.follow.queueing import QueueFollower
from airflow_provider_ktrain.engine.follow.state import JobState, phase_of_pod, utc_now
from airflow_provider_ktrain.engine.job_requests import Log, job_pods, pod_owners, read_job
from airflow_provider_ktrain.engine.request_errors import explain, is_transient
from airflow_provider_ktrain.engine.wakeup import Wakeup
from airflow_provider_ktrain.engine.watch.job_watches import watch_keys, watches_of
from airflow_provider_ktrain.engine.watch.subscription import Subscription

Object = dict[str, Any]
FAIL_FAST_SECONDS = 60.0  #: in which a forbidden watch fails the task at once: after that, it may be an outage
FORBIDDEN_GRACE_SECONDS = 600.0  #: in which a watch may be rejected (401, 403) before following fails
POD_WATCH_LAG_SECONDS = 5.0  #: after the job's end, in which to wait for the pod that explains it
USUAL_WATCH_LAG_SECONDS = 1.0  #: the same, before the pods are listed to find out whether there is such a pod


def subscriptions(
    api: Api, ref: JobRef, *, shared: bool, news: Wakeup | None = None
) -> tuple[Subscription, Subscription]:
    """Subscriptions to the job and to its pods, which begin when their contexts are entered.

    :param shared: use one watch for all jobs of the deployment, if the job has its label.
    :param news: see `SharedInformer.subscribe`. Default: one for each subscription.
    """
    jobs_watch, pods_watch = watches_of(ref, shared=shared)
    job_key, pod_key = watch_keys(ref)
    jobs, pods = jobs_watch.informer(api), pods_watch.informer(api)
    return jobs.subscribe(key=job_key, news=news), pods.subscribe(key=pod_key, news=news)


class Observer:
    """Brings the job's state and output up to date with the watches.

    :param api: client for the cluster.
    :param state: what to update.
    :param output: gets the pods, to follow their logs.
    :param jobs: subscription to the job.
    :param pods: subscription to its pods.
    :param queue: what Kueue does with the job.
    :param news: set when `jobs`, `pods` or `queue` have changes, and when the following is asked to stop.
    :param fail_fast_on_forbidden: see `HostPolicy`.
    :param log: where phases, and watches that fail, are logged.
    """

    def __init__(
        self,
        api: Api,
        state: JobState,
        output: JobOutput,
        jobs: Subscription,
        pods: Subscription,
        *,
        queue: QueueFollower,
        news: Wakeup,
        fail_fast_on_forbidden: bool,
        log: Log,
    ) -> None:
        self._api, self._state, self._output, self._log = api, state, output, log
        self._jobs, self._pods, self._queue, self._news = jobs, pods, queue, news
        self._fail_fast = fail_fast_on_forbidden
        self._own = OwnPods(state, pods)
        self._rejected_since: float | None = None  # when a watch was first rejected, by `time.monotonic`
        self.pods_due = 0.0  #: when to call `pods_are_behind` again after it returned True, by `time.monotonic`

    async def wait(self, timeout: float) -> None:
        """Wait until a watch has changes, the following is asked to stop, or `timeout` seconds have passed."""
        await self._news.wait(timeout)
        for subscription in (self._jobs, self._pods):
            self._note(subscription)
        await self._queue.note()

    def _note(self, subscription: Subscription) -> None:
        """Take deletions and errors from a watch. The objects that exist are taken by `update`."""
        try:
            changes = subscription.take()
        except Exception as error:
            self._bear(error)
            return
        if changes is None:
            return
        self._rejected_since = None
        for seen in changes:
            if seen.type == "DELETED":
                self._mark_deleted(seen.object)

    def _bear(self, error: Exception) -> None:
        """Warn that a watch is rejected; raise the error if that lasts too long."""
        state, now = self._state, time.monotonic()
        if self._rejected_since is None:
            self._rejected_since = now
            self._log.warning(f"Can't watch {state.ref}. Trying again.\n{error}")
        early = self._fail_fast and (state.phase is None or now - state.began < FAIL_FAST_SECONDS)
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
            state.bind(next(iter(self._jobs.objects)))
        job = await self._find_job()
        if job is not None:
            state.job = job
        pods_known = self._pods.synced
        if state.job is not None:
            await self._find_pod_owners()
            pods_known = self._pods.synced
            deleted = list(filter(state.owns, self._pods.deleted))
            for number, pods in enumerate(self._own.changes()):
                if number:
                    await asyncio.sleep(0)
                state.pods.update(pods.changed, pods.removed, utc_now())
                self._output.observe(state.job, pods.changed, pods.removed, deleted)
                deleted = []
        await self._queue.update()
        return pods_known and self._update_phase()

    async def _find_pod_owners(self) -> None:
        """Ask the API server to which job pods belong that don't show it, once for each new owner."""
        unknown = self._own.with_unknown_owner()
        if not unknown:
            return
        with contextlib.suppress(ApiUnavailable, ApiStatusError):
            self._state.pod_owners |= await pod_owners(self._api, self._state.ref, unknown)
            self._own.note_owners(unknown)

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
                job = await read_job(self._api, state.ref)
                state.gone, state.uncertain = job is None, job is not None
            except (ApiUnavailable, ApiStatusError) as e:
                if self._fail_fast and not is_transient(e):
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
        phase = self._queue.phase(phase_of(state.job, state.pods.groups.examples(), earlier=state.phase))
        if state.gone and not phase.ended:  # a job that ended and was then deleted (a TTL of 0) keeps its phase
            phase = Phase.GONE
        if phase is state.phase:
            return False
        self._log.info(state.describe(phase))
        state.enter(phase)
        if phase in (Phase.RUNNING, Phase.RESTARTING):
            self._output.restart_silence(time.time())  # it wrote nothing before because it didn't run
        return True

    async def is_superseded(self) -> bool:
        """Whether another try owns the job, confirmed by the API server.

        The watch may show an older owner. If this try stopped because of that, nobody would follow the job.
        """
        state = self._state
        if not state.superseded:
            return False
        try:
            state.job = await read_job(self._api, state.ref) or state.job
        except (ApiUnavailable, ApiStatusError):
            state.uncertain = True
            return False
        return state.superseded

    async def pods_are_behind(self) -> bool:
        """Whether the job has ended and the watch of the pods doesn't yet show why.

        True if no known pod explains the end, and the API server knows other pods or pod phases than the watch, or
        can't be asked; for POD_WATCH_LAG_SECONDS at most. It is asked after USUAL_WATCH_LAG_SECONDS, or at once if no
        pod is known.
        """
        state = self._state
        waited = time.monotonic() - state.phase_since
        if waited >= POD_WATCH_LAG_SECONDS or state.pods_explain_the_end():
            return False
        usual = waited < USUAL_WATCH_LAG_SECONDS and bool(state.pods.live)
        self.pods_due = state.phase_since + (USUAL_WATCH_LAG_SECONDS if usual else POD_WATCH_LAG_SECONDS)
        if usual:
            return True
        known = {pod["metadata"]["uid"]: phase_of_pod(pod) for pod in state.pods.live}
        try:
            existing = await job_pods(self._api, state.ref)
        except (ApiUnavailable, ApiStatusError):
            return True
        return {pod["metadata"]["uid"]: phase_of_pod(pod) for pod in existing} != known
