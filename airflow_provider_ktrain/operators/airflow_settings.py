"""Finds settings of Airflow under which it fails a try whose training goes on or has succeeded.

The causes are in Airflow itself (docs/where-it-runs.md), so that a task can only warn of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from airflow_provider_ktrain import compat

if TYPE_CHECKING:
    from airflow_provider_ktrain.core.identity.names import JobRef
    from airflow_provider_ktrain.operators.job_parameters import JobParameters


def check(operator: JobParameters, ref: JobRef) -> None:
    """Log the settings under which Airflow may fail this try although the training succeeds.

    :param ref: its job. On a cluster of this machine, which is rarely in production, the line has level INFO.
    """
    log, limit = operator.log, operator.execution_timeout
    try:
        again = None if operator.deferrable else compat.redelivery_seconds(operator.executor)
    except Exception as e:  # must not fail the task
        log.warning("The settings of the executor can't be read.\n%s", e)
        again = None
    found = (without_retry(operator.retries or 0), redelivered(limit.total_seconds() if limit else None, again))
    if text := "\n".join(filter(None, found)):
        write = log.info if urlsplit(ref.cluster).hostname in compat.LOOPBACK else log.warning
        write(text)


def without_retry(retries: int) -> str:
    """The task has no retry, which would return the result of a training that has succeeded."""
    if retries > 0:
        return ""
    return (
        "Set retries to 1 or more: Airflow may fail this try although the training succeeds, and then only a retry "
        "returns the result.\nReasons, by executor: an old message (apache/airflow#72716, #71580), a broker or pods "
        "that are not available when the task resumes, a lost worker."
    )


def redelivered(worker_seconds: float | None, redelivery_seconds: float | None) -> str:
    """A worker may run the task for longer than its message stays invisible to other workers.

    :param worker_seconds: for how many seconds a worker may run the task; None: without a limit.
    :param redelivery_seconds: time after which the message of a task that a worker still runs is delivered again; None
        if none is.
    """
    if redelivery_seconds is None or (worker_seconds is not None and worker_seconds < redelivery_seconds):
        return ""
    limit = "how long the training may run" if worker_seconds is None else "execution_timeout"
    return (
        f"Set [celery_broker_transport_options] visibility_timeout (now {redelivery_seconds:.0f} s) to more than "
        f"{limit}, or deferrable=True.\nAfter that time the broker delivers the message of a running task again, and "
        "Airflow may fail the running try."
    )
