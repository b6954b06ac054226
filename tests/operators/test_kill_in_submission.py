"""A kill while the job is submitted, if the submission fails at the same time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from airflow_provider_ktrain.core.errors import ClusterError
from airflow_provider_ktrain.core.identity import JobRef, OnFinishAction
from airflow_provider_ktrain.engine.submit import EndJob, Posting, Submitted
from airflow_provider_ktrain.exceptions import TrainingKilledError
from airflow_provider_ktrain.hooks.training import TrainingHook
from airflow_provider_ktrain.worker_host import Try, WorkerHost


class NoClusterHook(TrainingHook):
    """Gives no client: nothing in this test sends a request."""

    @contextlib.asynccontextmanager
    async def api(self, ref: JobRef | None = None) -> AsyncIterator[Any]:
        yield None


class FailingSubmission:
    """Is killed, and fails at the same time. `searched` is set when the job is looked for afterwards."""

    host: WorkerHost
    searched = False

    async def carry_out(self, api: Any, log: Any, *, posting: Posting, end_job: EndJob) -> Submitted:
        self.host.kill("the task received SIGTERM")
        raise ClusterError("the API server can't create the job now")

    @property
    def delete_command(self) -> str:
        return "kubectl delete"

    async def find(self, api: Any) -> Submitted | None:
        self.searched = True
        return None


def test_error_of_a_killed_submission_does_not_keep_the_job() -> None:
    """The request may have created the job although the submission failed, and after a kill no retry adopts it."""
    submission = FailingSubmission()
    host = WorkerHost(NoClusterHook(), logging.getLogger(__name__), Try(retry_left=True, ask_state=lambda: "none"))
    submission.host = host
    host.expect(submission, OnFinishAction.DELETE_JOB)
    with pytest.raises(TrainingKilledError, match="was killed before it had submitted a job"), host:
        host.submit(submission)
    assert submission.searched
