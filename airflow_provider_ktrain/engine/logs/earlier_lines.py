"""Lines of one container between the handover and a takeover by another triggerer, which may have logged them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from airflow_provider_ktrain.core.logs.cursor import Position, Replay
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.logs.container_follower import (
    BACKLOG_SILENCE_SECONDS,
    MAX_MISMATCHED_READS,
    TIMESTAMP_BYTES,
    ContainerFollower,
)
from airflow_provider_ktrain.engine.logs.emitter import EarlierEmitter, EndReached, Inspect, Tally
from airflow_provider_ktrain.engine.logs.reader import JobLogs, LogReader, ResponseEnd, time_of_line

PAUSE_SECONDS = 1.0  #: Pause after a request that failed.
#: A node's clock may be behind that of this host by so much: it may still write lines with times before the takeover.
MAX_CLOCK_LAG_SECONDS = 60.0
CLOCK_LAG_PAUSE_SECONDS = 5.0  #: Pause between two requests for such lines.


class EarlierLines:
    """Reports in them are read. The last ones are logged again, marked, and all others are counted.

    :param inspect: is called with each of these lines that may be a report: see `EarlierEmitter`.
    :param position: that was handed over.
    :param restart: the run that the container had at the takeover.
    :param until: when the takeover was, as `core.logs.cursor.normal_time` returns it.
    """

    def __init__(
        self, job: JobLogs, container: ContainerFollower, inspect: Inspect, position: Position, restart: int, until: str
    ) -> None:
        self._container, self._position, self._restart = container, position, restart
        self.key = container.pod, container.name
        self.emitter = EarlierEmitter(
            job.sink,
            replace(container.source, again=True),
            inspect,
            until=until,
            restart=restart,
            job=job.known_job,
            began=job.began,
        )
        self._reader = LogReader(
            job, container.path, container.name, self.emitter, container.observed, silence=BACKLOG_SILENCE_SECONDS
        )
        self.is_started = False  #: Whether it is known where the last lines begin.
        self.is_done = False
        self._complete = False
        self._may_grow_until = asyncio.get_running_loop().time() + MAX_CLOCK_LAG_SECONDS
        self._misses = 0
        # by the loop's time
        self._paused_until = 0.0
        self._look_again_at = 0.0  # for lines that the container may still write

    @property
    def can_read(self) -> bool:
        """Whether there is so much room in the log that a request is worth while, and the last one has not failed."""
        has_room, now = self.emitter.queue.is_low or not self.emitter.logs, asyncio.get_running_loop().time()
        waits_for_lines = now < self._look_again_at and self._may_grow
        return has_room and now >= self._paused_until and not waits_for_lines

    @property
    def _may_grow(self) -> bool:
        """Whether the container may still write lines with times before the takeover, by its node's clock."""
        container = self._container
        writes = container.runs and not container.observed.draining and not container.has_read(self._restart)
        return writes and asyncio.get_running_loop().time() < self._may_grow_until

    def tally(self) -> Tally:
        """What became of the lines so far. Where some are missing, their number isn't known."""
        tally = self.emitter.tally
        return replace(tally, complete=self._complete and not tally.gaps)

    async def start(self, lines: int) -> None:
        """Find out where the last lines begin."""
        self.is_started = True
        first = await self._first_of(self._restart, lines)
        has_restarted = first is not None and self._position.restart < self._restart
        if has_restarted and first == await self._first_of(self._restart):
            first = await self._first_of(self._restart - 1, lines) or first
        if first is not None:
            self.emitter.again_from = first

    async def _first_of(self, restart: int, lines: int | None = None) -> str | None:
        """The time of a run's first line, or of the first one of its last ones; None if there is none."""
        query = self._query_of(restart) or {}
        tail = {} if lines is None else {"tailLines": str(lines)}
        return time_of_line(await self._reader.peek(TIMESTAMP_BYTES, **query, **tail) or b"")

    def _query_of(self, restart: int) -> dict[str, str] | None:
        query = self._container.query_of(restart)
        return None if query is None else {name: value for name, value in query.items() if name != "follow"}

    async def read(self) -> None:
        """Make one request. Reading stops when the log has no more room, or at the time of the takeover."""
        position = self._position
        if position.complete:
            self._next_run()
            return
        query, may_grow = self._query_of(position.restart), self._may_grow
        if query is None:
            self._miss_run()
            return
        try:
            response = await self._reader.read(position, query, any_start=self._misses > 0)
            if response.end is ResponseEnd.COMPLETE and response.unended_line and position.restart < self._restart:
                await self.emitter.emit(response.unended_line, Replay.after(position))
        except EndReached:
            self._complete = self.is_done = self.emitter.ended
            return
        except ApiStatusError as error:
            self.emitter.gap(f"the log can't be read.\n{error}", position)
            self.is_done = True
            return
        is_of_run = response.caught_up or not position.base.first
        if response.end is ResponseEnd.COMPLETE and is_of_run:
            if position.restart >= self._restart and may_grow:
                self._complete = True  # as far as is known
                self._look_again_at = asyncio.get_running_loop().time() + CLOCK_LAG_PAUSE_SECONDS
            else:
                self._next_run()
        elif response.end is ResponseEnd.CUT and not self._container.observed.deleted:  # the lines are still there
            self._paused_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
        elif response.end is not ResponseEnd.STOPPED:
            self._misses += 1
            self._paused_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
            if self._misses > MAX_MISMATCHED_READS or self._container.observed.deleted:
                self._miss_run()

    def _next_run(self) -> None:
        """This run was read: go on with the next one of which the kubelet has the log; it keeps two."""
        run = self._position.restart
        if run >= self._restart:
            self._complete = self.is_done = True
            return
        if run < self._restart - 2:
            self.emitter.gap(f"logs of runs before run {self._restart - 1} may be missing", self._position)
        self._position, self._misses = Position(max(run + 1, self._restart - 1)), 0

    def _miss_run(self) -> None:
        """The kubelet has no log of this run."""
        run = self._position.restart
        if run >= self._restart:
            self.is_done = True
            return
        self.emitter.gap(f"lines of run {run} may be missing: the kubelet no longer has its log", self._position)
        self._next_run()
