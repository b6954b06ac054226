"""Collects the evidence for a diagnosis: events, and the last log lines of containers, followed or not."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.logs.cursor import Cursor, normal_time
from airflow_provider_ktrain.core.logs.selection import is_followed
from airflow_provider_ktrain.core.objects import created_at
from airflow_provider_ktrain.core.text import MAX_LINE_CHARS, clipped
from airflow_provider_ktrain.core.timestamps import epoch_seconds
from airflow_provider_ktrain.engine import api_paths
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.job_requests import Log
from airflow_provider_ktrain.engine.logs.emitter import Inspect, LogLine
from airflow_provider_ktrain.engine.logs.line_logger import LineLogger
from airflow_provider_ktrain.engine.warning_events import WarningEvents
from airflow_provider_ktrain.engine.watch.object_keys import by_involved_name, by_involved_uid

Object = dict[str, Any]
Pod = Mapping[str, Any]
TAIL_LINES = 50  # last lines kept of each container: operators delete failed pods, and their logs with them
MAX_TAIL_BYTES = 128 * 1024  # kept of the log of a container that was not followed
READ_TIMEOUT_SECONDS = 10.0  # for all events and logs together: the release of the GPUs waits for them
MAX_OBJECTS_WITH_EVENTS = 20  # the job and its pods, existing ones first
MAX_TAILS_OF_OTHERS = 100  # containers of forgotten pods whose lines are kept: each Launcher pod has another name
MAX_UNFOLLOWED_CONTAINERS = 10  # whose logs are read after a failure: those that failed first


class TailLine(NamedTuple):
    """A log line: the uid of its pod, the number of its container's run, its time in UTC, and its text.

    The uid is empty if the pod was not followed.
    """

    pod_uid: str
    run: int
    time: str
    text: str


class EvidenceCollector:
    """Keeps the last log lines of followed containers, and reads events and other logs when a diagnosis needs them.

    :param api: client for the cluster.
    :param kind: kind of the job.
    :param cursor: which containers' lines were logged already.
    :param log: where warnings, and lines of containers that were not followed, are logged.
    """

    def __init__(self, api: Api, kind: Kind, cursor: Cursor, log: Log) -> None:
        self._api, self._kind, self._cursor, self._log = api, kind, cursor, log
        self._log_line = LineLogger(log, kind)
        self._tails: dict[str, deque[TailLine]] = {}  # by log_key
        self.has_events = True  #: whether the job has events; True until they are read

    def recorder(self, source: LogLine) -> Inspect:
        """A function that keeps the last lines of a followed container; the log follower calls it with each line."""
        keep = self._tails.setdefault(log_key(source.pod, source.container), deque(maxlen=TAIL_LINES)).append
        uid = source.pod_uid
        return lambda text, time, run: keep(
            TailLine(uid, run, time, text if len(text) <= MAX_LINE_CHARS else clipped(text))
        )

    def forget_all_but(self, pods: Sequence[Pod]) -> None:
        """Forget the lines of other pods than these, except for the latest MAX_TAILS_OF_OTHERS containers."""
        if len(self._tails) > MAX_TAILS_OF_OTHERS:
            names = {pod["metadata"]["name"] for pod in pods}
            others = [key for key in self._tails if key.partition("/")[0] not in names]
            for key in others[:-MAX_TAILS_OF_OTHERS]:
                del self._tails[key]

    def newest_lines(self) -> dict[str, str]:
        """The last line of each followed pod, by the pod's name."""
        newest: dict[str, TailLine] = {}
        for key, tail in self._tails.items():
            pod = key.partition("/")[0]
            if tail and (pod not in newest or tail[-1].time >= newest[pod].time):
                newest[pod] = tail[-1]
        return {pod: line.text for pod, line in newest.items()}

    def lines_of_run(self, pod: str, uid: str, container: str, number: int) -> list[str] | None:
        """The last lines of one run of a container; None if its log is not followed.

        :param pod: name of the pod.
        :param uid: uid of the pod: recreated pods have the same name.
        :param container: name of the container.
        :param number: number of the run within its pod.
        """
        tail = self._tails.get(log_key(pod, container))
        if tail is None:
            return None
        return [line.text for line in tail if (line.pod_uid, line.run) == (uid, number)]

    async def gather(
        self,
        ref: JobRef,
        job: Object,
        pods: Sequence[Pod],
        uids: Sequence[str],
        unread: Container[tuple[str, str]] = (),
    ) -> tuple[list[Object], dict[str, list[str]]]:
        """Events, and the last lines of each container by `log_key`; without what can't be read in time.

        :param ref: reference to the job.
        :param job: the job as last seen.
        :param pods: its pods.
        :param uids: uids of the pods, the most important first.
        :param unread: pods and containers whose logs were followed, but not read to their end. Default: none.
        """
        events: list[Object] = []
        try:
            async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                await asyncio.gather(
                    self._read_events(ref, job, uids, events), self._read_tails(ref, job, pods, unread)
                )
        except TimeoutError:
            limit = f"{READ_TIMEOUT_SECONDS:.0f} s"
            self._log.warning(
                f"The diagnosis may be incomplete: events and logs of {ref} were not read within {limit}."
            )
        return events, {key: [line.text for line in lines] for key, lines in self._tails.items()}

    async def read_events(self, ref: JobRef, job: Object, uids: Sequence[str], watched: WarningEvents) -> list[Object]:
        """Events of the job, its pods and what is between; none if they can't be read: a diagnosis can do without.

        :param watched: the Warning events, which are enough for a job that doesn't start.
        """
        keys = [by_involved_uid(uid) for uid in (ref.uid, *uids)]
        between = [by_involved_name(kind, name) for kind, name in self._kind.objects_with_events(job)]
        known = await watched.about([*keys, *between])
        if known is not None:
            of_job = {ref.uid, *uids}
            began = created_at(job) or 0.0
            found = [
                event for event in known if event["involvedObject"].get("uid") in of_job or _time_of(event) >= began
            ]
            self.has_events = bool(found)
            return found
        found = []
        await self._read_events(ref, job, uids, found)
        return found

    async def _read_events(self, ref: JobRef, job: Object, uids: Sequence[str], found: list[Object]) -> None:
        """Add the events of the job, its pods and what is between to `found`."""
        path = api_paths.core(ref.namespace, "events")
        began = created_at(job) or 0.0  # objects of an earlier job had the same names
        between = [
            f"involvedObject.kind={kind},involvedObject.name={name}"
            for kind, name in self._kind.objects_with_events(job)
        ]
        by_uid = [f"involvedObject.uid={uid}" for uid in [ref.uid, *uids]]
        for selector in [*between, *by_uid][:MAX_OBJECTS_WITH_EVENTS]:
            try:
                answer = await self._api.request("GET", path, query={"fieldSelector": selector})
            except (ApiStatusError, ApiUnavailable) as e:
                self._log.warning(f"Can't read the events of {ref}.\n{e}")
                if isinstance(e, ApiStatusError) and e.status == 403:
                    self.has_events = False  # they are never known: a job without pods then has its startup limit
                return
            found += [event for event in answer.get("items") or () if _time_of(event) >= began or selector in by_uid]
        self.has_events = bool(found)

    async def _read_tails(
        self, ref: JobRef, job: Object, pods: Sequence[Pod], unread: Container[tuple[str, str]]
    ) -> None:
        """Read the last lines of containers that failed and whose logs were not followed to their end."""
        missing = []
        for pod in pods:
            for status in (pod.get("status") or {}).get("containerStatuses") or ():
                container = pod["metadata"]["name"], status["name"]
                if container in unread and not self._tails.get(log_key(*container)):
                    self._tails.pop(log_key(*container), None)  # that no line was read doesn't mean that there is none
                if (ended_at := _failed_at(status)) and (container in unread or log_key(*container) not in self._tails):
                    missing.append((ended_at, pod, status))
        first = sorted(missing, key=itemgetter(0))[:MAX_UNFOLLOWED_CONTAINERS]
        await asyncio.gather(*(self._read_tail(ref, job, pod, status, unread) for _, pod, status in first))

    async def _read_tail(
        self, ref: JobRef, job: Object, pod: Pod, status: Mapping[str, Any], unread: Container[tuple[str, str]]
    ) -> None:
        """Read the last lines of a container. Log them unless it was followed or is a sidecar."""
        name, uid, container = pod["metadata"]["name"], pod["metadata"]["uid"], status["name"]
        path = f"{api_paths.core(ref.namespace, 'pods', name)}/log"
        query, end = {"container": container, "tailLines": str(TAIL_LINES), "timestamps": "true"}, bytearray()
        if (status.get("state") or {}).get("running"):  # the container was restarted: the previous run failed
            query["previous"] = "true"
        try:
            async with self._api.stream(path, query=query, pool="logs", read_timeout=READ_TIMEOUT_SECONDS) as answer:
                async for block in answer.content.iter_any():
                    end += block
                    del end[:-MAX_TAIL_BYTES]
        except (ApiStatusError, ApiUnavailable):
            return
        lines = [_parted(line) for line in end.decode(errors="replace").split("\n") if line]
        self._tails[log_key(name, container)] = deque(
            (TailLine("", 0, "", clipped(text)) for _, text in lines), maxlen=TAIL_LINES
        )
        followed = self._cursor.has(uid, container) or (name, container) in unread
        if followed or not is_followed(self._kind, job, pod, container):
            return
        role, index = self._kind.pod_role(pod["metadata"].get("labels") or {})
        for time, text in lines:
            self._log_line(LogLine(name, container, role, index, 0, time, text))


def _parted(line: str) -> tuple[str, str]:
    """Time and text of a line; the first one may be cut, so that it has no time."""
    stamp, _, text = line.partition(" ")
    time = normal_time(stamp)
    return (time, text) if time else ("", line)


def _time_of(event: Mapping[str, Any]) -> float:
    """When the event was last seen, in epoch seconds. JobSet's events have fractions of a second, the job has not."""
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return next((seconds for time in times if (seconds := epoch_seconds(time)) is not None), math.inf)


def _failed_at(container_status: Mapping[str, Any]) -> str:
    """The time of a container's first failure in its status; empty if it did not fail."""
    states = (container_status.get("state") or {}, container_status.get("lastState") or {})
    ends = [end for state in states if (end := state.get("terminated")) and end.get("exitCode")]
    return min((str(end.get("finishedAt")) for end in ends), default="")
