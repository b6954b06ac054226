"""The pods of a job, those that exist and those that were deleted."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.pods.objects import created, disruption_of, failures_of, restarts_of
from airflow_provider_ktrain.core.state.pods.pod_changes import PodChanges, as_ended, is_newer, with_change
from airflow_provider_ktrain.core.state.pods.pod_groups import PodGroups
from airflow_provider_ktrain.core.state.pods.stopped_pods import (
    MAX_STOPPED_PODS,
    Ends,
    Replica,
    StoppedPod,
    annotated_stopped_pods,
    find_ends,
)
from airflow_provider_ktrain.core.state.pods.usage import NO_USAGE, Span, Usage, usage

Pod = Mapping[str, Any]
#: Replaced pods kept for each replica. Under ExitCode, an operator may recreate a failing pod forever.
MAX_REPLACED_PODS = 20


@dataclass(frozen=True)
class _Earlier:
    """What an earlier process of the same try has counted until a time.

    :param handed_over: the part of it that is counted anyway.
    :param spans: when the job was suspended by a queue.
    """

    counted: Usage
    at: datetime
    handed_over: Usage
    spans: Sequence[Span]


class PodHistory:
    """The pods of a job by uid, each as last seen: operators delete pods, and a diagnosis needs them.

    For each replica the latest pods are kept. Of older ones only their restarts and their usage are kept.
    """

    def __init__(self, kind: Kind, handed_over: Mapping[str, Any] | None = None) -> None:
        self._kind = kind
        self._known: dict[str, Pod] = {}
        self.groups = PodGroups(kind)  #: The pods that exist now.
        self._evicted: Collection[str] = ()  # uids of pods that a queue took from the job
        self._deleted = 0  # number of deleted pods after the last cleanup
        given = handed_over or {}
        self._stopped_before = StoppedPod.all_of(given.get("interrupted"))
        #: Grows with each change of a pod that was stopped from outside; 0: no process has seen one.
        self.stopped_version = len(self._stopped_before)
        self.ends_version = 0  #: Grows with each change after which the end of a pod may be unknown.
        self._changes: dict[str, PodChanges] = {}  # by uid, of pods that were requested to end, or have ended
        self._seen_deleted: set[str] = set()  # uids of pods whose changes are known up to their deletion
        self._ended_by_itself: set[Replica] = set()  # as events show of pods that nobody has seen
        self._dropped_restarts = int(given.get("restarts", 0))  # of pods that are no longer kept
        self._dropped_usage = Usage.from_dict(given)
        self._earlier: _Earlier | None = None

    def update(self, changed: Mapping[str, Pod], removed: Iterable[str], now: datetime) -> None:
        """Record changes of the pods that exist."""
        for pod in changed.values():
            self._record_change(pod)
            self.groups.put(pod)
        self._known |= changed
        for uid in removed:
            self.groups.remove(uid)
            self.ends_version += 1
        if len(self._known) - len(self.groups.pods) > max(MAX_REPLACED_PODS, self._deleted):
            self._drop_old_pods(now)
            self._deleted = len(self._known) - len(self.groups.pods)

    def mark_deleted(self, pod: Pod, *, is_seen: bool = False) -> None:
        """Record that a pod was deleted.

        :param pod: its last state; as it was seen before if it is only missing from a list.
        :param is_seen: whether it certainly is its last state. Default: False, only if it is newer than the known one.
        """
        uid = pod["metadata"]["uid"]
        if is_seen or (uid in self._known and is_newer(pod, self._known[uid])):
            self._seen_deleted.add(uid)
        self.record_earlier(pod)
        self._known[uid] = pod
        self.groups.remove(uid)
        self.ends_version += 1

    def record_earlier(self, pod: Pod) -> None:
        """Record a state of a pod of which a later one may be known."""
        self._record_change(pod)
        if pod["metadata"]["uid"] not in self.groups.pods:
            self._known[pod["metadata"]["uid"]] = pod

    def _record_change(self, pod: Pod) -> None:
        uid = pod["metadata"]["uid"]
        before = self._changes.get(uid)
        changes = with_change(before, self._known.get(uid, {}), pod)
        if changes is not None:
            self._changes[uid] = changes
            self.ends_version += changes != before
            self.stopped_version += changes.requested is not None

    def record_end(self, replica: Replica, stopped: StoppedPod | None) -> None:
        """Record how a pod ended that nobody has seen: see `stopped_pods.ends_in_events`."""
        if stopped is None:
            self._ended_by_itself.add(replica)
            return
        self._stopped_before.append(stopped)
        self.stopped_version += 1

    def ends(self, job: Pod, expected: Collection[Replica] = ()) -> Ends:
        """How the replicas ended on which the success of the job depends.

        :param expected: replicas that have had a pod. Default: those of known pods.
        """
        return find_ends(
            self._kind, job, self.all, self._changes, existing=self.groups.pods, deleted=self._seen_deleted,
            earlier=[*self._stopped_before, *annotated_stopped_pods(job)], expected=expected,
            by_itself=self._ended_by_itself,
        )  # fmt: skip

    def stopped(self, job: Pod) -> list[StoppedPod]:
        """The replicas that were stopped from outside although their end counts as success."""
        return self.ends(job).stopped

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
    def as_ended(self) -> list[Pod]:
        """All pods, without deletions that explain no end: see `pod_changes.as_ended`."""
        return [as_ended(pod, self._changes.get(uid)) for uid, pod in self._known.items()]

    @property
    def lost(self) -> list[Pod]:
        """The pods that are gone, and whose changes are not known up to their deletion."""
        return [pod for uid, pod in self._known.items() if uid not in {*self.groups.pods, *self._seen_deleted}]

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
        """Restarts of containers, plus pods that were recreated after a failure or a disruption."""
        return self._dropped_restarts + self._count(self.all)

    def usage(
        self,
        now: datetime,
        job_ended: datetime | None,
        in_queue: Mapping[str, float] = MappingProxyType({}),
        spans: Sequence[Span] = (),
    ) -> Usage:
        """Accelerator time of all pods: see `usage.usage`.

        :param in_queue: device-seconds in which the job was suspended by a queue, by what is counted. Default: none.
        :param spans: when it was. Default: never.
        """
        spent = usage(self.all, now, job_ended, self._evicted, spans) + self._dropped_usage
        spent = spent.with_gone(self._gone())
        # the spans are by another clock
        more = {n: max(in_queue.get(n, 0.0), -one.queued) for n, one in spent.each.items()}
        return spent + Usage.of_each({n: Usage(requested=s, queued=s) for n, s in {**in_queue, **more}.items()})

    def count_earlier(
        self,
        counted: Usage,
        at: datetime,
        in_queue: Mapping[str, float] = MappingProxyType({}),
        spans: Sequence[Span] = (),
    ) -> None:
        """Count what pods had used that are gone: an earlier process has counted all until `at`.

        :param in_queue: see `usage`; before this process. Default: none.
        :param spans: when the job was suspended by a queue. Default: never.
        """
        before = [(since, min(until, at)) for since, until in spans if since < at]
        queued = Usage.of_each({name: Usage(requested=s, queued=s) for name, s in in_queue.items()})
        self._earlier = _Earlier(counted, at, queued + self._dropped_usage, before)

    def _gone(self) -> Usage:
        """What an earlier process has counted, and no pod that is known shows."""
        if self._earlier is None:
            return NO_USAGE
        known = usage(self.all, self._earlier.at, None, self._evicted, self._earlier.spans)
        return self._earlier.counted.beyond(known + self._earlier.handed_over)

    def frozen(self) -> PodHistory:
        """A copy for another thread, in which `all` and `usage` don't change."""
        frozen = copy.copy(self)
        frozen._known = dict(self._known)
        return frozen

    def handover(self, job: Pod, now: datetime, spans: Sequence[Span] = ()) -> dict[str, Any]:
        """For the next process: restarts, device-seconds and stopped pods that the pods that exist don't show."""
        deleted = [pod for uid, pod in self._known.items() if uid not in self.groups.pods]
        spent = self._dropped_usage + usage(deleted, now, None, self._evicted, spans) + self._gone()
        seconds = spent.as_dict()
        seconds.pop("gpus", None)
        stopped = [asdict(one) for one in self.stopped(job)[:MAX_STOPPED_PODS]]
        restarts = float(self.restarts - self._count(self.live))
        return {"restarts": restarts, **seconds, **({"interrupted": stopped} if stopped else {})}

    def _count(self, pods: list[Pod]) -> int:
        replaced = itertools.chain.from_iterable(self._replaced(pods))
        return sum(sum(restarts_of(pod)) for pod in pods) + sum(map(_is_loss, replaced))

    def _drop_old_pods(self, now: datetime) -> None:
        gone, dropped = self._gone(), list[Pod]()
        for replaced in self._replaced(self.all):
            deleted = [pod for pod in replaced if pod["metadata"]["uid"] not in self.groups.pods]
            for pod in deleted[:-MAX_REPLACED_PODS]:
                del self._known[pod["metadata"]["uid"]]
                self._changes.pop(pod["metadata"]["uid"], None)
                self._seen_deleted.discard(pod["metadata"]["uid"])
                self._dropped_restarts += sum(restarts_of(pod)) + _is_loss(pod)
                dropped.append(pod)
        self._dropped_usage += usage(dropped, now, None, self._evicted) + gone
        self._earlier = None  # it can't be compared with pods that are no longer kept

    def _replaced(self, pods: list[Pod]) -> list[list[Pod]]:
        """For each replica its pods that were replaced by another one, oldest first."""
        of_replica: dict[str, list[Pod]] = {}
        for pod in sorted(pods, key=created):
            of_replica.setdefault(self._replica(pod), []).append(pod)
        return [of_one[:-1] for of_one in of_replica.values()]

    def _replica(self, pod: Pod) -> str:
        """Role and index, or the name for pods of other roles."""
        role, index = self._kind.role_of(pod)
        return f"{role} {index}" if self._kind.has_role(role) else str(pod["metadata"]["name"])


def _is_loss(pod: Pod) -> bool:
    """Whether the pod failed, and not because it was deleted, or was disrupted, whatever its program's exit code."""
    failed = (pod.get("status") or {}).get("phase") == "Failed" and failures_of(pod)
    return bool(failed or disruption_of(pod)[0])
