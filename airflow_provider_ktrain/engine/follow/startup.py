"""Finds out whether a job that doesn't start can still start: looks at its events, less and less often.

The events come from one watch for all jobs that wait in a process: see `job_events`.

The rules, with their grace periods, are in `core/diagnosis/startup_rules.py`; the time limits that the user sets, such
as `startup_timeout`, are in `core/state/limits.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.diagnosis import unmatched_pods
from airflow_provider_ktrain.core.diagnosis.evidence import Evidence, make_evidence
from airflow_provider_ktrain.core.diagnosis.job_rules import find_startup_cause
from airflow_provider_ktrain.core.diagnosis.model import Cause
from airflow_provider_ktrain.core.diagnosis.startup_rules import (
    GRACE_SECONDS,
    describe_avoided,
    find_missing_claim,
    find_unstartable_command,
    next_end,
    refused_objects,
)
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.state.nodes import Node, is_of_autoscaler
from airflow_provider_ktrain.core.state.pods.objects import metadata_of
from airflow_provider_ktrain.core.state.pods.pod_groups import restarted_often
from airflow_provider_ktrain.core.state.status import Phase
from airflow_provider_ktrain.core.text.timestamps import utc
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import Api, Object, get
from airflow_provider_ktrain.engine.api.job_calls import list_objects
from airflow_provider_ktrain.engine.follow.context import FollowContext, Part
from airflow_provider_ktrain.engine.follow.job_events import JobEvents

FIRST_INTERVAL_SECONDS = 15.0  #: Time between the first checks of a job's events in a phase.
INTERVAL_FACTOR = 1.5  #: Factor by which the interval grows after each check.
MAX_INTERVAL_SECONDS = 300.0
NODE_PAGE_SIZE = 100  #: Nodes per request: each lists the images that it has.
NODES_TIMEOUT_SECONDS = 30.0  #: Timeout of the read of all pages. The jobs that wait for it check no limit meanwhile.
NODES_AGE_SECONDS = 300.0  #: How old a read may be that only shows when to look.
MAX_REFUSED_OBJECTS = 20  #: How many refused objects are read.
_NOT_STARTED = (Phase.PENDING, Phase.STARTING)  # the job waits for nodes, images or containers


@dataclass
class _Read:
    """The last read of the nodes, or its failure."""

    began: float = -float("inf")  # by `timing.now`
    nodes: tuple[Node, ...] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


_reads: WeakKeyDictionary[Api, _Read] = WeakKeyDictionary()


async def read_nodes(api: Api, *, fresh: bool = False) -> tuple[Node, ...] | None:
    """All nodes; None if they can't be read: the connection has no right to, or the API server doesn't answer.

    They are read at most once in five minutes for all jobs of a process that wait for a node.

    :param fresh: whether the read must begin after this call. Default: False, it is at most NODES_AGE_SECONDS old.
    """
    asked, read = timing.now(), _reads.setdefault(api, _Read())
    async with read.lock:
        if read.began < (asked if fresh else asked - NODES_AGE_SECONDS):
            read.began, read.nodes = timing.now(), None
            with contextlib.suppress(KtrainError, TimeoutError):
                async with asyncio.timeout(NODES_TIMEOUT_SECONDS):
                    nodes = await list_objects(api, api_paths.nodes(), keep=Node.of, page_size=NODE_PAGE_SIZE)
                    read.nodes = tuple(nodes)
        return read.nodes


class StartupChecks(Part):
    """Checks the events of a job while it hasn't started.

    :param events: watched from the first check until the job has started.
    :param seconds_away_since: for how long the API server was away since an epoch second: that time doesn't count.
    """

    def __init__(self, context: FollowContext, events: JobEvents, seconds_away_since: Callable[[float], float]) -> None:
        self._api, self._state, self._log, self._events = context.api, context.state, context.log, events
        self._seconds_away_since = seconds_away_since
        self._checked_at = timing.now()
        self._interval = FIRST_INTERVAL_SECONDS
        self._obstacle = ""  # last logged Warning event
        self._limit: dict[str, Any] | None = None
        self._missing_since: float | None = None  # when a claim was first said to be missing, by timing.now
        self._unmatched_since: float | None = None  # when a read first showed that no node matches, by timing.now

    def phase_changed(self) -> None:
        """Begin with short intervals again."""
        self._interval = FIRST_INTERVAL_SECONDS

    async def close(self) -> None:
        """Give up the watch of the events."""
        await self._events.close()

    @property
    def notice(self) -> str:
        """For the training page: the newest warning about a job that has not started; empty if there is none."""
        return f"Newest warning: {self._obstacle}" if self._obstacle and self._state.phase in _NOT_STARTED else ""

    @property
    def limit(self) -> dict[str, Any] | None:
        """For the training page: the problem that ends the job if it lasts, as a limit of the status."""
        return self._limit if self._state.phase in _NOT_STARTED else None

    @property
    def due(self) -> float | None:
        """When to check next, by `timing.now`; None if the job has started."""
        due = self._checked_at + self._interval
        due = min([due, *(end for end, _, _ in self._pending() if end > self._checked_at)])
        return due if self._state.phase in _NOT_STARTED else None

    async def find_failure(self, *, at_once: bool = False) -> Cause | None:
        """Why the job can never start; None if it may start or no check is due."""
        state = self._state
        self._record_generation()
        if any(map(restarted_often, state.pods.groups.examples())) and (
            cause := find_unstartable_command(make_evidence(state.known_job, state.pods.live))
        ):
            return cause
        if self.due is None:
            await self.close()
            return None
        if timing.now() < self.due and not at_once:
            return None
        self._checked_at = timing.now()
        self._interval = min(self._interval * INTERVAL_FACTOR, MAX_INTERVAL_SECONDS)
        away = self._seconds_away_since(timing.epoch() - (timing.now() - state.phase_since))
        waited = timing.now() - state.phase_since - away
        now = timing.utc_now() - datetime.timedelta(seconds=away)
        events = await self._events.watched()
        spec_since = None if state.spec_since is None else utc(state.spec_since)
        evidence = replace(make_evidence(state.known_job, state.pods.live, events, now=now), spec_since=spec_since)
        cause = find_startup_cause(evidence, waited, has_run=state.has_run)
        if cause is not None:
            cause = find_startup_cause(await self._reread(evidence), waited, has_run=state.has_run)
        if cause is None:
            cause = await self._find_missing_claim(evidence)
        if cause is None:
            cause = await self._find_unmatched_pod(evidence, fresh=at_once)
        if cause is None:
            self._log_obstacle(events)
            self._limit = self._next_limit(replace(evidence, waited_seconds=waited))
        return cause

    def _pending(self) -> list[tuple[float, str, float]]:
        """Problems that end the job if they last: when, by timing.now, the name of each, and its seconds of grace."""
        found = (
            (self._missing_since, "missing claim", GRACE_SECONDS["missing claim"]),
            (self._unmatched_since, "no matching node", unmatched_pods.GRACE_SECONDS),
        )
        return [(self._end_of_grace(since, grace), name, grace) for since, name, grace in found if since is not None]

    def _next_limit(self, evidence: Evidence) -> dict[str, Any] | None:
        """The problem that ends the job first if nothing changes, as a limit of the status; None if there is none."""
        now, ends = timing.now(), self._pending()
        if end := next_end(evidence):
            ends.append((now + end[0], end[1], GRACE_SECONDS[end[1]]))
        if not ends:
            return None
        due, name, seconds = min(ends)
        return {"name": name, "due": round(timing.epoch() + due - now, 1), "seconds": seconds}

    def _record_generation(self) -> None:
        """A refusal of an earlier specification of the job says nothing about the present one."""
        generation = metadata_of(self._state.known_job).get("generation")
        if self._state.generation is not None and generation not in (None, self._state.generation):
            self._state.spec_since = timing.epoch()
        self._state.generation = generation or self._state.generation

    async def _reread(self, evidence: Evidence) -> Evidence:
        """The evidence with all events, Normal ones too, and with refused objects that exist.

        Without events if anything can't be read: events that were seen show only when to look.
        """
        unread = replace(evidence, events=())
        about = {str(event["involvedObject"].get("uid")) for event in evidence.events}
        pods = [name for kind, name in refused_objects(evidence) if kind == "Pod"]
        events: list[Object] = []
        if not await self._events.read(events, first=about, pods=pods):
            return unread
        known = make_evidence(evidence.job, evidence.pods, events, now=evidence.now)
        refused = sorted(one for one in refused_objects(known) if one[0] != "Pod")  # pods were listed
        existing = set(refused[MAX_REFUSED_OBJECTS:])  # or not read: then nothing is concluded from it
        try:
            existing |= {one for one in refused[:MAX_REFUSED_OBJECTS] if await self._exists(*one)}
        except KtrainError:
            return unread
        return replace(known, spec_since=evidence.spec_since, existing=existing)

    async def _exists(self, kind: str, name: str) -> bool:
        """Whether an object of the job exists.

        :raises KtrainError: it can't be read.
        """
        ref = self._state.ref
        paths = {
            "Service": api_paths.core(ref.namespace, "services", name),
            "Job": f"/apis/batch/v1/namespaces/{ref.namespace}/jobs/{name}",
        }
        if (obj := await get(self._api, paths.get(kind) or api_paths.pod_owner(ref))) is ABSENT:
            return False
        owners = metadata_of(obj).get("ownerReferences") or ()
        return kind == "Job" or any(owner.get("uid") == ref.uid for owner in owners)

    async def _find_missing_claim(self, evidence: Evidence) -> Cause | None:
        """Why a pod has no node: its claim doesn't exist, which a read proves. None while it may exist.

        The scheduler's words may be old, and say nothing of when they began: the time starts when they are first seen.
        """
        since = self._missing_since or timing.now()
        found = find_missing_claim(evidence, self._lasted(since))
        self._missing_since = None if found is None else since
        if found is None or timing.now() < self._end_of_grace(since, GRACE_SECONDS["missing claim"]):
            return None
        claim, cause = found
        path = api_paths.core(self._state.ref.namespace, "persistentvolumeclaims", claim)
        try:
            return cause if await get(self._api, path) is ABSENT else None
        except KtrainError:  # without the right, the job's own limits apply
            return None

    async def _find_unmatched_pod(self, evidence: Evidence, *, fresh: bool) -> Cause | None:
        """Why no node can take a pod, as reads have shown for the time of grace; None while one may.

        Nodes may have come and gone before this process looked at them, so the time starts with its first read.
        """
        nodes = None
        if not self._state.has_run and unmatched_pods.suspects(evidence):
            nodes = await read_nodes(self._api, fresh=fresh)
        since = self._unmatched_since or timing.now()
        cause = None
        if nodes is not None:
            cause = unmatched_pods.find_unmatched_pod(evidence, nodes, self._lasted(since))
        self._unmatched_since = None if cause is None else since
        if cause is None or timing.now() < self._end_of_grace(since, unmatched_pods.GRACE_SECONDS):
            return None
        events: list[Object] = []
        are_read = await self._events.read(events)
        return cause if are_read and not any(map(is_of_autoscaler, events)) else None

    def _end_of_grace(self, since: float, seconds: float) -> float:
        """When a problem has lasted for so long, by `timing.now`, without time in which the API server was away."""
        return since + seconds + self._seconds_away_since(timing.epoch() - (timing.now() - since))

    def _lasted(self, since: float) -> float:
        """Seconds since a time by `timing.now`, without those in which the API server was away."""
        return timing.now() - self._end_of_grace(since, 0.0)

    def _log_obstacle(self, events: list[Object]) -> None:
        """Log the newest Warning event about the job or its pods, once. The job may start in spite of it."""
        warnings = [event for event in events if event.get("type") == "Warning"]
        if warnings:
            last = max(warnings, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))
            about = last["involvedObject"]
            obstacle = f"{about.get('kind')} {about['name']}: {last.get('reason')}: {last.get('message')}"
            without_node = (pod for pod in self._state.pods.live if not (pod.get("spec") or {}).get("nodeName"))
            avoided = next(filter(None, map(describe_avoided, without_node)), "")
            obstacle = f"{obstacle}\n{avoided}".rstrip()
            if obstacle != self._obstacle:
                self._log.warning(f"{self._state.ref} is still {self._state.phase}. Its newest warning:\n{obstacle}")
            self._obstacle = obstacle
