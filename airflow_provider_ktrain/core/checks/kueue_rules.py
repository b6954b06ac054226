"""Rules for jobs of a Kueue queue."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_ktrain.core.checks.job import Finding, Job, rule
from airflow_provider_ktrain.core.checks.problem import Level
from airflow_provider_ktrain.core.manifest.overlay import PRIORITY_LABEL, QUEUE_LABEL
from airflow_provider_ktrain.core.state.kueue_status import MULTIKUEUE

ERROR, WARNING = Level.ERROR, Level.WARNING


@rule("multikueue", ERROR)
def multikueue(job: Job) -> Iterator[Finding]:
    """The job runs in the cluster to which it is submitted: MultiKueue creates its pods in another one."""
    for managed_by in (job.spec["managedBy"], job.spec["runPolicy"]["managedBy"]):
        if managed_by.text == MULTIKUEUE:
            message = "MultiKueue runs the job in another cluster: its pods can't be followed or released from here"
            hint = "remove it, and set `queue_name` to a queue of this cluster"
            yield Finding(managed_by, message, MULTIKUEUE, "no managedBy", hint)


@rule("queue-priority", WARNING)
def priority_without_queue(job: Job) -> Iterator[Finding]:
    """A priority class of Kueue needs a queue."""
    labels = job.root["metadata"]["labels"]
    if labels[PRIORITY_LABEL].text and not labels[QUEUE_LABEL].text:
        message = "a priority class of Kueue has no effect on a job without a queue"
        yield Finding(labels[PRIORITY_LABEL], message, labels[PRIORITY_LABEL].text, "a queue", "set `queue_name`")
