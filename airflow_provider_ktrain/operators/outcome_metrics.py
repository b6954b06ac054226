"""What Airflow's metrics and XComs get when a training has ended, beside its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.formats import STATUS_XCOM
from airflow_provider_ktrain.core.task_metrics import PREFIX, counts, gauges
from airflow_provider_ktrain.engine.follow.outcome import UNKNOWN_CAUSE, Outcome

if TYPE_CHECKING:
    from airflow.sdk import Context


def count(context: Context, outcome: Outcome) -> None:
    """Add this try to the counters of Airflow's metrics, unless another try owns the job now.

    :param context: Airflow's context of the task.
    :param outcome: of the training, in this try: the result of an earlier try doesn't count again.
    """
    if outcome.superseded:
        return
    ti = context["ti"]
    for name, value, tags in counts(outcome.usage, None if outcome.succeeded else outcome.cause or UNKNOWN_CAUSE):
        compat.count(f"{PREFIX}{name}", int(value), dag_id=ti.dag_id, task_id=ti.task_id, **tags)


def push(context: Context, outcome: Outcome, *, xcoms: bool) -> None:
    """Set the gauges of Airflow's metrics, and push usage, metrics, and the last status for the training page.

    :param context: Airflow's context of the task.
    :param outcome: of the training.
    :param xcoms: whether usage and metrics are pushed (`do_xcom_push`).
    """
    ti = context["ti"]
    if outcome.usage and xcoms:
        compat.push(context, "usage", outcome.usage)
    for name, value, tags in gauges(outcome.usage, outcome.metrics, outcome.training_metrics):
        compat.gauge(f"{PREFIX}{name}", value, dag_id=ti.dag_id, task_id=ti.task_id, **tags)
    if outcome.training_metrics and xcoms:
        compat.push(context, "metrics", outcome.training_metrics)
    if outcome.status:
        compat.push(context, STATUS_XCOM, outcome.status)
