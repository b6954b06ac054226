"""The existing pods of a job, grouped so that a few of them stand for all.

A job may have thousands of pods that change one at a time. Phase and time limits depend only on which states occur
among them, and since when. So pods in the same state form a group, and the pod that has been in it for the longest time
is the example of the group. Decisions look at the examples, whose number doesn't grow with that of the pods.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.kinds import Kind, kind_of
from airflow_provider_ktrain.core.state.pods import objects
from airflow_provider_ktrain.core.state.pods.partial_start import find_partial_start, holds_accelerators, scheduled_at
from airflow_provider_ktrain.core.state.pods.pod_state import state_of_pod

Pod = Mapping[str, Any]
MAX_START_RESTARTS = 3  #: Restarts after which a command that can't be started is given up.


class State(NamedTuple):
    """What decisions depend on. Pods of one group have the same.

    :param is_gated: whether a queue holds it back.
    :param is_later_attempt: whether it belongs to a later attempt of the job: see `Kind.is_restarting`.
    """

    role: str
    phase: str
    has_node: bool
    is_terminating: bool
    is_gated: bool
    has_accelerators: bool
    is_later_attempt: bool
    restarted_often: bool


class PodGroups:
    """The existing pods of one job. Each change costs the same, however many pods there are."""

    def __init__(self, kind: Kind, pods: Iterable[Pod] = ()) -> None:
        self._kind = kind
        self.pods: dict[str, Pod] = {}  #: Pods by uid. Only `put` and `remove` change it.
        self.shown: dict[str, str] = {}  #: Results of `state_of_pod`, by uid.
        self.shown_version = 0  #: Grows when `shown` changes.
        self.silent: dict[str, Pod] = {}  #: Pods whose node doesn't report, by uid.
        self._places: dict[str, tuple[State, float]] = {}  # group and time of each pod
        self._groups: dict[State, _Group] = {}
        for pod in pods:
            self.put(pod)

    def put(self, pod: Pod) -> None:
        """Add a pod, or replace its earlier state."""
        uid = str(pod["metadata"]["uid"])
        self.pods[uid] = pod
        self._show(uid, state_of_pod(pod, self._kind))
        self.silent.pop(uid, None)
        if objects.silent_since(pod):
            self.silent[uid] = pod
        place = _place_of(self._kind, pod)
        if self._places.get(uid) != place:
            self._leave(uid)
            self._places[uid] = place
            self._groups.setdefault(place[0], _Group()).add(uid, place[1])

    def remove(self, uid: str) -> None:
        """Remove a pod, if it is known."""
        if self.pods.pop(uid, None) is not None:
            self._show(uid, None)
            self.silent.pop(uid, None)
            self._leave(uid)

    def examples(self) -> list[Pod]:
        """One pod of each group: the one that was created first, or if the pods have nodes, scheduled first."""
        return [self.pods[group.oldest()] for group in self._groups.values()]

    def _show(self, uid: str, state: str | None) -> None:
        if self.shown.get(uid) == state:
            return
        self.shown_version += 1
        if state is None:
            del self.shown[uid]
        else:
            self.shown[uid] = state

    def _leave(self, uid: str) -> None:
        place = self._places.pop(uid, None)
        if place is not None:
            group = self._groups[place[0]]
            group.discard(uid)
            if not group.times:
                del self._groups[place[0]]


class _Group:
    """The pods of a group by uid, each with a time. Finding the earliest one takes logarithmic time."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # may contain pods that have left

    def add(self, uid: str, time: float) -> None:
        self.times[uid] = time
        heapq.heappush(self._heap, (time, uid))

    def discard(self, uid: str) -> None:
        del self.times[uid]
        if len(self._heap) > 2 * len(self.times) + 16:
            self._heap = [(time, uid) for uid, time in self.times.items()]
            heapq.heapify(self._heap)

    def oldest(self) -> str:
        while self.times.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]


def partial_start_since(job: Mapping[str, Any], groups: PodGroups) -> float | None:
    """Since when a job holds accelerators while some of its pods have no node: see `find_partial_start`."""
    partial = find_partial_start(job, groups.examples())
    if partial is not None and kind_of(job.get("kind")).scaling.is_elastic(job):
        partial = find_partial_start(job, groups.pods.values())  # whether it has its minimum takes all pods
    return None if partial is None else partial.since


def restarted_often(pod: Pod) -> bool:
    """Whether a container of the pod may be found to have a command that can't be started."""
    return any(restarts >= MAX_START_RESTARTS for restarts in objects.restarts_of(pod))


def _place_of(kind: Kind, pod: Pod) -> tuple[State, float]:
    spec = pod.get("spec") or {}
    state = State(
        role=kind.role_of(pod)[0],
        phase=str((pod.get("status") or {}).get("phase", "Pending")),
        has_node=bool(objects.node_of(pod)),
        is_terminating=objects.is_being_deleted(pod),
        is_gated=bool(spec.get("schedulingGates")),
        has_accelerators=holds_accelerators(pod),
        is_later_attempt=kind.is_restarting([pod]),
        restarted_often=restarted_often(pod),
    )
    since = scheduled_at(pod) if state.has_node else objects.created_at(pod)
    return state, math.inf if since is None else since
