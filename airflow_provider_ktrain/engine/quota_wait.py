"""Repeats a create that exceeds a ResourceQuota: other jobs release the quota when they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from airflow_provider_ktrain.engine.api import ApiStatusError
from airflow_provider_ktrain.engine.job_requests import Log
from airflow_provider_ktrain.engine.request_errors import exceeded_quota

T = TypeVar("T")
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0  #: between two creates


class QuotaWait:
    """Repeats a request while a ResourceQuota rejects it.

    :param patience: for how long, in seconds, from the first rejection. 0: not at all.
    :param job: the job, for the log.
    :param log: where the wait is logged.
    """

    def __init__(self, patience: float, job: str, log: Log) -> None:
        self._patience, self._job, self._log = patience, job, log
        self._since: float | None = None
        self._pause = FIRST_PAUSE_SECONDS

    async def on(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask`.

        :raises ApiStatusError, ApiUnavailable: the request fails; also if the quota is still exceeded at the end.
        """
        while True:
            try:
                return await ask()
            except ApiStatusError as e:
                if not self._patience or not exceeded_quota(e):
                    raise
                now, limit = time.monotonic(), f"{self._patience:.0f} s (schedule_timeout)"
                if self._since is None:
                    self._since = now
                    self._log.warning(f"{self._job} exceeds a ResourceQuota. Trying for up to {limit}.")
                if now + self._pause > self._since + self._patience:
                    self._log.warning(f"The ResourceQuota for {self._job} is still exceeded after {limit}.")
                    raise
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
