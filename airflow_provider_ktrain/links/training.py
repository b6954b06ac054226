"""The buttons of a task in Airflow's UI: the training page, and the job in the user's dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from airflow.sdk import BaseOperatorLink

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.identity.names import TaskInstanceId
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.text.output import masked_log

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

log = masked_log(__name__)
PREFIX = "/ktrain"  #: Path below which the API server mounts the plugin.
PAGE_PATH = f"{PREFIX}/training"
#: Airflow fills in the placeholders, except for MAP_INDEX of a task that isn't mapped.
TASK_QUERY = "dag_id={DAG_ID}&run_id={RUN_ID}&task_id={TASK_ID}&map_index={MAP_INDEX}"


class TrainingPageLink(BaseOperatorLink):
    """The page about this training: phases, replicas, metrics, GPU time and the cause of a failure.

    The link is relative, so that Airflow opens it in the same tab.
    """

    name = "Training"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """The path of the page."""
        return page_url(TaskInstanceId.of(ti_key))


def page_url(key: TaskInstanceId) -> str:
    """The path of the page about a task instance."""
    return f"{compat.base_path()}{PAGE_PATH}?{page_query(key)}"


def page_query(key: TaskInstanceId) -> str:
    """The query of requests about a task instance."""
    return urlencode(asdict(key))


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
