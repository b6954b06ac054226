"""What a job cost: GPU-seconds requested, queued, held and wasted, from the times that its pods tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.diagnosis.pod_failures import deletion_of, moment
from airflow_provider_ktrain.core.manifest.resources import is_gpu, pod_amount

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Usage:
    """GPU-seconds of one try. `requested` = `queued` + `held`; `wasted` is a part of `held`.

    :param requested: from the creation of each pod to its end.
    :param queued: of these, before the pod had a node. Time in a queue that keeps a job suspended has no pods: it is
        not counted here.
    :param held: of these, on a node: what nobody else could use.
    :param wasted: of these, before the training's first container ran (image, volumes, init containers) and after the
        job had ended (Workers that linger).
    :param gpus: the GPUs of all pods that were ever on a node, recreated ones counted once for each name.
    """

    requested: float = 0.0
    queued: float = 0.0
    held: float = 0.0
    wasted: float = 0.0
    gpus: int = 0

    def __str__(self) -> str:
        """One line: `GPUs: 4; 12.5 GPU-minutes held, of these 0.8 wasted; 3.1 queued`."""
        if not (self.requested or self.gpus):
            return "GPUs: none used"
        size, unit = next((s, u) for s, u in _UNITS if self.requested >= 2 * s or s == 1)
        held, wasted, queued = (f"{value / size:.1f}" for value in (self.held, self.wasted, self.queued))
        return f"GPUs: {self.gpus}; {held} GPU-{unit} held, of these {wasted} wasted; {queued} queued"

    def as_dict(self) -> dict[str, float]:
        """For XCom and metrics: each figure under its name, GPU-seconds rounded to milliseconds."""
        return {f.name: round(getattr(self, f.name), 3) for f in fields(self)}


_UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def usage(
    pods: Iterable[Json], now: datetime, gpu_resource: str | None = None, job_ended: datetime | None = None
) -> Usage:
    """:param pods: as each was last seen, also those that are gone.
    :param now: until when pods that still are are counted.
    :param gpu_resource: the resource to count (`nvidia.com/gpu`); every kind of GPU by default.
    :param job_ended: when the job ended, if it has.
    """
    total = Usage()
    gpus: dict[str, int] = {}
    for pod in pods:
        spec, meta = pod.get("spec") or {}, pod.get("metadata") or {}
        count = pod_amount(spec, lambda name: name == gpu_resource if gpu_resource else is_gpu(name))
        created = moment(meta.get("creationTimestamp"))
        if not count or created is None:
            continue
        end = max(created, min(now, _ended(pod) or now))
        placed = _between(created, _placed(pod), end)
        started = _between(placed, _started(pod), end)
        useless_from = _between(started, job_ended, end)
        if placed < end or spec.get("nodeName"):
            name = str(meta.get("name"))
            gpus[name] = max(count, gpus.get(name, 0))
        seconds = (placed - created, end - placed, (started - placed) + (end - useless_from))
        queued, held, wasted = (count * s.total_seconds() for s in seconds)
        total = Usage(
            total.requested + queued + held, total.queued + queued, total.held + held, total.wasted + wasted, 0
        )
    return Usage(total.requested, total.queued, total.held, total.wasted, sum(gpus.values()))


def _between(low: datetime, at: datetime | None, high: datetime) -> datetime:
    """A time within bounds (clocks of nodes differ); the upper bound where it never came."""
    return high if at is None else max(low, min(at, high))


def _placed(pod: Json) -> datetime | None:
    """When the pod got its node."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            return moment(condition.get("lastTransitionTime"))
    on_node = (pod.get("spec") or {}).get("nodeName")
    return moment((pod.get("status") or {}).get("startTime")) if on_node else None


def _runs(pod: Json) -> Iterable[Json]:
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        for state in (container.get("lastState") or {}, container.get("state") or {}):
            yield from (run for key in ("terminated", "running") if (run := state.get(key)))


def _started(pod: Json) -> datetime | None:
    """When the first container ran; of a restarted one only the last two runs are known."""
    return min((at for run in _runs(pod) if (at := moment(run.get("startedAt")))), default=None)


def _ended(pod: Json) -> datetime | None:
    """When the pod let go of its GPUs, or None while it holds them."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        runs = [at for run in _runs(pod) if (at := moment(run.get("finishedAt")))]
        changes = [at for c in status.get("conditions") or () if (at := moment(c.get("lastTransitionTime")))]
        return max(runs or changes, default=deletion_of(pod))
    return moment((pod.get("metadata") or {}).get("deletionTimestamp"))
