"""The metrics that a task reports to Airflow: names, types, units, tags, and their values at the end of a try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.state.status import Phase

PREFIX = "ktrain."  #: of all names
TASK_TAGS = ("dag_id", "task_id")  #: of all metrics
GPU_TIME = ("queued", "held", "wasted")  #: keys of the usage that are counted


@dataclass(frozen=True)
class Metric:
    """One row of the documentation: metrics that differ only in what they measure.

    :param names: without PREFIX.
    :param type: `gauge`, of the last try that ended, or `counter`, of all tries.
    :param unit: of the value.
    :param meaning: one sentence.
    :param tags: in addition to TASK_TAGS. Default: none.
    """

    names: tuple[str, ...]
    type: str
    unit: str
    meaning: str
    tags: tuple[str, ...] = ()


METRICS = (
    Metric(("succeeded",), "counter", "tries", "tries whose training succeeded"),
    Metric(("failed",), "counter", "tries", "tries whose training failed, by the category of the cause", ("cause",)),
    Metric(
        tuple(f"gpu_time.{key}" for key in GPU_TIME), "counter", "GPU-seconds",
        "GPU time of all tries, rounded for each try; `wasted` is a part of `held`",
    ),
    Metric(
        ("gpu_seconds.requested", *(f"gpu_seconds.{key}" for key in GPU_TIME)), "gauge", "GPU-seconds",
        "GPU time of the try, as in the XCom `usage`",
    ),
    Metric(
        ("gpu_seconds.repeated",), "gauge", "GPU-seconds",
        "GPU time of steps that an earlier try had reached; reported only if known",
    ),
    Metric(("repeated_steps",), "gauge", "steps", "steps that an earlier try had reached; reported only if known"),
    Metric(("gpus",), "gauge", "GPUs", "GPUs of all pods that were ever on a node"),
    Metric(("seconds.submit",), "gauge", "seconds", "time to create or adopt the job"),
    Metric(
        tuple(f"seconds.{phase.lower()}" for phase in Phase), "gauge", "seconds",
        "time in each phase in which the task saw the job; after the job's end, while its logs were read",
    ),
    Metric(("seconds.release",), "gauge", "seconds", "time from the release request until the pods were gone"),
    Metric(
        ("metric.last", "metric.best"), "gauge", "the program's",
        "what the program [reports](training-page.md#report-metrics)", ("metric",),
    ),
    Metric(("log.lines",), "gauge", "lines", "log lines of all replicas"),
    Metric(("log.bytes",), "gauge", "bytes", "size of the log lines of all replicas"),
    Metric(
        ("watch.requests",), "gauge", "requests",
        "watch requests on the connection while the job was followed. One is normal; more are reconnects. Tasks in a "
        "triggerer share watches",
    ),
    Metric(
        ("queue.evictions", "queue.preemptions"), "gauge", "times",
        "how often Kueue took the job's quota away; reported only if it did",
    ),
)  # fmt: skip


class Sample(NamedTuple):
    """One value.

    :param name: without PREFIX.
    :param value: in the metric's unit.
    :param tags: in addition to TASK_TAGS.
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
