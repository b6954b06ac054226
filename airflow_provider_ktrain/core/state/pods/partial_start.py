"""Partial start: some pods of a job hold accelerators while others have no node, so these wait for nothing.

Without a gang scheduler or a queue, this can last forever: two jobs may each hold what the other one needs. Its time
is measured by the cluster's timestamps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.state.accelerators import (
    Amounts,
    counted_units,
    described,
    is_accelerator,
    units_together,
)
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.devices import amounts_of
from airflow_provider_ktrain.core.state.pods.objects import Json
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

WARNING_SECONDS = 300.0  #: Time until the warning. It is half of the limit if that is shorter.


@dataclass(frozen=True)
class PartialStart:
    """Pods that hold accelerators, and what they wait for.

    :param since: when both began: a pod had a node and another one had none, in epoch seconds.
    :param held: accelerators of the pods that have a node.
    :param waiting: the replicas without a node, such as `Worker 3`, in order.
    :param reason: the scheduler's message about the first of them; empty if there is none.
    """

    since: float
    held: Mapping[str, int]
    holding: int
    waiting: tuple[str, ...]
    reason: str

    def describe_partial_start(self, job: str, limit: float | None) -> str:
        """Who waits for what."""
        (name, number), *kinds = self.held.items()
        gpus = "accelerators" if kinds else counted_units(number, name)
        kinds_held = f"\nThese are {described(self.held, '')}." if kinds else ""
        pods, more = counted(self.holding, "pod"), len(self.waiting) - 1
        others = f" (and {more:,} more)" if more else ""
        end = "" if limit is None else f" The job is released after {limit:.0f} s (partial_start_timeout)."
        reason = f"\n{self.reason}" if self.reason else ""
        replica = self.waiting[0]
        return (
            f"{job} holds {gpus} in {pods}, but {replica}{others} has no node.{kinds_held}{reason}\n"
            f"The {units_together(self.held)} are idle until all pods have nodes. Free nodes, or use a queue.{end}"
        )


def find_partial_start(job: Json, pods: Iterable[Json]) -> PartialStart | None:
    """The partial start of a job; None if all pods have nodes, none holds accelerators, or it can train with these.

    A pod that its queue holds back (schedulingGates) doesn't count as waiting. Nor do the pods of an elastic job that
    has its minimum of Workers.

    :param job: the job as last seen; empty if it has not been seen yet.
    """
    active = [pod for pod in pods if not objects.has_ended(pod) and not objects.is_being_deleted(pod)]
    waiting = [pod for pod in active if not objects.node_of(pod) and not (pod.get("spec") or {}).get("schedulingGates")]
    waits = [at for pod in waiting if (at := objects.created_at(pod)) is not None]
    if not waits or not job:
        return None
    kind = kind_of(job.get("kind"))
    placed = [pod for pod in active if objects.node_of(pod)]
    found = [(pod, amounts) for pod in placed if any(map(is_accelerator, amounts := amounts_of(pod)))]
    starts = [at for pod, _ in found if (at := scheduled_at(pod)) is not None]
    workers = sum(kind.role_of(pod)[0] == "Worker" for pod in placed)
    if not starts or (kind.scaling.is_elastic(job) and workers >= kind.scaling.worker_bounds(job)[0]):
        return None
    ordered = sorted(waiting, key=kind.role_of)
    return PartialStart(
        since=max(min(starts), min(waits)),
        held=sum((amounts for _, amounts in found), Amounts()),
        holding=len(found),
        waiting=tuple(kind.replica(pod) for pod in ordered),
        reason=next((text for pod in ordered if (text := str(objects.scheduling(pod).get("message") or ""))), ""),
    )


def holds_accelerators(pod: Json) -> bool:
    """Whether the pod requests accelerators as resources."""
    return any(map(is_accelerator, amounts_of(pod)))


def warning_due(since: float, limit: float | None) -> float:
    """When to warn about a partial start, in epoch seconds."""
    return since + (WARNING_SECONDS if limit is None else min(WARNING_SECONDS, limit / 2))


def scheduled_at(pod: Json) -> float | None:
    """When the pod got its node, or was created if that time is unknown, in epoch seconds."""
    return epoch_seconds(objects.scheduling(pod).get("lastTransitionTime")) or objects.created_at(pod)
