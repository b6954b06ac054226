"""The GPU time of a job: requested, queued, held and wasted, from the timestamps of its pods."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime

from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.gpus import pod_gpus
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.core.text.timestamps import parse_timestamp


@dataclass(frozen=True)
class Usage:
    """GPU-seconds of one try. `requested` = `queued` + `held`; `wasted` is a part of `held`.

    :param requested: from the creation of each pod to its end, and while the job was queued. Default: 0.
    :param queued: while a queue kept the job suspended, and before its pods had a node. Default: 0.
    :param held: the part on a node, in which no one else could use the GPUs. Default: 0.
    :param wasted: the part of `held` before the first container ran (image, volumes, init containers) and after the job
        ended (Workers that still run). Default: 0.
    :param gpus: GPUs of all pods that ever had a node; recreated pods count once. Default: 0.
    """

    requested: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    wasted: float = 0.0
    gpus: int = 0

    def __str__(self) -> str:
        """For the log: `GPU time: 12.5 GPU-minutes on 4 GPUs (0.8 GPU-minutes wasted), plus 3.1 GPU-minutes queued`."""
        if not (self.requested or self.gpus):
            return "GPU time: none."
        size, unit = next((s, u) for s, u in _UNITS if self.requested >= 2 * s or s == 1)
        held, wasted, queued = (f"{value / size:.1f} GPU-{unit}" for value in (self.held, self.wasted, self.queued))
        return f"GPU time: {held} on {counted(self.gpus, 'GPU')} ({wasted} wasted), plus {queued} queued."

    def as_dict(self) -> dict[str, float]:
        """The fields for XComs and metrics, in GPU-seconds rounded to milliseconds."""
        return {f.name: round(getattr(self, f.name), 3) for f in fields(self)}


Span = tuple[datetime, datetime]
_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def usage(
    pods: Iterable[Json],
    now: datetime,
    job_ended: datetime | None = None,
    evicted: Container[str] = (),
    in_queue: Sequence[Span] = (),
) -> Usage:
    """The GPU time of a job's pods.

    :param pods: the pods, each as last seen, deleted ones included.
    :param now: the current time, until which existing pods are counted.
    :param job_ended: when the job ended. Default: None, it has not.
    :param evicted: uids of pods that a queue took from the job: all that they held is wasted. Default: none.
    :param in_queue: when the job was queued. Who counts all GPUs of the job then has counted those of evicted pods that
        still existed, too: so they are subtracted from `queued`. Default: never.
    """
    all_queued = all_held = all_wasted = 0.0
    gpus: dict[str, int] = {}
    for pod in pods:
        meta, count = objects.metadata_of(pod), pod_gpus(pod.get("spec") or {})
        created = parse_timestamp(meta.get("creationTimestamp"))
        if not count or created is None:
            continue
        end = max(created, min(now, _ended(pod) or now))
        placed = _clamped(created, _placed(pod), end)
        started = end if meta.get("uid") in evicted else _clamped(placed, _started(pod), end)
        idle_from = _clamped(started, job_ended, end)
        if placed < end or objects.node_of(pod):
            gpus[objects.name_of(pod)] = max(count, gpus.get(objects.name_of(pod), 0))
        seconds = (placed - created, end - placed, (started - placed) + (end - idle_from))
        queued, held, wasted = (count * s.total_seconds() for s in seconds)
        before = created + objects.TIMESTAMP_RESOLUTION
        twice = ((min(end, to) - since).total_seconds() for since, to in in_queue if before < since < end)
        queued -= count * sum(twice)
        all_queued, all_held, all_wasted = all_queued + queued, all_held + held, all_wasted + wasted
    return Usage(all_queued + all_held, all_queued, all_held, all_wasted, sum(gpus.values()))


def _clamped(low: datetime, at: datetime | None, high: datetime) -> datetime:
    """`at` limited to the bounds, since clocks of nodes differ; the upper bound if `at` is None."""
    return high if at is None else max(low, min(at, high))


def _placed(pod: Json) -> datetime | None:
    """When the pod was scheduled to a node; None if it has none."""
    condition = objects.scheduling(pod)
    if condition.get("status") == "True":
        return parse_timestamp(condition.get("lastTransitionTime"))
    return parse_timestamp((pod.get("status") or {}).get("startTime")) if objects.node_of(pod) else None


def _runs(pod: Json) -> Iterable[Json]:
    return (run for container in objects.main_containers(pod) for run in objects.runs_of(container))


def _started(pod: Json) -> datetime | None:
    """When the first container ran; of a restarted container only the last two runs are known."""
    return min((at for run in _runs(pod) if (at := parse_timestamp(run.get("startedAt")))), default=None)


def _ended(pod: Json) -> datetime | None:
    """When the pod released its GPUs; None while it holds them."""
    if objects.has_ended(pod):
        conditions = (pod.get("status") or {}).get("conditions") or ()
        runs = [at for run in _runs(pod) if (at := parse_timestamp(run.get("finishedAt")))]
        changes = [at for c in conditions if (at := parse_timestamp(c.get("lastTransitionTime")))]
        return max(runs or changes, default=objects.deletion_requested_at(pod))
    return parse_timestamp(objects.metadata_of(pod).get("deletionTimestamp"))
