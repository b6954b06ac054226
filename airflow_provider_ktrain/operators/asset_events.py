"""Adds what a training returned to the events of its task's outlets: assets and aliases of assets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from airflow.sdk import Asset, AssetAlias

from airflow_provider_ktrain.core.reporting import asset_events
from airflow_provider_ktrain.core.text.output import clipped
from airflow_provider_ktrain.core.text.xcom_values import transportable
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.operators import task_store

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_provider_ktrain.engine.follow.outcome import Outcome

MAX_REASON_CHARS = 100  #: Length of the reason in the first line of a warning.


def add_training(context: Context, outlets: Iterable[Any], outcome: Outcome, log: Log) -> None:
    """Set the extra of each outlet's event, and resolve each alias to the asset of the result's `model_uri`.

    Without a valid `model_uri`, an alias gets no event.
    Airflow sends the events when the task has succeeded. Nothing here fails the task.

    :param outlets: of the task. What is neither an asset, a reference to one nor an alias is ignored.
    """
    model, why_none = _model_asset(outcome.result)
    extra = transportable(_extra(context, outcome, "" if model is None else model.uri, log), "extra")
    if left_out := extra.get(asset_events.LEFT_OUT):
        limit = asset_events.MAX_EXTRA_BYTES // 1024
        log.warning(f"The asset events do not contain {', '.join(left_out)}: their extra has at most {limit} KiB.")
    for outlet in outlets:
        try:
            if not isinstance(outlet, AssetAlias):
                with contextlib.suppress(TypeError):  # neither an asset nor a reference to one
                    context["outlet_events"][outlet].extra.update(extra)
            elif model is not None:
                context["outlet_events"][outlet].add(model, extra=extra)
                log.info(f"Outlet {outlet.name} gets an event of the asset {model.uri}.")
            else:
                reason = clipped(why_none, MAX_REASON_CHARS)
                log.warning(
                    f"Outlet {outlet.name} gets no asset event: {reason}. The training succeeded.\n"
                    'Print KTRAIN_RESULT {"model_uri": "s3://bucket/model"}, or return such an object from the '
                    "function."
                )
        except Exception as e:  # must not fail a training that succeeded
            log.warning(f"The event of an outlet does not contain the training's result.\n{outlet}: {e}")


def _extra(context: Context, outcome: Outcome, model_uri: str, log: Log) -> dict[str, Any]:
    """The extra of all events: the same in each try that returns this outcome."""
    described: dict[str, Any] = {}
    try:
        described = task_store.read_job_description(context)
    except Exception as e:  # the result matters more
        log.warning(f"The asset events do not name the job: it could not be read from the task store.\n{e}")
    fields = {
        **described,
        asset_events.MODEL_URI: model_uri,
        "usage": outcome.usage,
        "metrics": outcome.training_metrics,
        "result": outcome.result,
    }
    return asset_events.event_extra(fields)


def _model_asset(result: Any) -> tuple[Asset | None, str]:
    """The asset of the model that the result names, or why there is none."""
    try:
        uri = asset_events.model_uri(result)
    except ValueError as e:
        return None, str(e)
    try:
        return Asset(uri=uri), ""
    except ValueError as e:
        return None, f"Airflow rejects {asset_events.MODEL_URI}: {e}"
