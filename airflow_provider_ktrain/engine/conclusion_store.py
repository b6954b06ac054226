"""Why a process has released a job, stored for the next process of the same try."""

from __future__ import annotations

from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.reporting.conclusion import Conclusion
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.follow.following import Noticed
from airflow_provider_ktrain.engine.host import StatusSink

CONCLUSION_PATIENCE_SECONDS = 60.0  #: How long Airflow is asked again for a stored cause.


class ConclusionStore:
    """Stores and finds the cause of a job that was released before it had ended."""

    def __init__(self, sink: StatusSink | None, log: Log) -> None:
        self.found: Cause | None = None  #: Why an earlier process of this try has released the job.
        self._sink, self._log = sink, log
        self._put: dict[str, Any] = {}  # by this process; a sink stores it for the next one, too
        self._unanswered_since: float | None = None  # when Airflow did not answer

    async def put(self, ref: JobRef, noticed: Noticed, cause: Cause) -> None:
        """Store why the job is released. GPUs come first: the wait is short."""
        event, limit = noticed.event.name.lower(), str(noticed.limit or "")
        self._put = Conclusion(ref.uid, ref.owner, ref.submission, cause, event, limit).to_dict()
        if self._sink is not None and not await self._sink.store_conclusion(self._put):
            self._log.warning(
                "The cause could not be stored in Airflow in time. If this process ends now, it may be lost."
            )

    def retract(self) -> None:
        """The job was not released after all."""
        self._put = {}
        if self._sink is not None:
            self._sink.retract()

    async def find(self, ref: JobRef) -> bool | None:
        """Find why an earlier process of this try has released this job; returns whether it is stored.

        :return: None: Airflow doesn't answer, and is to be asked again.
        """
        document = self._put if self._sink is None else await self._sink.stored_conclusion()
        if document is None:
            self._unanswered_since = self._unanswered_since or timing.now()
            return None if timing.now() - self._unanswered_since < CONCLUSION_PATIENCE_SECONDS else False
        self._unanswered_since = None
        stored = Conclusion.from_dict(document)
        ours = stored is not None and stored.belongs_to(ref)
        self.found = stored.cause if stored is not None and ours else None
        return ours
