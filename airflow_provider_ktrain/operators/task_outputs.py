"""What Airflow gets of an outcome: counters and gauges, XComs, and a result that it can store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_provider_ktrain import compat
from airflow_provider_ktrain.core.diagnosis.model import Category
from airflow_provider_ktrain.core.end_rules import Event
from airflow_provider_ktrain.core.formats import STATUS_XCOM, mapping
from airflow_provider_ktrain.core.logs.result import EARLIER, METRICS_UNKNOWN, UNKNOWN
from airflow_provider_ktrain.core.reporting.status_document import with_earlier
from airflow_provider_ktrain.core.reporting.task_metrics import PREFIX, counts, gauges
from airflow_provider_ktrain.core.requirements import judge
from airflow_provider_ktrain.core.text.output import with_short_first_line
from airflow_provider_ktrain.core.text.xcom_values import storable_outputs
from airflow_provider_ktrain.engine.follow.outcome import UNKNOWN_CAUSE, Outcome

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context


def count(outcome: Outcome, context: Context) -> None:
    """Add this try to the counters of Airflow's metrics, unless another try owns the job now."""
    if outcome.superseded:
        return
    ti, cause = context["ti"], None if outcome.succeeded else outcome.cause or UNKNOWN_CAUSE
    task = {"dag_id": ti.dag_id, "task_id": ti.task_id}
    for name, value, tags in counts(outcome.usage, cause):
        compat.metrics().incr(f"{PREFIX}{name}", int(value), tags=task | tags)


def push(outcome: Outcome, context: Context, *, all_xcoms: bool) -> None:
    """Push usage, metrics, and the last status for the training page, and set the gauges of Airflow's metrics.

    :param all_xcoms: False: only the status (`do_xcom_push`).
    """
    xcoms = {STATUS_XCOM: outcome.status}
    if all_xcoms:
        xcoms |= {"usage": outcome.usage, "metrics": outcome.training_metrics}
    for key, fields in xcoms.items():
        if fields:
            compat.push(context, key, fields)
    task = {"dag_id": context["ti"].dag_id, "task_id": context["ti"].task_id}
    for name, value, tags in gauges(outcome.usage, outcome.metrics, outcome.training_metrics):
        compat.metrics().gauge(f"{PREFIX}{name}", value, tags=task | tags)


def with_job_end(outcome: Outcome, context: Context, *, deleted: bool, freed: bool) -> Outcome:
    """The outcome whose status says what has become of the job. After a kill in this process, it says so already.

    :param deleted: whether the job is gone, or is deleted next.
    :param freed: whether nothing of it holds accelerators.
    """
    if not outcome.status:
        return outcome
    if outcome.status.get("cause") and (outcome.cause or {}).get("category") == Category.KILLED:
        ti = context["ti"]
        return replace(
            outcome, status=with_earlier(outcome.status, mapping(compat.own_xcom(ti, STATUS_XCOM)), ti.try_number)
        )
    return replace(outcome, status={**outcome.status, "job_deleted": deleted, "ended": freed})


def lacking(outcome: Outcome, required: Mapping[str, str]) -> tuple[Event, str] | None:
    """What a success lacks of `require`, for the rules; None if it is good enough.

    :param required: bounds as they are now, for the outcome of an older release, which doesn't know them.
    """
    bounds = required if outcome.require is None else outcome.require
    if not outcome.succeeded or outcome.superseded or not bounds:
        return None
    unmet = judge(bounds, outcome.result, outcome.training_metrics)
    not_known = UNKNOWN, EARLIER, METRICS_UNKNOWN
    if unread := [line for line in outcome.result_error.splitlines() if line.startswith(not_known)]:
        proof = "it is not proved that the training has reached what is required"
        return Event.NOT_PROVED, "; ".join((proof, *unmet, *unread))
    return (Event.UNMET, "; ".join(unmet)) if unmet else None


def with_lack(outcome: Outcome, lack: str, resolution: str) -> Outcome:
    """The outcome of a training that is not good enough, which fails its task."""
    cause = {"category": Category.UNKNOWN.value, "summary": lack, "resolution": resolution}
    return replace(outcome, unmet=lack, status={**outcome.status, "cause": cause})


def fit(outcome: Outcome, operator: BaseOperator) -> Outcome:
    """The outcome with a result that Airflow can store: a bad result doesn't fail a successful training."""
    if not outcome.succeeded:
        return outcome
    for line in outcome.result_error.splitlines():
        operator.log.warning("%s", with_short_first_line(f"The training succeeded. {line}"))
    if not operator.multiple_outputs or outcome.result is None:
        return outcome
    if not isinstance(outcome.result, dict):
        kind = type(outcome.result).__name__
        operator.log.warning("multiple_outputs: found a %s, expected a dict. Only return_value is pushed.", kind)
        operator.multiple_outputs = False
        return outcome
    result, warnings = storable_outputs(outcome.result)
    for warning in warnings:
        operator.log.warning("The training succeeded, but in its result, %s.", warning)
    return replace(outcome, result=result)
