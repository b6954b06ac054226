"""Logs the last lines of a job that is released after a kill, when nobody follows it any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.identity.names import JobRef
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.logs.cursor import Cursor
from airflow_provider_ktrain.core.logs.selection import LogChoice, chooser, is_followed
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api, ApiStatusError, ApiUnavailable, Object
from airflow_provider_ktrain.engine.api.job_calls import Log, job_pods, read_job
from airflow_provider_ktrain.engine.api.request_errors import retry_transient
from airflow_provider_ktrain.engine.logs.follower import LogFollower
from airflow_provider_ktrain.engine.logs.line_logger import LineLogger

DRAIN_SECONDS = 5.0  #: How long to read logs after the release: the pods are gone by then.
RETRY_SECONDS = 300.0  #: How long to repeat requests to an unreachable API server, as in a release.


@contextlib.asynccontextmanager
async def last_lines(api: Api, ref: JobRef, logs: LogChoice, cursor: Cursor, log: Log) -> AsyncIterator[None]:
    """Log what the job's containers write while the body of the `async with` releases it, and count these lines.

    The release doesn't wait for this: it begins at once, and lines that can't be read are left out.

    :param logs: whose logs to follow: see `core.logs.selection`.
    :param cursor: where the process that followed the job stopped; updated in place.
    """
    kind = kind_of(ref.kind)
    chosen = chooser("none", kind, {})
    known: Object = {}
    follower = LogFollower(
        api,
        LineLogger(log, kind),
        kind=kind,
        cursor=cursor,
        chosen=lambda pod, container: chosen(pod) and is_followed(kind, known, pod, container),
        job=lambda: known,
    )

    async def observe() -> None:
        nonlocal chosen, known
        end = timing.now() + RETRY_SECONDS
        job, pods = await asyncio.gather(
            retry_transient(lambda: read_job(api, ref), end), retry_transient(lambda: job_pods(api, ref), end)
        )
        known = {} if job is ABSENT else job
        chosen = chooser(logs, kind, known)
        for pod in pods:
            follower.observe(pod)

    observing = asyncio.create_task(observe())
    try:
        yield
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                await observing
        except (ApiStatusError, ApiUnavailable, TimeoutError) as e:
            log.warning(f"Lines after the kill are missing: the pods of {ref} can't be listed.\n{e}")
        await follower.drain(DRAIN_SECONDS)
        report = await follower.log_remainder(DRAIN_SECONDS, DRAIN_SECONDS, DRAIN_SECONDS)
        total = report.total
        if lines := total.lines + total.dropped + total.unlogged:
            log.info(f"The pods wrote {counted(lines, 'line')} between the kill and their end.")
        unlogged = [key for key, tally in report.containers.items() if tally.unlogged]
        if missing := dict.fromkeys([*report.unread, *unlogged]):
            names = ", ".join(f"{pod}/{container}" for pod, container in missing)
            log.warning(f"Lines after the kill are missing: some logs were not read or logged to their end.\n{names}")
    finally:
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
        await follower.close()
