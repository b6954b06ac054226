"""The pods of a job that is followed for days: those that are there, and those that were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from airflow_provider_ktrain.core.evidence import failures
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.limits import restarts
from airflow_provider_ktrain.core.usage import Usage, usage

Pod = Mapping[str, Any]
KEPT = 20  #: pods kept of each name: under ExitCode an operator makes what fails anew, if need be for ever


class PodHistory:
    """By uid, each as it was last seen: operators delete pods, and with them what they could tell.

    Of pods that were made anew under the same name the latest are kept; what the others cost is.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._known: dict[str, Pod] = {}
        self._live: set[str] = set()
        self._forgotten = Usage()
        self._restarts = 0  # of what is forgotten

    def see(self, pods: Mapping[str, Pod], now: datetime) -> None:
        """These pods, by uid, are there now, and no others."""
        self._known |= pods
        self._live = set(pods)
        if len(self._known) - len(self._live) > KEPT:
            self._forget(now)

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
        remade = sum(self._failed(pod) for pods in self._past().values() for pod in pods)
        return self._restarts + restarts(self.all) + remade

    def usage(self, now: datetime, job_ended: datetime | None) -> Usage:
        """What all of them cost: see `core.usage`."""
        return _plus(usage(self.all, now, job_ended=job_ended), self._forgotten)

    def _forget(self, now: datetime) -> None:
        for pods in self._past().values():
            for pod in sorted(pods, key=_created)[:-KEPT]:
                self._let_go(pod, now)

    def _past(self) -> dict[str, list[Pod]]:
        """The pods in whose place another one is, by their name."""
        past: dict[str, list[Pod]] = {_name(pod): [] for pod in self.live}
        for uid, pod in self._known.items():
            if uid not in self._live and _name(pod) in past:
                past[_name(pod)].append(pod)
        return past

    def _let_go(self, pod: Pod, now: datetime) -> None:
        del self._known[pod["metadata"]["uid"]]
        self._restarts += restarts([pod]) + self._failed(pod)
        self._forgotten = _plus(self._forgotten, usage([pod], now))

    def _failed(self, pod: Pod) -> bool:
        """Whether it failed, other than by being deleted."""
        return (pod.get("status") or {}).get("phase") == "Failed" and bool(failures(self._kind, [pod], {}))


def _plus(one: Usage, other: Usage) -> Usage:
    """Seconds add up; the GPUs of a name are those of its present pod."""
    sums = {what: getattr(one, what) + getattr(other, what) for what in ("asked", "queued", "held", "wasted")}
    return replace(one, **sums)


def _name(pod: Pod) -> str:
    return str(pod["metadata"]["name"])


def _created(pod: Pod) -> str:
    return str(pod["metadata"].get("creationTimestamp"))
