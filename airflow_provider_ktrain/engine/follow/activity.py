"""Reads the logs of all replicas before `log_stall_timeout` or `progress_timeout` ends a job.

That no line was read doesn't prove that none was written: the replica may not be followed, or its stream may be cut or
behind. So each replica's newest lines since the clock began are requested, until one shows that the clock must move.

A kubelet serves only the newest file of a log that it has rotated. Where the file begins after the clock did, what was
before may have been a step, and the clock moves to the first line that is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.errors import KtrainError
from airflow_provider_ktrain.core.logs.activity import Container, containers_to_read, timed_lines
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.state.limits import Clock, Limit
from airflow_provider_ktrain.core.text.timestamps import timestamp
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError
from airflow_provider_ktrain.engine.follow.context import FollowContext
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.logs.single_read import read_log

LOG_LIMITS = (Limit.LOG_STALL, Limit.PROGRESS)  #: Limits that act only if the logs of all replicas confirm them.
CONCURRENT_READS = 16
LOOK_SECONDS = 60.0  #: Time to look at all logs together.
TAIL_LINES, TAIL_BYTES = 200, 64 * 1024  #: Size of the first request for a log.
#: Size of a request for everything since the clock began. A kubelet's log file has 10 MiB.
REST_BYTES = 32 * 1024 * 1024
FIRST_LINE_BYTES = 64  #: Enough for the timestamp of a line.
UNREADABLE_SECONDS = 10.0  #: How long logs must be unreadable until this is logged.


class ActivityProbe:
    """Decides whether the logs of all replicas confirm that a clock of LOG_LIMITS has expired."""

    def __init__(self, context: FollowContext, output: JobOutput) -> None:
        self._api, self._state, self._log, self._output = context.api, context.state, context.log, output
        #: Replicas that the last look did not read, for the cause's detail. Empty if it read all.
        self.unread_replicas = ""
        self._wrote: dict[Container, bool] = {}
        self._unreadable_since: float | None = None  # monotonic
        self._warned = False

    async def confirms(self, clock: Clock) -> bool | None:
        """Read what the replicas wrote since the clock began, until a line or step moves the clock.

        :param clock: an expired clock of one of LOG_LIMITS, as `core.state.limits.clocks` returned it. The job and its
            pods were read after that; the job has not ended.
        :return: whether nothing was written, so that the limit may act. None: this can't be found out now. A request
            that fails raises nothing.
        """
        job = self._state.known_job
        search = _Search(self._api, self._output, self._state.ref.namespace, clock, self._wrote)
        selection = containers_to_read(self._state.kind, job, self._state.pods.live, search.since)
        self.unread_replicas = selection.left_out
        self._output.restart_clock(clock.limit, selection.last_start)
        self._output.training_metrics.read_trainer_status(job)
        await search.read(selection.containers)
        if search.moved:
            self._unreadable_since = None
            return False
        if search.failed:
            self._report_unreadable(clock)
            return None
        self._unreadable_since = None
        # between two runs of a container, nothing could write; after the last run, nothing will
        could_write = any(not container.ended for container in selection.containers)
        return True if could_write or self._state.ended_primary is not None else None

    def _report_unreadable(self, clock: Clock) -> None:
        """Log once that `log_stall_timeout` or `progress_timeout` has passed, and logs can't be read to confirm it."""
        now = timing.now()
        self._unreadable_since = self._unreadable_since or now
        if not self._warned and now - self._unreadable_since >= UNREADABLE_SECONDS:
            self._warned = True
            what = "log line" if clock.limit is Limit.LOG_STALL else "progress"
            self._log.warning(
                f"{self._state.ref} may have hung: no {what} was read for {clock.seconds:.0f} s ({clock.limit}).\n"
                "The job is not released, because its latest log lines can't be read."
            )


@dataclass
class _Response:
    """One response to a request for a log.

    :param first, newest: times of lines, in epoch seconds; 0 without lines.
    """

    first: float = 0.0
    newest: float = 0.0
    lines: int = 0
    size: int = 0


class _Search:
    """One look for a line or step that was written since a clock began.

    :param wrote: whether the file of a container is known to have had lines, over all looks.
    """

    def __init__(self, api: Api, output: JobOutput, namespace: str, clock: Clock, wrote: dict[Container, bool]) -> None:
        self._api, self._output, self._namespace, self._wrote = api, output, namespace, wrote
        self._limit, self._due = clock.limit, clock.due
        self.since = clock.due - clock.seconds
        self.failed = False  #: Whether a log could not be read.

    @property
    def moved(self) -> bool:
        """Whether the clock began later than it did before."""
        return self._output.clock_began(self._limit) > self.since

    async def read(self, containers: Sequence[Container]) -> None:
        """Read the logs one after the other, CONCURRENT_READS at a time, until the clock has moved."""
        left = iter(containers)

        async def read_on() -> None:
            for container in left:
                if self.moved:
                    return
                try:
                    await self._look_at(container)
                except KtrainError as e:
                    gone = container.ended and isinstance(e, ApiStatusError) and e.status in (400, 404)
                    self.failed = self.failed or not gone

        try:
            async with asyncio.timeout(LOOK_SECONDS), asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENT_READS, len(containers))):
                    group.create_task(read_on())
        except TimeoutError:
            self.failed = True

    async def _look_at(self, container: Container) -> None:
        since = {"sinceTime": timestamp(self.since)}
        tail = await self._request(container, TAIL_BYTES, **since, tailLines=str(TAIL_LINES))
        read_until = self._read_until(container)
        wrote = self._wrote.setdefault(container, read_until > 0)
        self._wrote[container] = wrote or tail.lines > 0
        if self.moved:
            return
        cut, known = tail.size >= TAIL_BYTES, max(read_until, self.since)
        if known >= self._due or (tail.lines and not cut and tail.newest <= known):
            return
        if cut or tail.lines >= TAIL_LINES // 2:  # a long line counts as several
            rest = await self._request(container, REST_BYTES, **since)
            self.failed = self.failed or rest.size >= REST_BYTES
        if self._wrote[container] and not self.moved:
            await self._check_beginning(container, known)

    def _read_until(self, container: Container) -> float:
        """Until when the follower has read all lines since the clock began, in epoch seconds; 0: it has not."""
        first, last = self._output.follower.read_span(container.uid, container.name, container.run)
        return last if 0 < first <= self.since else 0.0

    async def _check_beginning(self, container: Container, known: float) -> None:
        """Move the clock to the first line that is left if lines after `known` may have been rotated away.

        An empty file of a container that has written was just rotated: then the clock moves to now.
        """
        first = (await self._request(container, FIRST_LINE_BYTES)).first
        if not first or first > known:
            self._wrote[container] = first > 0
            self._output.restart_clock(self._limit, first or timing.epoch())

    async def _request(self, container: Container, limit_bytes: int, **query: str) -> _Response:
        """Request lines and take from them what moves the clock."""
        query |= {"container": container.name, "timestamps": "true", "limitBytes": str(limit_bytes)}
        found, budget = _Response(), self._output.follower.budget
        found.size = await read_log(
            self._api, budget, self._namespace, container.pod, query, lambda block: self._take(container, block, found)
        )
        return found

    def _take(self, container: Container, block: bytes, found: _Response) -> None:
        for at, text in timed_lines(block):
            found.first = found.first or at
            found.newest = max(found.newest, at)
            found.lines += 1
            own = own_text(text)
            if at <= self.since or own is None:
                continue
            if self._limit is Limit.LOG_STALL:
                self._output.restart_clock(self._limit, at)
            else:
                self._output.training_metrics.read_step(container.replica, own, at)
