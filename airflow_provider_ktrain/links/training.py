"""The button in Airflow's UI that leads from a task to its job, on a dashboard of the user's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperatorLink

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.kinds import kind_of

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

log = logging.getLogger(__name__)


class TrainingJobLink(BaseOperatorLink):
    """`[ktrain] job_url`, with the job's kind, plural, namespace, name and uid put into it; none where it is not set.

    Airflow asks for it when a worker is done with the task; operators push it as soon as the job exists.
    """

    name = "Training job"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The URL, or an empty string, which shows no button."""
        if not compat.job_url():
            return ""
        job = compat.xcom_of(ti_key, "job")
        return url_of(job) if job else ""


def url_of(job: Mapping[str, Any]) -> str:
    """The URL of a job (XCom `job`); empty, with a warning, where `job_url` asks for what there is not."""
    template = compat.job_url()
    try:
        return template.format_map({**job, "plural": kind_of(job["kind"]).plural})
    except (KeyError, ValueError, IndexError) as e:
        log.warning(
            "[ktrain] job_url: found %r, expected {kind} {plural} {namespace} {name} {uid} in it: %s", template, e
        )
        return ""
