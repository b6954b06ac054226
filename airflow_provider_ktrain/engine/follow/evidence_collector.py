"""Collects the evidence for a diagnosis: events, nodes, and the last log lines of containers, followed or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.diagnosis.cause_scanner import LAST_LINES, CauseScanner
from airflow_provider_ktrain.core.diagnosis.collectives import is_report
from airflow_provider_ktrain.core.diagnosis.crash_loop import Restart
from airflow_provider_ktrain.core.diagnosis.log_lines import TimedText
from airflow_provider_ktrain.core.diagnosis.node_rules import nodes_to_read
from airflow_provider_ktrain.core.diagnosis.pod_failures import log_key, silent_peers
from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.logs.cursor import Cursor, normal_time
from airflow_provider_ktrain.core.logs.exec_trace import masked_trace
from airflow_provider_ktrain.core.logs.selection import is_followed, is_init_container
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.state.pods.objects import containers, failed_runs
from airflow_provider_ktrain.core.text.output import clipped, ends_of
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import ApiStatusError, ApiUnavailable, Object, get_if_allowed
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.job_events import JobEvents
from airflow_provider_ktrain.engine.logs.emitter import Inspect
from airflow_provider_ktrain.engine.logs.line_logger import LineLogger
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.reader import is_of_kubelet

Pod = Mapping[str, Any]
TAIL_LINES = LAST_LINES  # last lines kept of each container: operators delete failed pods, and their logs with them
REPORT_LINES = 64  # before them, of NCCL's timeouts: their C++ stacks and torchrun's own report follow
REPORT_SECONDS = 900.0  # before the last line: an older timeout is one that torchrun's next processes trained after
UNFOLLOWED_LINES = 10_000  # last lines that are read of a log that was not followed, or not from its beginning
MAX_TAIL_BYTES = 900 * 1024  # of them
SLICE_LINES = 500  # of them that are parsed without a pause
READ_TIMEOUT_SECONDS = 10.0  # for all events, logs and nodes together: the release of the GPUs waits for them
NODE_TIMEOUT_SECONDS = 5.0  # for a node: events and logs matter more
MAX_TAILS_OF_OTHERS = 100  # containers of forgotten pods whose lines are kept: each Launcher pod has another name
MAX_UNFOLLOWED_CONTAINERS = 10  # whose logs are read after a failure: those that failed first
MAX_PEERS = 16  # whose logs are read if those show only that a peer was lost


class TailLine(NamedTuple):
    """A log line: the uid of its pod, the number of its container's run, its time in UTC, and its text.

    The uid is empty if the pod was not followed.
    """

    pod_uid: str
    run: int
    time: str
    text: str


class EvidenceCollector:
    """Keeps the last log lines of followed containers, and reads events and other logs when a diagnosis needs them."""

    def __init__(self, context: FollowContext) -> None:
        self._api, self._state, self._cursor, self._log = context.api, context.state, context.cursor, context.log
        self._tails: dict[str, deque[TailLine]] = {}  # by log_key
        self._reports: dict[str, deque[TailLine]] = {}  # of timeouts, by log_key
        self._scanners: dict[str, CauseScanner[TailLine]] = {}  # by log_key
        self._resumed: dict[str, int] = {}  # runs of which an earlier process has read the beginning, by log_key
        self.events = JobEvents(context)

    def recorder(self, source: LogLine) -> Inspect:
        """A function that keeps the last lines of a followed container; the log follower calls it with each line."""
        key, uid = log_key(source.pod, source.container), source.pod_uid
        keep = self._tails.setdefault(key, deque(maxlen=TAIL_LINES)).append
        before = self._cursor.positions.get(Cursor.key(uid, source.container))
        if before is not None and before.last:
            self._resumed[key] = before.restart
        scanned, scanner = -1, CauseScanner[TailLine]()

        def record(text: str, time: str, run: int, is_plain: bool) -> None:
            nonlocal scanned, scanner
            if is_plain and scanner.number >= scanner.reads_until:
                return
            line = TailLine(uid, run, time, ends_of(text))
            keep(line)
            if run != scanned:
                scanned, scanner = run, CauseScanner()
                self._scanners[key] = scanner
                if run > self._resumed.get(key, run):
                    del self._resumed[key]
            scanner.see(line.text, line)
            if is_report(text):
                self._reports.setdefault(key, deque(maxlen=REPORT_LINES)).append(line)

        return record

    def forget_others(self) -> None:
        """Forget the lines of pods that the state doesn't keep, except for the latest MAX_TAILS_OF_OTHERS."""
        if len(self._tails) > MAX_TAILS_OF_OTHERS:
            names = {pod["metadata"]["name"] for pod in self._state.pods.all}
            others = [key for key in self._tails if key.partition("/")[0] not in names]
            for key in others[:-MAX_TAILS_OF_OTHERS]:
                del self._tails[key]
                self._reports.pop(key, None)
                self._scanners.pop(key, None)

    def newest_lines(self) -> dict[str, str]:
        """The last line of each followed pod, by the pod's name."""
        newest: dict[str, TailLine] = {}
        for key, tail in self._tails.items():
            pod = key.partition("/")[0]
            if tail and (pod not in newest or tail[-1].time >= newest[pod].time):
                newest[pod] = tail[-1]
        return {pod: line.text for pod, line in newest.items()}

    def lines_of_run(self, ended: Restart) -> list[str] | None:
        """The last lines of the run of a container that has failed; None if its log is not followed."""
        tail = self._tails.get(log_key(ended.pod, ended.container))
        if tail is None:
            return None
        return _texts(line for line in tail if (line.pod_uid, line.run) == (ended.pod_uid, ended.run))

    async def gather(self, unread: Container[tuple[str, str]], pods: Sequence[Pod]) -> dict[str, Any]:
        """Events, nodes, and the last lines of each container by `log_key`; without what can't be read in time.

        :param unread: pods and containers whose logs were followed, but not read to their end.
        """
        events: list[Object] = []
        nodes: dict[str, Object | None] = dict.fromkeys(nodes_to_read(pods))
        try:
            async with asyncio.timeout(READ_TIMEOUT_SECONDS):
                reads = (self._read_node(nodes, name) for name in nodes)
                await asyncio.gather(self.events.read(events), self._read_tails(unread), *reads)
        except TimeoutError:
            limit = f"{READ_TIMEOUT_SECONDS:.0f} s"
            self._log.warning(
                f"The diagnosis may be incomplete: events and logs of {self._state.ref} were not read within {limit}."
            )
        return {"events": events, "logs": self._logs(), "nodes": [node for node in nodes.values() if node]}

    def _logs(self) -> dict[str, list[str]]:
        return {
            key: _texts(_with_reports(self._reports.get(key, ()), self._causes(key), lines))
            for key, lines in self._tails.items()
        }

    def _causes(self, key: str) -> list[TailLine]:
        scanner = self._scanners.get(key)
        return list(scanner.kept()) if scanner else []

    async def _read_node(self, nodes: dict[str, Object | None], name: str) -> None:
        """Read a node into `nodes`. Most identities lack the right to: a diagnosis can do without."""
        with contextlib.suppress(KtrainError):
            node = await get_if_allowed(self._api, api_paths.nodes(name), timeout=NODE_TIMEOUT_SECONDS)
            nodes[name] = node if isinstance(node, dict) else None

    async def _read_tails(self, unread: Container[tuple[str, str]]) -> None:
        """Read the last lines of containers that failed and whose logs were not followed from beginning to end.

        If they show only that a peer was lost, those of peers whose logs aren't known are read, too.
        """
        missing = []
        for pod in self._state.pods.all:
            for status in containers(pod):
                container = pod["metadata"]["name"], status["name"]
                key = log_key(*container)
                if container in unread and not self._tails.get(key):
                    self._tails.pop(key, None)  # that no line was read doesn't mean that there is none
                is_partly_known = container in unread or key not in self._tails or key in self._resumed
                if (ended_at := _failed_at(status)) and is_partly_known:
                    missing.append((ended_at, pod, status))
        first = sorted(missing, key=itemgetter(0))[:MAX_UNFOLLOWED_CONTAINERS]
        await asyncio.gather(*(self._read_tail(pod, status, unread) for _, pod, status in first))
        peers = silent_peers(self._state.kind, self._state.pods.all, self._logs())[:MAX_PEERS]
        await asyncio.gather(*(self._read_tail(pod, status, unread, is_peer=True) for pod, status in peers))

    async def _read_tail(
        self, pod: Pod, status: Mapping[str, Any], unread: Container[tuple[str, str]], *, is_peer: bool = False
    ) -> None:
        """Read the last lines of a container. Log them unless it was followed, is a sidecar, or has not failed.

        :param is_peer: whether it is read because others have lost a peer. Default: False.
        """
        name, uid, container = pod["metadata"]["name"], pod["metadata"]["uid"], status["name"]
        path = f"{api_paths.core(self._state.ref.namespace, 'pods', name)}/log"
        query = {"container": container, "tailLines": str(UNFOLLOWED_LINES), "timestamps": "true"}
        end, is_cut = bytearray(), False
        if not is_peer and (status.get("state") or {}).get("running"):  # it was restarted: the previous run failed
            query["previous"] = "true"
        try:
            async with self._api.stream(path, query=query, pool="logs", read_timeout=READ_TIMEOUT_SECONDS) as answer:
                async for block in answer.content.iter_any():
                    end += block
                    is_cut |= len(end) > MAX_TAIL_BYTES
                    del end[:-MAX_TAIL_BYTES]
        except (ApiStatusError, ApiUnavailable):
            return
        *whole, unended = bytes(end).split(b"\n")
        parts = whole if is_of_kubelet(unended) else [*whole, unended]
        parts = parts[is_cut:]  # the beginning of a line shows whether it has Secrets, which are to be masked
        kind, job = self._state.kind, self._state.known_job
        role, index = kind.role_of(pod)
        key, scanner = log_key(name, container), CauseScanner[TailLine]()
        known, reports = deque[TailLine](maxlen=TAIL_LINES), deque[TailLine](maxlen=REPORT_LINES)
        for number, part in enumerate(parts, 1):
            time, text = _parted(part.decode(errors="replace"))
            text = masked_trace(text, role, lambda: job)
            if part and (own := own_text(text)) is not None:
                line = TailLine("", 0, time, ends_of(own))
                known.append(line)
                scanner.see(line.text, line)
                if is_report(own):
                    reports.append(line)
            if number % SLICE_LINES == 0:
                await asyncio.sleep(0)
        tail = self._tails.setdefault(key, deque(maxlen=TAIL_LINES))
        tail.clear()
        tail.extend(known)
        self._reports[key], self._scanners[key] = reports, scanner
        followed = self._cursor.has(uid, container) or (name, container) in unread
        if is_peer or followed or not is_followed(kind, job, pod, container):
            return
        log_line, init = LineLogger(self._log, kind), is_init_container(pod, container)
        for line in known:
            log_line(LogLine(name, container, role, index, 0, line.time, line.text, init=init))


