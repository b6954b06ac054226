"""Finds settings of Airflow that can lose the result of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.checks.airflow_rules import redelivered, without_retry

if TYPE_CHECKING:
    from airflow_provider_ktrain.core.identity import JobRef
    from airflow_provider_ktrain.operators.job_parameters import JobParameters


def check(operator: JobParameters, ref: JobRef) -> None:
    """Log the settings under which Airflow may fail this try although the training succeeds.

    :param operator: of the task.
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
