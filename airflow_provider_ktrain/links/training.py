"""The button in Airflow's UI that opens a task's job in the user's dashboard."""

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
    """`[ktrain] job_url`, formatted with the job's kind, plural, namespace, name and uid. No button if it is not set.

    Airflow stores the link when a worker finishes the task; the operators already push it when the job exists.
    """

    name = "Training job"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The URL; an empty string shows no button."""
        if not compat.job_url():
            return ""
        job = compat.xcom_of(ti_key, "job")
        return url_of(job) if job else ""


def url_of(job: Mapping[str, Any]) -> str:
    """The URL of a job (XCom `job`); empty, with a warning, if `job_url` has an unknown placeholder."""
    template = compat.job_url()
    try:
        return template.format_map({**job, "plural": kind_of(job["kind"]).plural})
    except (KeyError, ValueError, IndexError) as e:
        log.warning(
            "Correct [ktrain] job_url. Its placeholders are {kind} {plural} {namespace} {name} {uid}.\nFound %r: %s",
            template,
            e,
        )
        return ""
