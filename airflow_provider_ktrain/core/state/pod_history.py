"""The pods of a job that is followed for days: those that are there, and those that were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.diagnosis.pod_failures import failures
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.state.limits import restarts
from airflow_provider_ktrain.core.state.usage import Usage, usage

Pod = Mapping[str, Any]
SECONDS = ("requested", "queued", "held", "wasted")  #: of `Usage`
KEPT = 20  #: pods kept of each replica: under ExitCode an operator makes what fails anew, if need be for ever


class PodHistory:
    """By uid, each as it was last seen: operators delete pods, and with them what they could tell.

    Of the pods of a replica that were made anew the latest are kept; what the others cost is.

    :param past: what an earlier host had counted of pods that are gone: see `past`.
    """

    def __init__(self, kind: Kind, past: Mapping[str, float] | None = None) -> None:
        self._kind = kind
        self._known: dict[str, Pod] = {}
        self._live: set[str] = set()
        self._gone = 0  # how many are kept of those that are gone
        given = past or {}
        self._restarts = int(given.get("restarts", 0))  # of what is forgotten
        requested, queued, held, wasted = (given.get(what, 0.0) for what in SECONDS)
        self._forgotten = Usage(requested, queued, held, wasted)

    def see(self, pods: Mapping[str, Pod], now: datetime) -> None:
        """These pods, by uid, are there now, and no others."""
        self._known |= pods
        self._live = set(pods)
        if len(self._known) - len(self._live) > max(KEPT, self._gone):
            self._forget(now)
            self._gone = len(self._known) - len(self._live)

    def lost(self, pod: Pod) -> None:
        """A pod that was deleted, as it was in the end."""
        self._known[pod["metadata"]["uid"]] = pod
        self._live.discard(pod["metadata"]["uid"])

    @property
    def all(self) -> list[Pod]:
        """Those that are there and those that were."""
        return list(self._known.values())

    @property
    def uids(self) -> list[str]:
        """Of all, those that are there first."""
        return sorted(self._known, key=lambda uid: uid not in self._live)

    @property
    def live(self) -> list[Pod]:
        return [self._known[uid] for uid in self._live]

    @property
    def restarts(self) -> int:
        """Restarts of containers, and pods that failed and were made anew."""
        return self._restarts + self._count(self.all)

    def usage(self, now: datetime, job_ended: datetime | None) -> Usage:
        """What all of them cost: see `core.usage`."""
        return _plus(usage(self.all, now, job_ended=job_ended), self._forgotten)

    def past(self, now: datetime) -> dict[str, float]:
        """What the next host will not see: restarts, and GPU-seconds by the names of `Usage`, of pods that are gone."""
        gone = [pod for uid, pod in self._known.items() if uid not in self._live]
        spent = _plus(self._forgotten, usage(gone, now)).as_dict()
        seconds = {what: spent[what] for what in SECONDS}
        return {"restarts": float(self.restarts - self._count(self.live)), **seconds}

    def _count(self, pods: list[Pod]) -> int:
        return restarts(pods) + sum(self._failed(pod) for past in self._past(pods) for pod in past)

    def _forget(self, now: datetime) -> None:
        for past in self._past(self.all):
            gone = [pod for pod in past if pod["metadata"]["uid"] not in self._live]
            for pod in gone[:-KEPT]:
                self._let_go(pod, now)

    def _past(self, pods: list[Pod]) -> list[list[Pod]]:
        """Of each replica the pods in whose place another one is, oldest first."""
        of_replica: dict[str, list[Pod]] = {}
        for pod in sorted(pods, key=lambda p: str(p["metadata"].get("creationTimestamp"))):
            of_replica.setdefault(self._replica(pod), []).append(pod)
        return [of_one[:-1] for of_one in of_replica.values()]

    def _replica(self, pod: Pod) -> str:
        """Role and index; a Job's pods (mpi-operator's launcher) have a new name each."""
        role, index = self._kind.pod_role(pod["metadata"].get("labels") or {})
        return f"{role} {index}" if role in self._kind.roles else str(pod["metadata"]["name"])

    def _let_go(self, pod: Pod, now: datetime) -> None:
        del self._known[pod["metadata"]["uid"]]
        self._restarts += restarts([pod]) + self._failed(pod)
        self._forgotten = _plus(self._forgotten, usage([pod], now))

    def _failed(self, pod: Pod) -> bool:
        """Whether it failed, other than by being deleted."""
        return (pod.get("status") or {}).get("phase") == "Failed" and bool(failures(self._kind, [pod], {}))


def _plus(one: Usage, other: Usage) -> Usage:
    """Seconds add up; the GPUs of a name are those of its present pod."""
    sums = {what: getattr(one, what) + getattr(other, what) for what in SECONDS}
    return replace(one, **sums)
