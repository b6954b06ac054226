"""A job and its pods as shown by the watches that already run in this process, in place of requests.

A watch may be behind the API server, so what it shows is used in two ways only. First, to decide about a write: the
write contains the resourceVersion that the watch has delivered, and if this is out of date, the API server answers 409
and the job is read. Second, to prove a deletion: an event DELETED of an object that was being deleted proves that the
object is gone. The absence of an object or event proves nothing.

A job that is deleted in the background (TrainJob) is gone at once, so its event proves no more than the response to the
request does: only the events of its pods count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.identity import DEPLOYMENT_LABEL, JobRef, label_value
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.status import Phase, phase_of
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.job_requests import belongs, has_ended, is_terminating, read_job, shown_owner
from airflow_provider_ktrain.engine.wakeup import Wakeup
from airflow_provider_ktrain.engine.watch.informer import SharedInformer, shared_informer
from airflow_provider_ktrain.engine.watch.object_keys import Key, by_label, by_name, by_uid
from airflow_provider_ktrain.engine.watch.subscription import Subscription

Object = dict[str, Any]
CLEANUP_SECONDS = 2.0  #: in which an operator deletes the running pods of a job that has ended (cleanPodPolicy)


class Watched(NamedTuple):
    """What a shared informer watches: see `watch.shared_informer`."""

    path: str
    label_selector: str = ""
    field_selector: str = ""

    def informer(self, api: Api) -> SharedInformer:
        """The informer of this watch."""
        return shared_informer(api, self.path, label_selector=self.label_selector, field_selector=self.field_selector)

    def running_informer(self, api: Api) -> SharedInformer | None:
        """The informer of this watch if it is watching. Nothing is started."""
        informer = api.informers.get((self.path, self.label_selector, self.field_selector))
        return informer if isinstance(informer, SharedInformer) and informer.is_watching else None


def watches_of(ref: JobRef, *, shared: bool) -> tuple[Watched, Watched]:
    """What to watch for a job and for its pods.

    :param shared: one watch for all jobs of the deployment, if the job has its label.
    """
    kind = kind_of(ref.kind)
    jobs, pods = api_paths.jobs(kind, ref.version, ref.namespace), api_paths.core(ref.namespace, "pods")
    if shared and ref.submission:
        selector = f"{DEPLOYMENT_LABEL}={label_value(ref.deployment)}"
        # pods that may lack our labels are selected by the operator's label, whatever its value
        return Watched(jobs, selector), Watched(pods, selector if kind.labels_pods else kind.pod_name_label)
    return Watched(jobs, field_selector=f"metadata.name={ref.name}"), Watched(pods, ref.pod_selector)


def watch_keys(ref: JobRef) -> tuple[Key, Key]:
    """Keys by which to subscribe to the job and to its pods."""
    label, _, value = ref.pod_selector.partition("=")
    return by_uid(ref.uid) if ref.uid else by_name(ref.name), by_label(label, value)


class JobView:
    """What two running watches show of a job and its pods. See `job_view`."""

    def __init__(
        self,
        ref: JobRef,
        informers: tuple[SharedInformer, ...],
        subscriptions: tuple[Subscription, ...],
        news: Wakeup,
    ) -> None:
        self._ref = ref
        self._informers = informers
        self._jobs, self._pods = subscriptions
        self._news = news
        self._deleted: set[str] = set()  # uids of objects that are proven to be gone
        self._unproven = False  # whether an object vanished without such a proof
        self._pods_alone = kind_of(ref.kind).pods_outlive_job  # whether the events of the job prove nothing
        #: whether the job and pods of it were known at first
        self.is_complete = self.job is not None and bool(self.pods)

    @property
    def job(self) -> Object | None:
        """The job as the watch has it. None: the watch doesn't have it."""
        return self._jobs.objects.get(self._ref.uid)

    @property
    def pods(self) -> list[Object]:
        """The job's pods that the watch has, ended ones included."""
        return [pod for pod in self._pods.objects.values() if belongs(pod, self._ref, {})]

    @property
    def shows_owners(self) -> bool:
        """Whether each known pod shows to which job it belongs, without a request."""
        return all(shown_owner(pod, self._ref) is not None for pod in self._pods.objects.values())

    @property
    def is_deleted(self) -> bool:
        """Whether the job is proven to be gone, and the watch of the pods has none left.

        Only the latter if the job is deleted in the background.
        """
        return (self._pods_alone or self._ref.uid in self._deleted) and not self.pods

    @property
    def is_idle(self) -> bool:
        """Whether all known pods have ended or are gone."""
        return all(has_ended(pod) and not is_terminating(pod) for pod in self.pods)

    @property
    def has_final_pods(self) -> bool:
        """Whether no pod of the ended job can be left that the watch of the pods hasn't shown yet.

        In the pass in which an operator observes the job's end, it may still replace a pod that has failed or is gone.
        It doesn't replace one that has succeeded: training-operator creates a pod only for an index that has none
        (`ReconcilePods` in its source), as mpi-operator does, and a batch Job only for one that hasn't succeeded.
        """
        kind, job = kind_of(self._ref.kind), self.job
        if job is None:
            return False
        succeeded = {
            kind.pod_role(pod["metadata"].get("labels") or {})
            for pod in self.pods
            if (pod.get("status") or {}).get("phase") == "Succeeded"
        }
        replicas = {(role, index) for role in kind.replicas(job) for index in range(kind.count(job, role))}
        return set() < replicas <= succeeded

    @property
    def _is_being_cleaned(self) -> bool:
        """Whether all known pods have ended or are being deleted."""
        return all(has_ended(pod) or is_terminating(pod) for pod in self.pods)

    async def is_left_to_operator(self, job: Object) -> bool:
        """Whether nothing must be deleted: all known pods of an ended job have ended, or the operator deletes them.

        False if no pod that ran the program has ended: such a pod shows that the watch of the pods has reached the end
        of the job.

        :param job: the job, which has ended.
        """
        if not any(has_ended(pod) and self._runs_program(pod) for pod in self.pods):
            return False
        if not self._is_being_cleaned and kind_of(self._ref.kind).cleans_up_pods(job):
            await self.wait(lambda view: view._is_being_cleaned, time.monotonic() + CLEANUP_SECONDS)
        return self._is_being_cleaned

    def _runs_program(self, pod: Object) -> bool:
        kind = kind_of(self._ref.kind)
        return kind.runs_program(kind.pod_role(pod["metadata"].get("labels") or {})[0])

    async def wait(self, done: Callable[[JobView], bool], end: float) -> bool:
        """Wait until `done` is true. False: the watches can't show it, or not until `end`.

        :param done: gets this view.
        :param end: a time of `time.monotonic`.
        """
        while self._is_sound and not done(self):
            if time.monotonic() >= end:
                return False
            await self._change(end - time.monotonic())
        return self._is_sound

    @property
    def _is_sound(self) -> bool:
        deleted = (*(() if self._pods_alone else self._jobs.deleted), *self._pods.deleted)
        unproven = self._unproven or not all(map(is_terminating, deleted))
        return not unproven and all(informer.is_watching for informer in self._informers)

    async def _change(self, timeout: float) -> None:
        """Wait for a change of the job or of a pod, at most that many seconds."""
        await self._news.wait(min(timeout, 1.0))
        self._note(self._jobs, counts=not self._pods_alone)
        self._note(self._pods, counts=True)

    def _note(self, subscription: Subscription, *, counts: bool) -> None:
        try:
            events = subscription.take() or ()
        except (ApiStatusError, ApiUnavailable):
            self._unproven = True
            return
        for event in events if counts else ():
            if event.type == "DELETED" and is_terminating(event.object):
                self._deleted.add(event.object["metadata"]["uid"])
            elif event.type == "DELETED":  # it may have lost the label by which the watch selects
                self._unproven = True


@contextlib.asynccontextmanager
async def job_view(api: Api, ref: JobRef) -> AsyncIterator[JobView | None]:
    """The job as the watches of its following show it, if they still run on this Api. None: there are none.

    There is none either if a pod doesn't show to which job it belongs: a TrainJob's without our labels.
    """
    if not ref.uid:
        yield None
        return
    for shared in (False, True):
        informers = tuple(filter(None, (watched.running_informer(api) for watched in watches_of(ref, shared=shared))))
        if len(informers) == 2:
            job_key, pod_key = watch_keys(ref)
            news = Wakeup()
            async with (
                informers[0].subscribe(key=job_key, news=news) as jobs,
                informers[1].subscribe(key=pod_key, news=news) as pods,
            ):
                view = JobView(ref, informers, (jobs, pods), news)
                yield view if view.shows_owners else None
            return
    yield None


async def current_phase(api: Api, ref: JobRef) -> Phase:
    """The job's phase: as its watch shows it if that is the end of the job, else as the API server knows it.

    :raises ApiStatusError, ApiUnavailable: the request fails.
    """
    async with job_view(api, ref) as view:
        phase = phase_of(view.job) if view and view.job else Phase.PENDING
    return phase if phase.ended else phase_of(await read_job(api, ref))
