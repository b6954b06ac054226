"""Which of the pods that a watch shows belong to the job, and which of these have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from airflow_provider_ktrain.core.objects import created
from airflow_provider_ktrain.engine.api import ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.job_requests import owner_of, pod_owners
from airflow_provider_ktrain.engine.watch.subscription import Subscription

Object = dict[str, Any]
SLICE_PODS = 50  #: whose changes are processed before the event loop may do something else


class OwnPods:
    """Finds the changes of a job's pods. It looks only at pods that the watch has changed.

    :param context: of the job, whose state knows its pods: see `JobState.owns`.
    :param pods: the watch.
    """

    def __init__(self, context: FollowContext, pods: Subscription) -> None:
        self._api, self._state, self._pods = context.api, context.state, pods
        # dicts in place of sets, because most jobs have no pods yet, and an empty set takes three times the memory
        self._asked = {"": None}  # owners of pods that the API server was asked about
        self._unseen: dict[str, None] = {}  # uids of changed pods that `changes` has not looked at yet
        self._unasked: dict[str, None] = {}  # uids of changed pods that `find_owners` has not looked at yet
        self._own: dict[str, None] = {}  # uids
        self._decided_by: object = None  # what the last decisions depended on

    async def find_owners(self) -> None:
        """Ask the API server to which job pods belong that don't show it, once for each new owner."""
        ref, taken = self._state.ref, self._pods.take_changed()
        self._unseen |= dict.fromkeys(taken)
        if not self._state.kind.pod_owner_label:
            return
        self._unasked |= dict.fromkeys(taken)
        changed = [pod for uid in self._unasked if (pod := self._pods.objects.get(uid)) is not None]
        unknown = [pod for pod in changed if owner_of(pod, ref) not in self._asked]
        with contextlib.suppress(ApiUnavailable, ApiStatusError):
            if unknown:
                self._state.pod_owners |= await pod_owners(self._api, ref, unknown)
                self._asked |= {owner_of(pod, ref): None for pod in unknown}
            self._unasked = {}

    def changes(self) -> Iterator[tuple[dict[str, Object], list[str]]]:
        """The changes since the last call, in parts of at most SLICE_PODS pods, oldest pods first; at least one part.

        A part has new pods, and pods that have changed, by uid, and the uids of pods that the job no longer has.
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

    def _look_at(self, uids: Iterable[str]) -> tuple[dict[str, Object], list[str]]:
        changed: dict[str, Object] = {}
        removed: list[str] = []
        for uid in uids:
            pod = self._pods.objects.get(uid)
            if pod is not None and self._state.owns(pod):
                changed[uid] = pod
                self._own[uid] = None
            elif uid in self._own:
                removed.append(uid)
                del self._own[uid]
        return changed, removed
