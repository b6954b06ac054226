"""Follows the log of one container, run after run, as a state machine.

How the log of one container is read:

- A container restarts, and each run has its own log. The kubelet keeps two of them: the newest run's, and the one
  before it as `previous`. So a run must be read to its end before the container restarts twice.
- While a run writes, its log is followed (FOLLOWING). If the stream is cut, the next request resumes from the position
  (`core.logs.cursor`), which skips exactly the lines that were emitted before.
- The end of a stream isn't proof of the end of the log: an API server that loses its kubelet ends a response as if it
  were complete. When the status shows that the run has ended, the rest is read (SETTLING) until nothing is left, which
  is proven in one of two ways. The cheap one: the last lines of the log are the last lines that were read
  (`_tail_is_known`). The other one: a response repeats all known lines and contains no new one (`_is_read_to_end`).
- The status lags behind the container. If another run may begin at any moment, the current log could be the next
  run's: then the follower waits (RESTARTING) until the ended run can only be the previous one, and settles it as that
  (PREVIOUS). If a response doesn't begin with the expected line, nothing of it is emitted before the pod was read
  again: either there is a new run, or the node rotated the log (`_await_new_run`).
- A pod of the same name can be another pod. Whenever a request fails, the pod is read and its uid compared.
- When nothing is left to read, or the final drain has read what there is up to now, the follower is DONE.

Reading never waits for Airflow's log. If that has no room, lines are only inspected, and `backlog_lines` requests them
again from where the log stopped. The cursor has the position up to which lines are logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from airflow_provider_ktrain.core.logs.container_run import Pod, Run, run_of
from airflow_provider_ktrain.core.logs.cursor import Cursor, Position, Replay
from airflow_provider_ktrain.core.logs.selection import is_init_container
from airflow_provider_ktrain.core.text.output import clipped, masked_log
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds
from airflow_provider_ktrain.engine.api import api_paths
from airflow_provider_ktrain.engine.api.client import AbsentError, ApiStatusError, ApiUnavailable, pause_after
from airflow_provider_ktrain.engine.logs.container_state import ObservedContainer, RunProgress, State, next_state
from airflow_provider_ktrain.engine.logs.emitter import RateLimitedEmitter, Tally
from airflow_provider_ktrain.engine.logs.log_line import LogLine
from airflow_provider_ktrain.engine.logs.reader import (
    TAIL_CHECK_BYTES,
    JobLogs,
    LogReader,
    Response,
    ResponseEnd,
    time_of_line,
)

log = masked_log(__name__)

MAX_MISMATCHED_READS = 3  #: Responses without the last known lines before we assume that these are gone from the log.
MAX_UNREADABLE = 6  #: Responses in a row with an error of the kubelet until the rest of a run's log is given up.
TAIL_CHECK_LINES = 5  #: Last lines that are compared with the last lines that were read.
MIN_RETRY_PAUSE_SECONDS, MAX_RETRY_PAUSE_SECONDS = 0.1, 10.0
MAX_DRAIN_RETRY_PAUSE_SECONDS = 1.0  #: Longest pause in the final drain.
CATCH_UP_INTERVAL_SECONDS = 0.05  #: Pause before the position is compared again with the last line.
QUIET_SECONDS = 2.0  #: How long an open stream must have been silent before nothing more is expected of it for now.
FORBIDDEN_PAUSE_SECONDS = 60.0  #: Pause between requests for a log that has been refused (403) for long.
#: How long a status may lag. Until then, a log that begins differently may belong to a new run.
STATUS_LAG_SECONDS = 5.0
#: How long a status may lag if the stream had ended: a loaded node reports restarts 10 to 20 s late.
ENDED_STATUS_LAG_SECONDS = 30.0
#: Size of a run's log from which on it may have been rotated. A kubelet's default is 10 MiB.
ROTATION_BYTES = 1024 * 1024
TIMESTAMP_BYTES = 64  #: How much of a line is requested for its timestamp.
#: How long a request for lines that were inspected before may be silent before it is repeated.
BACKLOG_SILENCE_SECONDS = 10.0


class ContainerFollower:
    """Follows one container of one pod in a task of its own.

    :param forget: called when the pod of the container is gone and its log was read.
    :param behind: called with this follower when the log falls behind: see `backlog_lines`.
    """

    def __init__(
        self,
        job: JobLogs,
        pod: Pod,
        name: str,
        forget: Callable[[ContainerFollower], None],
        behind: Callable[[ContainerFollower], None],
    ) -> None:
        meta = pod["metadata"]
        self.pod: str = meta["name"]
        self.name = name
        self.uid: str = meta["uid"]
        self._job, self._forget, self._behind = job, forget, behind
        self._key = key = Cursor.key(self.uid, name)
        job.cursor.names[key] = f"{self.pod}/{name}"
        known = job.cursor.positions.get(key)
        self._resumed = known is not None and bool(known.last)  # its run may have ended since
        self._position = job.cursor.position(self.uid, name)
        self._progress = RunProgress()
        self.observed = ObservedContainer()
        self._news = asyncio.Event()
        self.path = api_paths.core(meta["namespace"], "pods", self.pod)
        role, index = job.kind.pod_role(meta.get("labels") or {})
        init = is_init_container(pod, name)
        source = LogLine(self.pod, name, role, index, 0, "", "", init=init, pod_uid=self.uid)
        self.emitter = RateLimitedEmitter(
            job.sink, source, job.inspector(source), set_logged=self._set_logged, job=job.known_job, began=job.began
        )
        self._reader = LogReader(job, self.path, name, self.emitter, self.observed)
        self.source = source
        self._failures = 0
        self._finished = False  # the log is read as far as it goes
        self._drained = False
        self.caught_up = False  #: Whether everything was read that had been written when `catch_up` was called.
        self._steps = {
            State.WAITING: self._wait_for_news,
            State.RESUMING: self._resume,
            State.FOLLOWING: self._follow,
            State.RESTARTING: self._await_restart,
            State.SETTLING: self._settle,
            State.PREVIOUS: self._read_previous,
        }
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"log of {self.pod}/{name}")

    def observe(self, run: Run, *, deleted: bool = False) -> None:
        """Record the container's newest run, and the deletion of its pod."""
        observed = self.observed
        if run.restart >= observed.run.restart:  # a watch can be behind what was read here
            observed.run = run
        observed.deletion_reported = observed.deletion_reported or deleted
        observed.deleted = observed.deleted or deleted
        if deleted and (self._finished or self._position.complete):  # nothing is left that another process could read
            self._job.cursor.forget(self.uid, self.name)
        self._news.set()

    def mark_deleted(self) -> None:
        """Record the deletion of the pod."""
        self.observe(self.observed.run, deleted=True)

    def drain(self) -> None:
        """Read what there is up to now, and stop."""
        self.caught_up = False
        self.observed.draining_since = asyncio.get_running_loop().time()
        self._news.set()
        if not self.observed.stream_ends_by_itself:
            self._reader.stop_following()

    async def catch_up(self) -> None:
        """Wait until every line was read that is written now, or the log is read to its end. Reading goes on.

        A last line without a line end is not emitted yet, so an open stream that brings nothing more counts as well.
        """
        loop = asyncio.get_running_loop()
        newest: str | None = None
        read, since = self.emitter.read, loop.time()
        while not (self.caught_up or self.task.done()):
            if newest is None and (last := await self._reader.peek(TIMESTAMP_BYTES, tailLines="1")) is not None:
                newest = time_of_line(last) or ""
                since = loop.time()
            if self.emitter.read != read or not self._reader.is_following:
                read, since = self.emitter.read, loop.time()
            quiet = loop.time() - since > QUIET_SECONDS
            self.caught_up = newest is not None and (self._position.last >= newest or quiet)
            if not self.caught_up:
                await asyncio.sleep(CATCH_UP_INTERVAL_SECONDS)

    def tally(self) -> Tally:
        """What became of the log so far."""
        return replace(self.emitter.tally, complete=self._finished or self._position.complete or self.caught_up)

    @property
    def runs(self) -> bool:
        """Whether the container may write, as far as is known."""
        return self.observed.run.started and not self.observed.stream_ends_by_itself

    def has_read(self, restart: int) -> bool:
        """Whether a line of this run, or of a later one, was read here, or its end."""
        position = self._position
        return position.restart > restart or position.complete or position.at_last > 0

    def read_span(self, restart: int) -> tuple[float, float]:
        """From when until when a run's log was read without a gap, in epoch seconds; zeros: nothing was read."""
        position = self._position
        if position.restart != restart:
            return 0.0, 0.0
        first = max(position.first, self.emitter.gap_until)
        return epoch_seconds(first) or 0.0, epoch_seconds(position.last) or 0.0

    # for lines that are logged later than they were inspected: see `backlog_lines`

    @property
    def is_following(self) -> bool:
        """Whether a stream of the newest run is open."""
        return self._reader.is_following

    def _set_logged(self, position: Position) -> None:
        cursor = self._job.cursor
        cursor.positions[self._key] = position
        if self.emitter.backlog is None:
            cursor.inspected.pop(self._key, None)
        else:
            cursor.inspected[self._key] = self._position
            self._behind(self)

    def query_of(self, restart: int) -> Mapping[str, str] | None:
        """What requests the log of a run; None: the kubelet keeps two of them, and not this one any more."""
        run = self.observed.run
        if restart == run.restart and not run.backing_off:
            return {"follow": "true"} if self.runs and not self.observed.draining else {}
        if restart == run.restart or (restart == run.restart - 1 and not run.backing_off):
            return {"previous": "true"}
        return None

    # the states

    async def _run(self) -> None:
        try:
            await self._read_runs()
        finally:
            self.emitter.report_dropped(self._position)
        if self.observed.deletion_reported:
            self._forget(self)

    async def _read_runs(self) -> None:
        """Read the log, run after run, until nothing is left to read or the API server refuses it for good."""
        try:
            while (state := self._next_state()) is not State.DONE:
                await self._steps[state]()  # one request, or one wait
            await self._finish()
        except ApiStatusError as error:
            self.emitter.gap(f"the log can't be read.\n{error}", self._position)
        except Exception:
            log.exception("The log of %s/%s can't be followed any longer", self.pod, self.name)

    def _next_state(self) -> State:
        return next_state(self.observed, self._position, resumed=self._resumed, drained=self._drained)

    async def _resume(self) -> None:
        self._resumed = False
        await self.read_pod()

    async def _follow(self) -> None:
        run = self.observed.run
        response = await self._request(follow="true")
        self._finished = response.end is ResponseEnd.COMPLETE
        self._progress.unended_line = response.unended_line if self._finished else None
        if response.end in (ResponseEnd.COMPLETE, ResponseEnd.NO_LOG):  # it has probably ended
            await self._expect_change(run, 1)

    async def _await_restart(self) -> None:
        await self._expect_change(self.observed.run, 5)

    async def _settle(self) -> None:
        run, position = self.observed.run, self._position
        query = {"previous": "true"} if run.backing_off else {}
        if not (run.ended and await self._tail_is_known(**query)):
            response = await self._request(**query)
            gives_up = response.end is ResponseEnd.NO_LOG or self._gives_up(response)
            if not (gives_up or await self._is_read_to_end(response, once=not run.ended, **query)):
                return
        self._finished = True
        position.complete = run.ended
        self._drained = not run.ended

    async def _read_previous(self) -> None:
        """The container has restarted: read the rest of the run before the newest one, then begin the newest one."""
        run, position = self.observed.run, self._position
        previous = run.restart - 1
        if run.never_began:
            self._begin(run.restart)
        elif position.restart < previous:
            if not position.complete or position.restart + 1 < previous:
                self.emitter.gap(
                    f"logs of runs before run {previous} may be missing: the kubelet keeps one previous run", position
                )
            self._begin(previous)
        elif position.complete or await self._tail_is_known(previous="true"):
            self._begin(run.restart)
        else:
            # in a back-off, `previous` is the newest run already, and the one before it is out of reach
            response = None if run.backing_off else await self._request(previous="true")
            if response is None or response.end is ResponseEnd.NO_LOG:
                self.emitter.gap(f"lines of run {previous} may be missing: the kubelet no longer has its log", position)
                self._begin(run.restart)
            elif self._gives_up(response) or await self._is_read_to_end(response, previous="true"):
                self._begin(run.restart)

    def _gives_up(self, response: Response) -> bool:
        """Whether the kubelet has failed again and again to read the log of this run. What is left of it is a gap."""
        if self._progress.unreadable < MAX_UNREADABLE:
            return False
        why, position = clipped(response.unended_line.decode(errors="replace")), self._position
        restart = position.restart
        self.emitter.gap(f"lines of run {restart} may be missing: the kubelet can't read its log.\n{why}", position)
        return True

    def _begin(self, restart: int) -> None:
        self._position, self._progress = Position(restart), RunProgress()
        if self.emitter.backlog is None:
            self._job.cursor.positions[self._key] = self._position
        else:
            self.emitter.backlog.begin(self._position)
            self._job.cursor.inspected[self._key] = self._position

    async def _finish(self) -> None:
        """Nothing is left to read: the run has ended, or the pod was deleted."""
        position = self._position
        if not self.observed.deleted or self._drained:
            self._finished = True
        elif self.observed.run.started and not (position.complete or self._finished):
            self.emitter.gap("the pod was deleted before its log was read to the end", position)
        elif not position.complete:
            await self._emit_unended_line()

    # whether a run was read to its end

    async def _tail_is_known(self, **query: str) -> bool:
        """Whether the last lines of a run that has ended are those that were read last.

        This avoids a second download of what was written in the last seconds, which can be much. It is tried once per
        COMPLETE response. Last lines that are all the same prove nothing.
        """
        progress = self._progress
        if progress.unended_line is None or not progress.tail:
            return False
        known, progress.tail = progress.tail, b""
        last = await self._reader.peek(TAIL_CHECK_BYTES + 1, tailLines=str(TAIL_CHECK_LINES), **query) or b""
        lines = last.split(b"\n")
        if not last or not known.endswith(last):
            return False
        if len(lines) > TAIL_CHECK_LINES and len(set(lines[:TAIL_CHECK_LINES])) == 1:
            return False
        await self._close_run(**query)
        return True

    async def _is_read_to_end(self, response: Response, *, once: bool = False, **query: str) -> bool:
        """Whether a response to a request that was made after the end of a run shows that nothing is left to read.

        A server that loses its kubelet ends a response as if it were complete. So a response counts only if it repeats
        what is known and brings nothing new.

        :param once: whether any complete response is enough, because the run goes on.
        """
        if response.end is not ResponseEnd.COMPLETE:
            return False
        progress = self._progress
        same = response.unended_line == progress.unended_line and not response.new_lines
        progress.unended_line = response.unended_line
        progress.reads_without_news = 0 if response.new_lines else progress.reads_without_news + 1
        confirmed = response.caught_up or progress.reads_without_news > MAX_MISMATCHED_READS
        if not once and not (same and confirmed):
            return False
        await self._close_run(**query)
        return True

    async def _close_run(self, **query: str) -> None:
        """Everything was read: emit a last line without a line end, and report where lines may still be missing."""
        await self._emit_unended_line()
        position = self._position
        self.emitter.report_dropped(position)
        if self._progress.size < ROTATION_BYTES:
            return
        first = time_of_line(await self._reader.peek(TIMESTAMP_BYTES, **query) or b"")
        if first is not None and first > position.first:
            self.emitter.gap(
                f"lines before {first} may be missing: the node rotated the log while it was followed, and the stream "
                "may have skipped the end of the old file",
                position,
            )

    async def _emit_unended_line(self) -> None:
        if self._progress.unended_line:
            await self.emitter.emit(self._progress.unended_line, Replay.after(self._position))

    # requests and waits

    async def _request(self, **query: str) -> Response:
        """Make one request. If it fails, the pod is read again before this returns."""
        progress = self._progress
        any_start, progress.any_start = progress.any_start, False
        response = await self._reader.read(self._position, query, any_start=any_start)
        progress.size += response.size
        if response.new_lines:
            self._failures = 0
        if response.end is ResponseEnd.OTHER_LOG:
            await self._await_new_run()
            return response
        progress.tail = response.tail
        progress.unreadable = progress.unreadable + 1 if response.end is ResponseEnd.UNREADABLE else 0
        if response.end in (ResponseEnd.CUT, ResponseEnd.UNREADABLE):
            self._failures += 1
            if self._reader.retries_slowly and not self.observed.draining:
                await self._wait_for_news(FORBIDDEN_PAUSE_SECONDS)
            elif self._failures > 1:
                draining = self.observed.draining
                await self._back_off(MAX_DRAIN_RETRY_PAUSE_SECONDS if draining else MAX_RETRY_PAUSE_SECONDS)
            await self.read_pod()
        return response

    async def _back_off(self, longest: float = MAX_RETRY_PAUSE_SECONDS) -> None:
        await asyncio.sleep(pause_after(max(self._failures - 1, 1), MIN_RETRY_PAUSE_SECONDS, longest))

    async def _await_new_run(self) -> None:
        """Find out why a response doesn't begin with the expected line.

        Either it is the log of another run, which the pod's status doesn't show yet, or the node rotated the log. If no
        other run shows in time, the log was rotated, and the next response is accepted.
        """
        run, loop = self.observed.run, asyncio.get_running_loop()
        until = loop.time() + (ENDED_STATUS_LAG_SECONDS if self._finished else STATUS_LAG_SECONDS)
        while self.observed.run == run and not self.observed.deleted and loop.time() < until:
            await self.read_pod()
            if self.observed.run == run:
                await self._wait_for_news(1)
        self._progress.any_start = self.observed.run == run

    async def read_pod(self) -> None:
        """Read the pod: is it still the one that is followed, and which run is its newest?"""
        while not self.observed.deleted:
            try:
                pod = await self._job.api.request("GET", self.path)
            except AbsentError:
                self.observed.deleted = True
            except ApiStatusError as error:
                if not error.transient and error.status != 401:
                    return  # no right to read pods: the watch must do
            except ApiUnavailable:
                pass
            else:
                self.observed.deleted = pod["metadata"]["uid"] != self.uid
                if not self.observed.deleted:
                    self.observe(run_of(pod, self.name))
                return
            self._failures += 1
            await self._back_off()

    async def _expect_change(self, run: Run, seconds: float) -> None:
        """Wait for another status of a run that has probably changed; if none is observed in time, read the pod."""
        if self.observed.run == run:
            await self._wait_for_news(seconds)
        if self.observed.run == run:
            await self.read_pod()

    async def _wait_for_news(self, seconds: float | None = None) -> None:
        """Wait until something is observed, at most that many seconds. Default: no limit."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
