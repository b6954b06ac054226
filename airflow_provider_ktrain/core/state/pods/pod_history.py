"""The pods of a job, those that exist and those that were deleted."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pods.interruption import (
    MAX_INTERRUPTIONS,
    Interruption,
    find_interruptions,
    noted_interruptions,
    requested_at,
)
from airflow_provider_ktrain.core.state.pods.objects import created, failures_of, has_condition, labels_of, restarts_of
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.pods.usage import Span, Usage, usage

Pod = Mapping[str, Any]
USAGE_SECONDS = ("requested", "queued", "held", "wasted")  #: the fields of `Usage` in GPU-seconds
#: Replaced pods kept for each replica. Under ExitCode, an operator may recreate a failing pod forever.
MAX_REPLACED_PODS = 20


class PodHistory:
    """The pods of a job by uid, each as last seen: operators delete pods, and a diagnosis needs them.

    For each replica the latest pods are kept. Of older ones only their restarts and their usage are kept.

    :param kind: kind of the job.
    :param handed_over: what the previous process counted, as `handover` returned it. Default: None.
    """

    def __init__(self, kind: Kind, handed_over: Mapping[str, Any] | None = None) -> None:
        self._kind = kind
        self._known: dict[str, Pod] = {}
        self.groups = PodGroups(kind)  #: the pods that exist now
        self._evicted: Collection[str] = ()  # uids of pods that a queue took from the job
        self._deleted = 0  # number of deleted pods after the last cleanup
        given = handed_over or {}
        self._interrupted = Interruption.all_of(given.get("interrupted"))
        self.stopped_version = 0  #: grows with each change of a pod that was stopped from outside
        self._requested: dict[str, float] = {}  # when the deletion of pods was requested, by uid, in epoch seconds
        self._dropped_restarts = int(given.get("restarts", 0))  # of pods that are no longer kept
        requested, queued, held, wasted = (given.get(name, 0.0) for name in USAGE_SECONDS)
        self._dropped_usage = Usage(requested, queued, held, wasted)

    def update(self, changed: Mapping[str, Pod], removed: Iterable[str], now: datetime) -> None:
        """Record changes of the pods that exist.

        :param changed: new pods, and pods that have changed, by uid.
        :param removed: uids of pods that no longer exist.
        :param now: the current time.
        """
        self._known |= changed
        for pod in changed.values():
            self.groups.put(pod)
            self._note_stop(pod)
        for uid in removed:
            self.groups.remove(uid)
        if len(self._known) - len(self.groups.pods) > max(MAX_REPLACED_PODS, self._deleted):
            self._drop_old_pods(now)
            self._deleted = len(self._known) - len(self.groups.pods)

    def mark_deleted(self, pod: Pod) -> None:
        """Record that a pod was deleted. `pod` is its last state."""
        self._known[pod["metadata"]["uid"]] = pod
        self.groups.remove(pod["metadata"]["uid"])
        self._note_stop(pod)

    def _note_stop(self, pod: Pod) -> None:
        """Keep the time at which the deletion of the pod was requested: its last state shows that less exactly."""
        if (at := requested_at(pod)) is not None:
            self._requested.setdefault(pod["metadata"]["uid"], at)
        self.stopped_version += at is not None or has_condition(pod, "DisruptionTarget")

    def interruptions(self, job: Pod) -> list[Interruption]:
        """The replicas that were stopped from outside although their end counts as success.

        :param job: as last seen.
        """
        earlier = [*self._interrupted, *noted_interruptions(job)]
        return find_interruptions(self._kind, job, self.all, self._requested, earlier)

    def mark_evicted(self) -> None:
        """Record that a queue has taken the job's quota: the pods that exist now are lost with their work."""
        self._evicted = {*self._evicted, *self.groups.pods}

    @property
    def any(self) -> bool:
        """Whether there is or was a pod."""
        return bool(self._known)

    @property
    def all(self) -> list[Pod]:
        """All pods, deleted ones included."""
        return list(self._known.values())

    @property
    def uids(self) -> list[str]:
        """The uids of all pods, those of existing pods first."""
        return sorted(self._known, key=lambda uid: uid not in self.groups.pods)

    @property
    def live(self) -> list[Pod]:
        """The pods that exist now."""
        return list(self.groups.pods.values())

    @property
    def restarts(self) -> int:
        """Restarts of containers, plus pods that were recreated after a failure."""
        return self._dropped_restarts + self._count(self.all)

    def usage(
        self, now: datetime, job_ended: datetime | None, in_queue: float = 0.0, spans: Sequence[Span] = ()
    ) -> Usage:
        """GPU time of all pods: see `usage.usage`.

        :param in_queue: GPU-seconds in which the job was suspended by a queue. Default: 0.
        :param spans: when it was. Default: never.
        """
        spent = _plus(usage(self.all, now, job_ended, self._evicted, spans), self._dropped_usage)
        more = max(in_queue, -spent.queued)  # the spans are by another clock
        return replace(spent, requested=spent.requested + more, queued=spent.queued + more)

    def frozen(self) -> PodHistory:
        """A copy for another thread, in which `all` and `usage` don't change."""
        frozen = copy.copy(self)
        frozen._known = dict(self._known)
        return frozen

    def handover(self, job: Pod, now: datetime, spans: Sequence[Span] = ()) -> dict[str, Any]:
        """For the next process: restarts, GPU-seconds and interruptions that the pods that exist don't show.

        :param job: as last seen.
        :param spans: when the job was suspended by a queue. Default: never.
        """
        deleted = [pod for uid, pod in self._known.items() if uid not in self.groups.pods]
        spent = _plus(self._dropped_usage, usage(deleted, now, None, self._evicted, spans)).as_dict()
        seconds = {name: spent[name] for name in USAGE_SECONDS}
        interrupted = [asdict(one) for one in self.interruptions(job)[:MAX_INTERRUPTIONS]]
        restarts = float(self.restarts - self._count(self.live))
        return {"restarts": restarts, **seconds, **({"interrupted": interrupted} if interrupted else {})}

    def _count(self, pods: list[Pod]) -> int:
        replaced = itertools.chain.from_iterable(self._replaced(pods))
        return sum(sum(restarts_of(pod)) for pod in pods) + sum(map(_failed, replaced))

    def _drop_old_pods(self, now: datetime) -> None:
        for replaced in self._replaced(self.all):
            deleted = [pod for pod in replaced if pod["metadata"]["uid"] not in self.groups.pods]
            for pod in deleted[:-MAX_REPLACED_PODS]:
                del self._known[pod["metadata"]["uid"]]
                self._requested.pop(pod["metadata"]["uid"], None)
                self._dropped_restarts += sum(restarts_of(pod)) + _failed(pod)
                self._dropped_usage = _plus(self._dropped_usage, usage([pod], now, evicted=self._evicted))

    def _replaced(self, pods: list[Pod]) -> list[list[Pod]]:
        """For each replica its pods that were replaced by another one, oldest first."""
        of_replica: dict[str, list[Pod]] = {}
        for pod in sorted(pods, key=created):
            of_replica.setdefault(self._replica(pod), []).append(pod)
        return [of_one[:-1] for of_one in of_replica.values()]

    def _replica(self, pod: Pod) -> str:
        """Role and index, or the name for pods of other roles."""
        role, index = self._kind.pod_role(labels_of(pod))
        return f"{role} {index}" if self._kind.has_role(role) else str(pod["metadata"]["name"])


def _failed(pod: Pod) -> bool:
    """Whether the pod failed, and not because it was deleted."""
    return (pod.get("status") or {}).get("phase") == "Failed" and bool(failures_of(pod))


def _plus(one: Usage, other: Usage) -> Usage:
    """The sum of the GPU-seconds; the number of GPUs is the first one's."""
    sums = {name: getattr(one, name) + getattr(other, name) for name in USAGE_SECONDS}
    return replace(one, **sums)
