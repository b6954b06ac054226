"""Lines of one container that were inspected when Airflow's log had no room, and are logged when it has some again."""

from __future__ import annotations

import asyncio

from airflow_provider_ktrain.core.logs.backlog import Backlog
from airflow_provider_ktrain.core.logs.cursor import Replay
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine.api.client import ApiStatusError
from airflow_provider_ktrain.engine.logs.container_follower import (
    BACKLOG_SILENCE_SECONDS,
    ENDED_STATUS_LAG_SECONDS,
    MAX_MISMATCHED_READS,
    ContainerFollower,
)
from airflow_provider_ktrain.engine.logs.emitter import EndReached
from airflow_provider_ktrain.engine.logs.reader import JobLogs, LogReader, ResponseEnd

NOTICE_SECONDS = 60.0  #: Time between two messages about how far the log is behind.
PAUSE_SECONDS = 1.0  #: Pause after a request that brought no line.


class BacklogLines:
    """They are requested again, from where the log stopped, and logged without being inspected once more."""

    def __init__(self, job: JobLogs, container: ContainerFollower) -> None:
        self._container, self._emitter = container, container.emitter
        self._reader = LogReader(
            job,
            container.path,
            container.name,
            container.emitter,
            container.observed,
            emit=container.emitter.log_again,
            silence=BACKLOG_SILENCE_SECONDS,
        )
        self._paused_until = 0.0  # by the loop's time
        self._misses = 0  # requests in a row that brought no line
        self._said_at = 0.0

    @property
    def can_read(self) -> bool:
        """Whether there is so much room in the log that a request is worth while, and the last one has not failed."""
        return self._emitter.queue.is_low and asyncio.get_running_loop().time() >= self._paused_until

    async def read(self) -> None:
        """Make one request. Reading stops when the log has no more room, or has caught up."""
        backlog, container = self._emitter.backlog, self._container
        if backlog is None or self._emitter.has_caught_up():
            return
        self._say_how_far_behind(backlog)
        run, ended = container.observed.run, False
        query = container.query_of(backlog.logged.restart)
        if query is None or container.observed.deleted:
            gone = "the pod was deleted" if container.observed.deleted else "the kubelet no longer has this log"
            self._give_up(f"{gone} before there was room in Airflow's log")
            return
        # an open stream shows that this is still the log of the same run
        same_run = container.is_following and backlog.inspected.restart == backlog.logged.restart
        patience = MAX_MISMATCHED_READS if same_run else ENDED_STATUS_LAG_SECONDS
        any_start = run.final or self._misses >= patience
        moved = backlog.logged.last, backlog.logged.at_last, backlog.logged.base.count
        try:
            response = await self._reader.read(backlog.logged, query, any_start=any_start)
            ended = response.end is ResponseEnd.COMPLETE
            if ended and response.caught_up and response.unended_line:
                await self._emitter.log_again(response.unended_line, Replay.after(backlog.logged))
        except EndReached:
            self._misses = 0
            return
        except ApiStatusError as error:
            self._give_up(f"the log can't be read.\n{error}")
            return
        if self._emitter.has_caught_up() or response.end is ResponseEnd.STOPPED:
            return
        if moved != (backlog.logged.last, backlog.logged.at_last, backlog.logged.base.count):
            self._misses = 0
            return
        self._misses += 1
        self._paused_until = asyncio.get_running_loop().time() + PAUSE_SECONDS
        if response.end is ResponseEnd.CUT:
            await container.read_pod()
        elif (ended or response.end is ResponseEnd.NO_LOG) and self._misses > MAX_MISMATCHED_READS:
            self._give_up("the node removed them before there was room in Airflow's log")

    def _give_up(self, why: str) -> None:
        self._misses = 0
        self._emitter.give_up_run(why)
        self._emitter.has_caught_up()

    def _say_how_far_behind(self, backlog: Backlog) -> None:
        """Say once in a while how far the log is behind."""
        now = asyncio.get_running_loop().time()
        if not self._said_at:
            self._said_at = now
        elif now - self._said_at >= NOTICE_SECONDS:
            self._said_at = now
            self._emitter.add_notice(
                f"The log is {counted(backlog.total, 'line')} behind: they have been read and checked for results and "
                f"errors until {backlog.inspected.last[11:19]}, and are logged until {backlog.logged.last[11:19]}.",
                backlog.logged,
            )
