"""The result that the primary prints. What nobody has read of it is read from the primary's log at the end."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.formats import mapping
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.logs.result import (
    EARLIER,
    MARKER_PREFIX,
    METRICS_UNKNOWN,
    PART_MARKER,
    UNKNOWN,
    find_result,
    keep_result_line,
)
from airflow_provider_ktrain.core.state.steps.training_metrics import METRIC_MARKER, TrainingMetrics
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds, timestamp
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import JobRead, Log
from airflow_provider_ktrain.engine.api.request_errors import retry_transient
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.deferral import Handover
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.single_read import read_log
from airflow_provider_ktrain.engine.logs.stream_budget import StreamBudget, process_budget

#: Time to read one log, even if the API server can't be reached: the release of the GPUs waits for it.
READ_SECONDS = 20.0
#: How many last lines of the primary are searched for a result if its log was not followed to its end: more if the
#: first ones have none.
LAST_LINES = (1_000, 100_000)
#: Size of one response. From the second of the result line on, this is enough: no later line before the handover has a
#: result, or its first part.
MAX_READ_BYTES = 32 * 1024 * 1024


class _Part(NamedTuple):
    """What was read of a log.

    :param whole: whether nothing was cut off at its end.
    :param time: when its last line with a result was written; "" without one.
    """

    result_line: str
    lines: int
    whole: bool
    time: str


class PrimaryResult:
    """The last result line of the primary replica."""

    def __init__(self, context: FollowContext, budget: StreamBudget) -> None:
        self._api, self._state, self._cursor, self._budget = context.api, context.state, context.cursor, budget
        handover = context.state.handover
        self._before = handover.result_line  # of lines before those that are read here in their order
        self._found = ""  # of these lines
        #: Where the log has the result: `pod`, `container`, and `time` of the line, or of the first numbered one.
        self.origin = {name: str(value) for name, value in mapping(handover.result_from).items()}
        self._left_out = bool(self.origin) and not self._before  # the handover had no room for the line
        self._unread = ""  # why the log of the primary may have a result that wasn't found
        self._uninspected = ""  # why lines that were read may have a result that wasn't found
        self._may_be_earlier = False  # whether that result would be later than the one that was found
        self._metrics_unread = ""  # why the log of the primary may have metrics that weren't found
        #: Metrics that `read_metrics` has found, as `TrainingMetrics.summary`.
        self.metrics: dict[str, dict[str, Any]] = {}

    @property
    def line(self) -> str:
        """See `core.logs.result.keep_result_line`; "" if there is none."""
        return _line_of(self._before, self._found)

    def take(self, source: LogLine, text: str, written: str, *, earlier: bool = False) -> None:
        """Take one line of the primary.

        :param earlier: whether it was written before all lines that were not. Default: False.
        """
        if MARKER_PREFIX not in text or self._is_late(source.pod_uid):
            return
        before = self.line
        if earlier:
            self._before = keep_result_line(self._before, text)
        else:
            self._found = keep_result_line(self._found, text)
        if self.line != before and not self._left_out and not (before and self.line.startswith(before)):
            self.origin = {"pod": source.pod, "container": source.container, "time": written} if written else {}

    def mark_incomplete(self, source: LogLine) -> None:
        """Record that a line of the primary could not be inspected."""
        self._uninspected = f"a line of {self._state.kind.replica_name(source.role, source.index)} could not be read"

    def _is_late(self, uid: str) -> bool:
        """Whether a pod is known that was created after the job's end: its program is another one than that end's."""
        known = any(pod["metadata"]["uid"] == uid for pod in self._state.pods.all)
        return known and not any(pod["metadata"]["uid"] == uid for pod in self._state.pods_of_training)

    async def complete(
        self, unread_logs: Container[tuple[str, str]], unread_before: Container[tuple[str, str]] = ()
    ) -> None:
        """Read what nobody has read: a line that was left out, and the end of a log. The pods still exist.

        :param unread_logs: pods and containers whose logs were followed, but not read to their end.
        :param unread_before: those of which lines between the handover and a takeover were not read. Default: none.
        """
        if self._left_out:
            await self._read_left_out()
        state, (newest, name, container) = self._state, self._primary()
        queries = list[dict[str, str]]()
        if newest is not None:
            tails = [{"tailLines": str(number)} for number in LAST_LINES]
            if (name, container) in unread_before and (not self._found or self._found.startswith(PART_MARKER)):
                queries = [{"sinceTime": timestamp(state.handover.handed_over_at)}, *tails]
            elif self._cursor.has(newest["metadata"]["uid"], container) and (name, container) not in unread_logs:
                return
            elif newest["metadata"]["uid"] in state.pods.groups.pods:  # else its name may be that of a later pod
                queries = tails
        replica = self._replica
        unread = _not_read(replica)
        for query in queries:
            part = await self._search(name, container, query)
            if part is None:
                unread = _not_read(replica)
                break
            if part.whole and (part.result_line or part.lines < float(query.get("tailLines", "inf"))):
                before, self._found = self._found, _later(self._found, part.result_line)
                if self._found != before:
                    self.origin = {"pod": name, "container": container, "time": part.time}
                return
            if part.whole:
                unread = f"the last {part.lines:,} lines of the log of {replica} have none"
        self._unread, self._may_be_earlier = unread, bool(queries)

    async def read_metrics(self, names: set[str], unread_logs: Container[tuple[str, str]]) -> None:
        """Read the last values of metrics, unless the log of the primary was followed to its end."""
        pod, name, container = self._primary()
        metrics, most, part = TrainingMetrics(), LAST_LINES[-1], None
        if pod is not None:
            if self._cursor.has(pod["metadata"]["uid"], container) and (name, container) not in unread_logs:
                return
            part = await self._search(name, container, {"tailLines": str(most)}, metrics)
        self.metrics = {name: one for name, one in metrics.summary().items() if name in names}
        if part is None or not part.whole:
            self._metrics_unread = _not_read(self._replica)
        elif part.lines >= most and names - self.metrics.keys():
            self._metrics_unread = f"the last {most:,} lines of the log of {self._replica} lack some"

    def _primary(self) -> tuple[Object | None, str, str]:
        """The newest pod of the primary, its name and that of its main container."""
        state, kind = self._state, self._state.kind
        primary = kind.primary(state.known_job), 0
        pods = [pod for pod in state.pods_of_training if kind.role_of(pod) == primary]
        if not pods:
            return None, "", ""
        newest = max(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        return dict(newest), newest["metadata"]["name"], kind.main_container_name(state.known_job, newest)

    @property
    def _replica(self) -> str:
        return self._state.kind.replica_name(self._state.kind.primary(self._state.known_job), 0)

    def find(self) -> tuple[Any, str, bool]:
        """The result, what is wrong with it, and whether the program reported one: see `core.logs.result`."""
        state = self._state
        value, error, reported = find_result(state.kind, state.known_job, state.pods_of_training, self.line)
        unread = self._unread or self._uninspected
        if not reported and unread:
            return None, f"{UNKNOWN}{unread}", False
        if self._may_be_earlier or self._uninspected:
            error = "\n".join(filter(None, (error, f"{EARLIER}{unread}")))
        if self._metrics_unread:
            error = "\n".join(filter(None, (error, f"{METRICS_UNKNOWN}{self._metrics_unread}")))
        return value, error, reported

    def printed_before(self, at: float) -> bool:
        """Whether the program has printed its result before `at`, in epoch seconds. A signal handler's is later."""
        printed = epoch_seconds(self.origin.get("time"))
        return printed is not None and printed < at and self.find()[2]

    @classmethod
    async def read(cls, api: Api, ref: JobRef, read: JobRead, log: Log) -> tuple[Any, str, bool]:
        """As `find`, of a job that has ended and that nobody follows: from the pods that were kept."""
        state = JobState(ref, Handover())
        state.job = {} if read.job is ABSENT else read.job
        state.pods.update({pod["metadata"]["uid"]: pod for pod in read.pods}, (), timing.utc_now())
        result = cls(FollowContext(api, state, log), process_budget())
        await result.complete(())
        return result.find()

    async def _read_left_out(self) -> None:
        """Read the line from the log of the container's newest run, or of the one before it."""
        pod, container = self.origin.get("pod", ""), self.origin.get("container", "")
        since = {"sinceTime": f"{self.origin.get('time', '')[:19]}Z"}
        for run in ({}, {"previous": "true"}):
            if (part := await self._search(pod, container, {**since, **run})) and part.result_line:
                self._before = _later(part.result_line, self._before)
                return
        self._unread = _not_read(pod)

    async def _search(
        self, pod: str, container: str, query: Mapping[str, str], metrics: TrainingMetrics | None = None
    ) -> _Part | None:
        """The part of a log that `query` selects; None if it can't be read.

        :param metrics: takes those of its lines. Default: none.
        """
        query = {"container": container, "timestamps": "true", "limitBytes": str(MAX_READ_BYTES), **query}
        try:
            async with asyncio.timeout(READ_SECONDS):
                return await retry_transient(lambda: self._read(pod, query, metrics), timing.now() + READ_SECONDS)
        except (TimeoutError, ApiStatusError, ApiUnavailable):
            return None

    async def _read(self, pod: str, query: Mapping[str, str], metrics: TrainingMetrics | None) -> _Part:
        found, number, time = "", 0, ""

        def take(block: bytes) -> None:
            nonlocal found, number, time
            found, time = _kept(found, block), _time_of_result(block) or time
            number += block.count(b"\n") + 1
            _read_metrics(metrics, block)

        size = await read_log(self._api, self._budget, self._state.ref.namespace, pod, query, take)
        return _Part(found, number, size < MAX_READ_BYTES, time)


def _not_read(name: str) -> str:
    return f"the log of {name} could not be read to its end"


def _time_of_result(block: bytes) -> str:
    """When the last line with a marker was written; "" if there is none."""
    before, marker, _ = block.rpartition(MARKER_PREFIX.encode())
    return before.rpartition(b"\n")[2].partition(b" ")[0].decode("utf-8", "replace") if marker else ""


def _read_metrics(metrics: TrainingMetrics | None, block: bytes) -> None:
    if metrics is not None and METRIC_MARKER.encode() in block:
        for line in block.decode("utf-8", "replace").split("\n"):
            metrics.read_line("", line, 0.0)


def _kept(found: str, block: bytes) -> str:
    return _later(found, block.decode("utf-8", "replace")) if MARKER_PREFIX.encode() in block else found


@functools.lru_cache(maxsize=64)  # it is asked for at each line with a marker, and what is held is read for it
def _line_of(before: str, found: str) -> str:
    return _later(before, found) if found else before


def _later(held: str, lines: str) -> str:
    return functools.reduce(keep_result_line, lines.split("\n"), held)