def _with_reports(reports: Iterable[TailLine], causes: Sequence[TailLine], tail: deque[TailLine]) -> list[TailLine]:
    """The last lines of a container, after the reports and causes before them that may belong to the same end."""
    if not tail:
        return []
    last, end = tail[-1], epoch_seconds(tail[-1].time)

    def belongs(report: TailLine) -> bool:
        at = epoch_seconds(report.time)
        return report[:2] == last[:2] and (at is None or end is None or at >= end - REPORT_SECONDS)

    kept = [*(report for report in reports if belongs(report)), *(line for line in causes if line[:2] == last[:2])]
    kept = sorted(dict.fromkeys(kept), key=lambda line: line.time)
    return [*(line for line in kept if line not in tail), *tail]


def _texts(lines: Iterable[TailLine]) -> list[str]:
    return [TimedText(clipped(line.text), line.time) for line in lines]


def _parted(line: str) -> tuple[str, str]:
    """Time and text of a line. A line of the kubelet has no time."""
    stamp, _, text = line.partition(" ")
    time = normal_time(stamp)
    return (time, text) if time else ("", line)


def _failed_at(container_status: Mapping[str, Any]) -> str:
    """The time of a container's first failure in its status; empty if it did not fail."""
    ends = failed_runs(container_status, include_recovered=True)
    return min((str(end.get("finishedAt")) for end in ends), default="")
