"""The metrics that a task reports to Airflow at the end of a try. docs/how-to/metrics.md describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import mapping

PREFIX = "ktrain."  #: Prefix of all names.
GPU_TIME = ("queued", "held", "wasted")  #: Keys of the usage that are counted.


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
    usage: Mapping[str, Any], metrics: Mapping[str, float], training_metrics: Mapping[str, Any]
) -> Iterator[Sample]:
    """The gauges at the end of a try.

    :param metrics: what the followers of the job measured, by name.
    :param training_metrics: what the program reported: see `core.state.steps.training_metrics`.
    """
    for numbers, tags in _by_resource(usage):
        for key, value in numbers.items():
            if key == "repeated_steps":
                yield Sample(key, value, {})
            else:
                yield Sample(key if key == "gpus" else f"gpu_seconds.{key}", value, tags)
    for name, value in metrics.items():
        yield Sample(name, value, {})
    for name, found in training_metrics.items():
        for which in ("last", "best"):
            reached = mapping(found).get(which)
            if isinstance(reached, int | float):  # NaN and infinities are text
                yield Sample(f"metric.{which}", float(reached), {"metric": name})


def counts(usage: Mapping[str, Any], cause: Mapping[str, Any] | None) -> Iterator[Sample]:
    """What a try that has ended adds to the counters. They are integers, which all of Airflow's backends accept.

    :param cause: why the training failed: a `core.diagnosis.model.Cause` as a dict; None if it succeeded.
    """
    if cause is None:
        yield Sample("succeeded", 1, {})
    else:
        yield Sample("failed", 1, {"cause": str(cause.get("category") or "unknown").replace(" ", "_")})
    for numbers, tags in _by_resource(usage):
        for key in GPU_TIME:
            if amount := round(numbers.get(key, 0)):
                yield Sample(f"gpu_time.{key}", amount, tags)


def _by_resource(usage: Mapping[str, Any]) -> Iterator[tuple[dict[str, float], dict[str, str]]]:
    """The numbers of a usage and their tags, of each kind of accelerators."""
    for resource, used in [(usage.get("resource"), usage), *mapping(usage.get("others")).items()]:
        numbers = {key: value for key, value in mapping(used).items() if isinstance(value, int | float)}
        for key in ("unknown_claims", "at_least"):
            numbers.pop(key, None)
        yield numbers, {"resource": str(resource)} if resource else {}
