"""What a process writes on a job about pods that were stopped from outside: the job may succeed nevertheless."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from airflow_provider_ktrain.core.absent import ABSENT, Absent
from airflow_provider_ktrain.core.kinds.conditions import INCOMPLETE_ANNOTATION
from airflow_provider_ktrain.core.state.pods.stopped_pods import STOPPED_PODS_ANNOTATION, annotation_of_proof
from airflow_provider_ktrain.core.state.status import Seen
from airflow_provider_ktrain.engine.api.client import Object
from airflow_provider_ktrain.engine.api.job_calls import JobRead, Log
from airflow_provider_ktrain.engine.follow.following import Following
from airflow_provider_ktrain.engine.owned_job import OwnedJob

ANNOTATE_SECONDS = 10.0  #: Time to annotate a job that goes on with a stopped pod: following waits for that.


class JobAnnotations:
    """Writes the annotations of one job."""

    def __init__(self, job: OwnedJob, log: Log) -> None:
        self._job, self._log = job, log
        self._failure_logged = False

    async def record_stopped_pod(self, following: Following) -> bool:
        """Record that a pod was stopped: only this process may have seen it. Returns whether that was written."""
        state = following.state
        job: Object | Absent = state.known_job
        try:
            async with asyncio.timeout(ANNOTATE_SECONDS):
                job, why = await self._job.annotate(job, state.stopped_pods_annotation, ANNOTATE_SECONDS)
        except TimeoutError:
            why = f"no answer within {ANNOTATE_SECONDS:.0f} s"
        if job is not ABSENT and not why:
            following.wrote(job)
            return True
        if why and job is not ABSENT and not self._failure_logged:
            self._failure_logged = True
            self._log.warning(
                f"A pod of {state.ref} was stopped, and that could not be recorded on the job.\n"
                f"If this process ends now, the next one may take an incomplete training for a success.\n{why}"
            )
        return False

    async def mark(self, following: Following, read: JobRead, seconds: float) -> tuple[JobRead, str]:
        """Write on a job that has succeeded why that is incomplete, so that no later try takes it for a success.

        If it is complete, what says so is removed, and that a result proves it is recorded: the next process may find
        neither pods nor logs.

        :return: the job as it is now, and why that failed.
        """
        why = following.state.why_incomplete
        annotations = {INCOMPLETE_ANNOTATION: why}
        if following.seen is not Seen.INCOMPLETE:
            proof = annotation_of_proof(following.state.known_job) if why else ""
            annotations = {INCOMPLETE_ANNOTATION: "", STOPPED_PODS_ANNOTATION: proof}
        job, why = await self._job.annotate(read.job, annotations, seconds)
        return replace(read, job=job), why
