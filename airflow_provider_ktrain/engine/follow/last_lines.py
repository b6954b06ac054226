"""The last lines of a job that is released after a kill, when nobody follows it any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial

from airflow_provider_ktrain.core.identity import JobRef
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.logs.selection import LogChoice, chooser
from airflow_provider_ktrain.engine.api import Api, ApiStatusError, ApiUnavailable
from airflow_provider_ktrain.engine.errors import retry_transient
from airflow_provider_ktrain.engine.follow.loop import log_line
from airflow_provider_ktrain.engine.jobs import Log, job_pods, read_job
from airflow_provider_ktrain.engine.logs.follower import LogFollower

DRAIN = 5.0  #: seconds that logs may take after the release: the pods are gone by then
PATIENCE = 300.0  #: seconds that an API server which is away is asked again: a release asks as long


@contextlib.asynccontextmanager
async def last_lines(api: Api, ref: JobRef, logs: LogChoice, cursor: Cursor, log: Log) -> AsyncIterator[None]:
    """Log what the job's containers write while the body of the `async with` releases it, and count these lines.

    The release doesn't wait for this: it begins at once, and what can't be read is left out.

    :param logs: whose logs to bring: see `core.selection`.
    :param cursor: where the process that followed the job stopped; moved on in place.
    """
    kind = kind_of(ref.kind)
    chosen = chooser("none", kind, {})
    follower = LogFollower(
        api, partial(log_line, log, kind), kind=kind, cursor=cursor, chosen=lambda pod, _: chosen(pod)
    )

    async def observe() -> None:
        nonlocal chosen
        end = time.monotonic() + PATIENCE
        job, pods = await asyncio.gather(
            retry_transient(lambda: read_job(api, ref), end), retry_transient(lambda: job_pods(api, ref), end)
        )
        chosen = chooser(logs, kind, job or {})
        for pod in pods:
            follower.observe(pod)

    observing = asyncio.create_task(observe())
    try:
        yield
        try:
            await asyncio.wait_for(observing, DRAIN)
        except (ApiStatusError, ApiUnavailable, TimeoutError) as e:
            log.warning(f"Lines after the kill are missing: the pods of {ref} can't be listed: {e}")
        report = await follower.drain(DRAIN)
        lines = report.lines + report.dropped + report.late
        if lines:
            log.info(f"{lines:,} lines were written between the kill and the end of the pods")
        if report.unread:
            names = ", ".join(f"{pod}/{container}" for pod, container in report.unread)
            log.warning(f"Lines after the kill are missing: the logs of {names} could not be read to their end")
    finally:
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
        await follower.close()
