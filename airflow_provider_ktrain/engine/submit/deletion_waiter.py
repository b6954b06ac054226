"""Wait for the pods of the previous job to stop, and explain what keeps them.

A name is free only when the job that has it is gone, and a foreground deletion waits for the job's pods, each of which
has its grace period. A background deletion frees the name before the pods are gone (recording 58), so this module waits
for the pods. A suspended job is resumed only when its operator has ended its pods, because operators count a pod that
is being deleted as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.errors import ClusterError
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.pods.objects import grace_of, has_ended, is_being_deleted
from airflow_provider_ktrain.core.state.status import wants_suspension
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths, kueue
from airflow_provider_ktrain.engine.api.client import Api, Object, get
from airflow_provider_ktrain.engine.api.job_calls import Log, job_pods, list_pods, read_job, read_training
from airflow_provider_ktrain.engine.api.request_errors import retry_transient

T = TypeVar("T")
#: Time after the end of a pod's grace period from which messages suspect its node.
NODE_SUSPECTED_AFTER_SECONDS = 30.0


class DeletionWaiter:
    """Waits for a job that is being deleted, or for the pods of a job that is being suspended.

    :param timeout: total time to wait, in seconds. After each tenth of it, what is still there is logged.
    :param patience: how long to repeat each request to an unreachable or overloaded API server, in seconds.
    """

    def __init__(self, timeout: float, log: Log, *, patience: float) -> None:
        self._timeout, self._log, self._patience = timeout, log, patience
        self._began_at: float | None = None  # a lost connection in between doesn't restart the timeout
        self._reported_at: float | None = None

    async def wait_for_job(self, api: Api, ref: JobRef) -> None:
        """Wait until the job is gone. At the timeout, raise a ClusterError that names what keeps it and what to do."""
        while (job := await self._ask(lambda: read_job(api, ref))) is not ABSENT:
            if self._report_is_due():
                pods = await self._ask(lambda: job_pods(api, ref))
                self._report(ref, "being deleted", pods, job)
            await asyncio.sleep(0.5)

    async def wait_for_pods(self, api: Api, ref: JobRef) -> None:
        """Wait until a suspension has ended the job's pods. At the timeout, raise a ClusterError that names them."""
        while pods := await self._ask(lambda: pods_before_resumption(api, ref)):
            if self._report_is_due():
                self._report(ref, "being suspended", pods)
            await asyncio.sleep(0.5)

    async def wait_for_earlier_pods(self, api: Api, ref: JobRef) -> bool:
        """Wait until no pod has the label with the name of the job that is to be created. Any job may have created it.

        :param ref: the job that is to be created; it has no uid.
        :return: False if a job has this name now.
        """
        while pods := await self._ask(lambda: list_pods(api, ref.namespace, ref.pod_selector)):
            if await self._ask(lambda: get(api, api_paths.job(ref))) is not ABSENT:
                return False
            if self._report_is_due():
                self._report(ref, "waiting for pods of an earlier job of this name", pods)
            await asyncio.sleep(0.5)
        return True

    async def _ask(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await retry_transient(ask, timing.now() + self._patience, warn=self._log.warning)

    def _report_is_due(self) -> bool:
        """Whether to log the progress, or to give up."""
        now = timing.now()
        self._began_at = self._began_at or now
        self._reported_at = self._reported_at or now
        return now - self._reported_at >= self._timeout / 10 or now - self._began_at >= self._timeout

    def _report(self, ref: JobRef, what: str, pods: Sequence[Object], job: Object | None = None) -> None:
        """Log what the deletion or suspension waits for. At the timeout, raise a ClusterError."""
        held = "; ".join(map(_describe_terminating, pods)) or _describe_finalizers(job or {})
        self._reported_at = timing.now()
        seconds = self._reported_at - (self._began_at or self._reported_at)
        if seconds >= self._timeout:
            raise ClusterError(_stuck(ref, what, seconds, held, pods))
        self._log.info(f"{ref} is still {what} after {seconds:.0f} s.\nWaiting for {held}")


async def pods_before_resumption(api: Api, ref: JobRef) -> list[Object]:
    """The pods because of which a suspended job can't be resumed yet.

    Operators count a pod of a resumed job that is being deleted as failed: training-operator 1.9 in
    `UpdateJobReplicaStatuses`. One that has not noticed the suspension yet still deletes those that run.
    """
    read = await read_training(api, ref)
    ending = [pod for pod in read.pods if is_being_deleted(pod)]
    running = [pod for pod in read.pods if not (is_being_deleted(pod) or has_ended(pod))]
    if read.job is ABSENT or not running:
        return ending
    is_suspended = wants_suspension(read.job)
    if not is_suspended and kueue.queue_of(read.job):  # Kueue suspends a job whose Workload is deactivated
        workload = await kueue.find_workload(api, ref) or {}
        is_suspended = (workload.get("spec") or {}).get("active") is False
    return ending + running * is_suspended


def _stuck(ref: JobRef, what: str, seconds: float, held: str, pods: Sequence[Object]) -> str:
    names = " ".join(p["metadata"]["name"] for p in pods)
    if pods and ref.uid and not any(map(is_being_deleted, pods)):
        remedy = "Its operator does not end them: check that it runs"
    elif pods and not any(map(is_being_deleted, pods)):
        remedy = "Nobody deletes them: find out what owns them and delete that, or set another `name` for the task"
    elif pods:
        remedy = (
            "If the node of a pod is lost for good, and only then, run: kubectl delete pod -n "
            f"{ref.namespace} {names} --force --grace-period=0"
        )
    else:
        remedy = f"See: kubectl get -n {ref.namespace} {kind_of(ref.kind).plural} {ref.name} -o yaml"
    return f"{ref} is still {what} after {seconds:.0f} s; gave up waiting.\nIt waits for {held}.\n{remedy}"


def _describe_terminating(pod: Mapping[str, Any]) -> str:
    """Why a pod is still there, as far as the pod shows: we have no right to read its node."""
    meta, spec = pod["metadata"], pod.get("spec") or {}
    due = parse_timestamp(meta.get("deletionTimestamp"))  # includes the grace period
    grace = meta.get("deletionGracePeriodSeconds", grace_of(pod))
    if due is None:
        why = "not being deleted yet"
    elif (timing.utc_now() - due).total_seconds() > NODE_SUSPECTED_AFTER_SECONDS:
        why = f"its grace period ended at {due:%H:%M:%S} UTC: check that its node is ready"
    else:
        why = f"has until {due:%H:%M:%S} UTC: its grace period is {grace:g} s"
    return f"pod {meta['name']} on {spec.get('nodeName') or 'no node'} ({why})"


def _describe_finalizers(job: Mapping[str, Any]) -> str:
    names = ", ".join((job.get("metadata") or {}).get("finalizers") or ())
    return f"its finalizers: {names}" if names else "an unknown reason: it has no pods and no finalizers"
