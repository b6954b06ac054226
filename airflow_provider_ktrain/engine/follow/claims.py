"""Reads the ResourceClaims of a job's pods while they hold devices: afterwards, claims show them no longer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from airflow_provider_ktrain.core.state.pods.devices import claims_of
from airflow_provider_ktrain.core.state.pods.objects import has_ended, node_of
from airflow_provider_ktrain.engine.api.claims import read_claims
from airflow_provider_ktrain.engine.follow.context import FollowContext

RETRY_SECONDS = 30.0  #: until claims that could not be read are read again


class ClaimReader:
    """Reads each claim once, of pods that have a node. Without the right to, it asks once.

    :param context: of the job, whose state gets the claims.
    """

    __slots__ = ("_api", "_look_at", "_state", "_wanted")  # each job that waits has one

    def __init__(self, context: FollowContext) -> None:
        self._api, self._state = context.api, context.state
        self._wanted: dict[str, list[str]] = {}  # uids of the pods that have the claim, by its name
        self._look_at: float | None = 0.0  # time.monotonic() from which claims are read; None: they can't be

    def note(self, pods: Mapping[str, Mapping[str, Any]]) -> None:
        """Find claims of pods that are new or have changed.

        :param pods: by uid.
        """
        for uid, pod in pods.items() if self._look_at is not None else ():
            if node_of(pod) and not has_ended(pod):
                for name in claims_of(pod).keys() - self._state.pods.claims.keys():
                    self._wanted.setdefault(name, []).append(uid)

    async def update(self) -> None:
        """Read the claims that were found, if any."""
        if not self._wanted or self._look_at is None or time.monotonic() < self._look_at:
            return
        read = await read_claims(self._api, self._state.ref.namespace, self._wanted)
        if read is None:
            self._look_at = None
            self._wanted.clear()
            return
        pods = self._state.pods
        pods.claims.update(read)
        for uid in {uid for name in read for uid in self._wanted.pop(name)} & pods.groups.pods.keys():
            pods.groups.put(pods.groups.pods[uid])
        self._look_at = time.monotonic() + (RETRY_SECONDS if self._wanted else 0.0)
