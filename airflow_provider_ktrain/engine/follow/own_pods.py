"""Which of the pods that a watch shows belong to the job, and which of these have changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.core.objects import created
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.job_requests import owner_of
from airflow_provider_ktrain.engine.watch.informer import Subscription

Object = dict[str, Any]
SLICE_PODS = 50  #: whose changes are processed before the event loop may do something else


@dataclass(frozen=True)
class PodChanges:
    """Changes of a job's pods.

    :param changed: new pods, and pods that have changed, by uid. Default: none.
    :param removed: uids of pods that the job no longer has. Default: none.
    """

    changed: dict[str, Object] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)


class OwnPods:
    """Finds the changes of a job's pods. It looks only at pods that the watch has changed.

    :param state: the job, which knows its pods: see `JobState.owns`.
    :param pods: the watch.
    """

    def __init__(self, state: JobState, pods: Subscription) -> None:
        self._state, self._pods = state, pods
        # dicts in place of sets, because most jobs have no pods yet, and an empty set takes three times the memory
        self._asked = {"": None}  # owners of pods that the API server was asked about
        self._unseen: dict[str, None] = {}  # uids of changed pods that `changes` has not looked at yet
        self._with_unknown_owner: dict[str, Object] = {}  # by uid
        self._own: dict[str, None] = {}  # uids
        self._decided_by: object = None  # what the last decisions depended on

    def with_unknown_owner(self) -> list[Object]:
        """The pods whose owner the API server has to be asked about."""
        taken = self._pods.take_changed()
        self._unseen |= dict.fromkeys(taken)
        for uid in taken if self._state.kind.pod_owner_label else ():
            pod = self._pods.objects.get(uid)
            if pod is None or owner_of(pod, self._state.ref) in self._asked:
                self._with_unknown_owner.pop(uid, None)
            else:
                self._with_unknown_owner[uid] = pod
        return list(self._with_unknown_owner.values())

    def note_owners(self, pods: Iterable[Object]) -> None:
        """Record that the API server was asked about the owners of these pods."""
        self._asked |= {owner_of(pod, self._state.ref): None for pod in pods}
        for uid in [u for u, pod in self._with_unknown_owner.items() if owner_of(pod, self._state.ref) in self._asked]:
            del self._with_unknown_owner[uid]

    def changes(self) -> Iterator[PodChanges]:
        """The changes since the last call, in parts of at most SLICE_PODS pods, oldest pods first; at least one part.

        The event loop may do something else between two parts. What the caller doesn't take remains for the next call.
        """
        state, pods = self._state, self._pods.objects
        self._unseen |= dict.fromkeys(self._pods.take_changed())
        if (decided_by := state.ownership) != self._decided_by:
            self._decided_by = decided_by
            self._unseen |= dict.fromkeys((*pods, *self._own))
        uids = sorted(self._unseen, key=lambda uid: created(pods.get(uid, {})))
        for begin in range(0, len(uids) or 1, SLICE_PODS):
            part = uids[begin : begin + SLICE_PODS]
            for uid in part:
                self._unseen.pop(uid, None)
            yield self._look_at(part)

    def _look_at(self, uids: Iterable[str]) -> PodChanges:
        found = PodChanges()
        for uid in uids:
            pod = self._pods.objects.get(uid)
            if pod is not None and self._state.owns(pod):
                found.changed[uid] = pod
                self._own[uid] = None
            elif uid in self._own:
                found.removed.append(uid)
                del self._own[uid]
        return found
