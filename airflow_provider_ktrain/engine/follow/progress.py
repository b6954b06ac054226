"""Confirms that a training makes no progress before `progress_timeout` ends it.

A line with a higher step may have been written, but not read yet, for example after a takeover or if the logs can't be
read. So the job is read again for its `trainerStatus`, and two checks must show that the logs were read up to the limit
without a gap.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from airflow_provider_ktrain.core.diagnosis.model import Limit
from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.state.limits import Clock
from airflow_provider_ktrain.core.state.status import phase_of, wants_suspension
from airflow_provider_ktrain.core.timestamps import epoch_seconds
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.follow.messages import Options
from airflow_provider_ktrain.engine.follow.output import JobOutput
from airflow_provider_ktrain.engine.follow.state import JobState
from airflow_provider_ktrain.engine.job_requests import Log, read_job

CONFIRM_SECONDS = 5.0  #: between the two checks that must agree
RETRY_SECONDS = 10.0  #: until the next check if the logs are not read up to the limit
UNREADABLE_SECONDS = 10.0  #: for which the logs must be behind until this is logged


async def unfinished_job(api: Api, ref: JobRef) -> dict[str, Any] | None:
    """The job as the API server has it; None if it has ended, is to be suspended or can't be read.

    A watch can be behind, and a job that has ended is silent and makes no progress.

    :param api: client for the cluster.
    :param ref: the job.
    """
    try:
        job = await read_job(api, ref)
    except (ApiUnavailable, ApiStatusError):
        return None
    return None if job is None or phase_of(job).ended or wants_suspension(job) else job


class ProgressCheck:
    """Decides whether an expired clock of `progress_timeout` proves a hang.

    :param api: client for the cluster.
    :param state: the job.
    :param output: its logs and what the program reported.
    :param options: of the task.
    :param clocks: returns the limits that run now.
    :param log: where it is logged that the logs can't be read.
    """

    def __init__(
        self,
        api: Api,
        state: JobState,
        output: JobOutput,
        options: Options,
        clocks: Callable[[], list[Clock]],
        log: Log,
    ) -> None:
        self._api, self._state, self._output, self._clocks, self._log = api, state, output, clocks, log
        self._follows_logs = options.logs != "none"
        self._next_check = 0.0  # epoch seconds
        self._expired: Clock | None = None  # the clock that the last check confirmed
        self._behind_since: float | None = None  # when the logs were first found to be behind, epoch seconds
        self._warned = False

    def postponed(self, clock: Clock) -> Clock:
        """The clock, not due before the next check if it is that of `progress_timeout`."""
        if clock.limit is not Limit.PROGRESS:
            return clock
        return replace(clock, due=max(clock.due, self._next_check))

    async def confirmed(self) -> bool:
        """Whether two checks in a row have shown that the training made no progress in time."""
        proven = await self._is_proven()
        now, clock = time.time(), self._clock()  # what was read meanwhile may be progress
        expired = clock if proven and clock is not None and clock.due <= now else None
        earlier, self._expired = self._expired, expired
        if expired is not None and expired == earlier:
            return True
        wait = RETRY_SECONDS if expired is None else CONFIRM_SECONDS
        self._next_check = max(self._next_check, now + wait)
        return False

    def _clock(self) -> Clock | None:
        return next((clock for clock in self._clocks() if clock.limit is Limit.PROGRESS), None)

    async def _is_proven(self) -> bool:
        """Whether everything that may show progress was read."""
        job = await unfinished_job(self._api, self._state.ref)
        clock = self._clock()
        if job is None or clock is None:
            return False
        self._output.training_metrics.read_trainer_status(job)
        if not self._follows_logs:
            return True
        logs = self._output.follower
        read_for_long = (epoch_seconds(logs.read_since) or 0.0) + clock.seconds
        if read_for_long > time.time():  # the log was rotated: what it contained before may have been progress
            self._next_check = read_for_long
            return False
        if await logs.has_read_until(_log_time(clock.due)):
            self._behind_since = None
            return True
        self._note_unread(clock.seconds)
        return False

    def _note_unread(self, seconds: float) -> None:
        """Log once that the limit has expired and the logs are still behind."""
        now = time.time()
        self._behind_since = self._behind_since or now
        if not self._warned and now - self._behind_since >= UNREADABLE_SECONDS:
            self._warned = True
            self._log.warning(
                f"{self._state.ref} may have hung: no progress was read for {seconds:.0f} s ({Limit.PROGRESS}).\n"
                "The job is kept, because its latest log lines can't be read."
            )


def _log_time(at: float) -> str:
    """Epoch seconds as `core.logs.cursor.normal_time` returns a line's timestamp."""
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%dT%H:%M:%S.%f}000Z"
