"""The metrics that a task reports to Airflow at the end of a try. docs/how-to/metrics.md describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import mapping

PREFIX = "ktrain."  #: of all names
GPU_TIME = ("queued", "held", "wasted")  #: keys of the usage that are counted


class Sample(NamedTuple):
    """One value.

    :param name: without PREFIX.
    :param value: in the metric's unit.
    :param tags: beside `dag_id` and `task_id`.
    """

    name: str
    value: float
    tags: dict[str, str]


def gauges(
    usage: Mapping[str, float], metrics: Mapping[str, float], training_metrics: Mapping[str, Any]
) -> Iterator[Sample]:
    """The gauges at the end of a try.

    :param usage: of `core.state.usage`.
    :param metrics: what the followers of the job measured, by name.
    :param training_metrics: what the program reported: see `core.state.training_metrics`.
    """
    for key, value in usage.items():
        yield Sample(key if key in ("gpus", "repeated_steps") else f"gpu_seconds.{key}", value, {})
    for name, value in metrics.items():
        yield Sample(name, value, {})
    for name, found in training_metrics.items():
        for which in ("last", "best"):
            reached = mapping(found).get(which)
            if isinstance(reached, int | float):  # NaN and infinities are text
                yield Sample(f"metric.{which}", float(reached), {"metric": name})


def counts(usage: Mapping[str, float], cause: Mapping[str, Any] | None) -> Iterator[Sample]:
    """What a try that has ended adds to the counters. They are integers, which all of Airflow's backends accept.

    :param usage: of `core.state.usage`.
    :param cause: why the training failed: a `core.diagnosis.model.Cause` as a dict; None if it succeeded.
    """
    if cause is None:
        yield Sample("succeeded", 1, {})
    else:
        yield Sample("failed", 1, {"cause": str(cause.get("category") or "unknown").replace(" ", "_")})
    for key in GPU_TIME:
        if amount := round(usage.get(key, 0)):
            yield Sample(f"gpu_time.{key}", amount, {})
