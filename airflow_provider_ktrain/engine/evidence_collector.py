"""What tells why a job failed: its events, and the last lines of its containers, followed or not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.text import LINE, clipped
from airflow_provider_ktrain.engine import paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.logs.emitter import Inspect, LogLine
from airflow_provider_ktrain.engine.submit import Log

Object = dict[str, Any]
Pod = Mapping[str, Any]
TAIL = 50  # last lines kept of every container: operators delete pods with their logs
TAIL_BYTES = 128 * 1024  # of them, where they were not followed
PATIENCE = 10.0  # seconds for all that is read in the end: the GPUs wait for it
OBJECTS = 20  # of which events are read: the job, and the pods that are there first
SECONDS = len("2026-11-21T10:00:00")  # of a timestamp: times of container states have no fraction
TAILS = 100  # containers beyond the present ones of which lines are kept: Launchers of a batch Job have random names
CONTAINERS = 10  # whose logs are read in the end: those that failed first


class Kept(NamedTuple):
    """A line that is kept: the number of its container's run, its time in UTC, and its text."""

    run: int
    time: str
    text: str


class Evidence:
    """:param cursor: which containers' lines have been told already."""

    def __init__(self, api: Api, kind: Kind, cursor: Cursor, log: Log) -> None:
        self._api, self._kind, self._cursor, self._log = api, kind, cursor, log
        self._tails: dict[str, deque[Kept]] = {}  # by log_key
        self.heard = True  #: whether there are events of the job; believed until they were looked at

    def tail(self, source: LogLine) -> Inspect:
        """What keeps the last lines of a container that is followed: it is called with each."""
        keep = self._tails.setdefault(log_key(source.pod, source.container), deque(maxlen=TAIL)).append
        return lambda text, time, run: keep(Kept(run, time, text if len(text) <= LINE else clipped(text)))

    def forget_all_but(self, pods: Sequence[Pod]) -> None:
        """Forget the lines of other pods than these once there are many of them."""
        if len(self._tails) > TAILS:
            names = {pod["metadata"]["name"] for pod in pods}
            others = [key for key in self._tails if key.partition("/")[0] not in names]
            for key in others[:-TAILS]:
                del self._tails[key]

    def of_run(self, pod: str, container: str, number: int, ended: Mapping[str, Any]) -> list[str] | None:
        """The last lines of one run of a container; None where they are not followed.

        :param number: of the run within its pod. Pods that were recreated have the same name, hence the next parameter.
        :param ended: the run's terminated state, which has its times.
        """
        tail = self._tails.get(log_key(pod, container))
        if tail is None:
            return None
        began, end = str(ended.get("startedAt") or "")[:SECONDS], str(ended.get("finishedAt") or "~")[:SECONDS]
        return [line.text for line in tail if line.run == number and began <= line.time[:SECONDS] <= end]

    async def gather(
        self, ref: JobRef, pods: Sequence[Pod], uids: Sequence[str]
    ) -> tuple[list[Object], dict[str, list[str]]]:
        """Events, and the last lines of each container by `log_key`; what cannot be read in time is left out.

        :param uids: of the pods, in the order in which their events matter.
        """
        events: list[Object] = []
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(self._read_events(ref, uids, events), self._read_tails(ref, pods))
        except TimeoutError:
            self._log.warning(f"Not all events and logs of {ref} could be read within {PATIENCE:.0f} s")
        return events, {key: [line.text for line in lines] for key, lines in self._tails.items()}

    async def events(self, ref: JobRef, uids: Sequence[str]) -> list[Object]:
        """Events about the job and its pods; none where they cannot be read: a cause is better than none."""
        found: list[Object] = []
        await self._read_events(ref, uids, found)
        return found

    async def _read_events(self, ref: JobRef, uids: Sequence[str], found: list[Object]) -> None:
        path = paths.core(ref.namespace, "events")
        for uid in [ref.uid, *uids][:OBJECTS]:
            try:
                answer = await self._api.request("GET", path, query={"fieldSelector": f"involvedObject.uid={uid}"})
            except (ApiStatusError, ApiUnavailable) as e:
                self._log.warning(f"The events of {ref} cannot be read: {e}")
                return
            found += answer.get("items") or []
        self.heard = bool(found)

    async def _read_tails(self, ref: JobRef, pods: Sequence[Pod]) -> None:
        """The last lines of containers that failed and were not followed."""
        missing = [
            (ended_at, pod, status)
            for pod in pods
            for status in (pod.get("status") or {}).get("containerStatuses") or ()
            if (ended_at := _failed_at(status)) and log_key(pod["metadata"]["name"], status["name"]) not in self._tails
        ]
        first = sorted(missing, key=itemgetter(0))[:CONTAINERS]
        await asyncio.gather(*(self._read_tail(ref, pod, status) for _, pod, status in first))

    async def _read_tail(self, ref: JobRef, pod: Pod, status: Mapping[str, Any]) -> None:
        name, uid, container = pod["metadata"]["name"], pod["metadata"]["uid"], status["name"]
        path = f"{paths.core(ref.namespace, 'pods', name)}/log"
        query, end = {"container": container, "tailLines": str(TAIL)}, bytearray()
        if (status.get("state") or {}).get("running"):  # again: it is the run before that failed
            query["previous"] = "true"
        try:
            async with self._api.stream(path, query=query, pool="logs", read_timeout=PATIENCE) as answer:
                async for block in answer.content.iter_any():
                    end += block
                    del end[:-TAIL_BYTES]
        except (ApiStatusError, ApiUnavailable):
            return
        lines = end.decode(errors="replace").splitlines()
        self._tails[log_key(name, container)] = deque((Kept(0, "", clipped(line)) for line in lines), maxlen=TAIL)
        role, index = self._kind.pod_role(pod["metadata"].get("labels") or {})
        for line in () if self._cursor.has(uid, container) else lines:  # told already
            self._log.info(f"[{role} {index}] {line}", role=role, index=index, pod=name)


def _failed_at(container_status: Mapping[str, Any]) -> str:
    """When a container failed first, as far as its status tells; empty where it did not."""
    states = (container_status.get("state") or {}, container_status.get("lastState") or {})
    ends = [end for state in states if (end := state.get("terminated")) and end.get("exitCode")]
    return min((str(end.get("finishedAt")) for end in ends), default="")
