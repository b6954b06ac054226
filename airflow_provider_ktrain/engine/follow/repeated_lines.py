"""Logs the lines of a trigger again, from the pods that are left, with the reader and the bounds of a takeover."""

from __future__ import annotations

import datetime
from dataclasses import replace

from airflow_provider_ktrain.core.absent import ABSENT
from airflow_provider_ktrain.core.kinds import kind_of
from airflow_provider_ktrain.core.logs.cursor import Cursor, Position
from airflow_provider_ktrain.core.logs.repetition import Repetition
from airflow_provider_ktrain.core.logs.selection import chooser, is_followed
from airflow_provider_ktrain.core.text.output import counted
from airflow_provider_ktrain.engine import timing
from airflow_provider_ktrain.engine.api.client import Api
from airflow_provider_ktrain.engine.api.job_calls import JobRead, Log
from airflow_provider_ktrain.engine.follow.deferral import Deferral
from airflow_provider_ktrain.engine.logs.emitter import ignore
from airflow_provider_ktrain.engine.logs.follower import AGAIN_LINES, LogFollower, Takeover, names_of
from airflow_provider_ktrain.engine.logs.line_logger import MICROSECONDS, LineLogger
from airflow_provider_ktrain.engine.logs.log_line import LogLine

ONLY_IN_TRIGGER_LOG = "Only the triggerer's log has them."


async def repeat_lines(
    api: Api, log: Log, read: JobRead, deferral: Deferral, repetition: Repetition, seconds: float
) -> None:
    """Log what the pods have logged since the deferral, and count what is not logged.

    :param read: the job and the pods that are left of it.
    :param seconds: after which this ends.
    """
    kind, job = kind_of(deferral.job.kind), {} if read.job is ABSENT else read.job
    is_chosen, cursor = chooser(deferral.options.logs, kind, job), Cursor.from_dict(deferral.handover.cursor)
    pods = [pod for pod in read.pods if is_chosen(pod)]
    if not pods:
        log.warning(
            f"The training's lines since the deferral are missing here: {repetition.why}.\n{ONLY_IN_TRIGGER_LOG}"
        )
        return
    if repetition.from_beginning:
        begun = {key: Position() for key, at in cursor.positions.items() if not at.complete}
        cursor = Cursor(begun, names=cursor.names)
    write, explained = LineLogger(log, kind), False

    def sink(line: LogLine) -> None:
        nonlocal explained
        if not explained:
            explained = True
            time = {"timestamp": f"{line.time[:MICROSECONDS]}Z"} if line.time and repetition.keeps_time else {}
            log.info(f"The last {AGAIN_LINES:,} lines are logged again from the pods: {repetition.why}.", **time)
        if line.time and not repetition.keeps_time:
            line = replace(line, text=f"{line.time} {line.text}", time="")
        write(replace(line, again=False))

    until = (timing.utc_now() + datetime.timedelta(days=1)).replace(tzinfo=None)  # after all lines, by any clock
    follower = LogFollower(
        api,
        sink,
        kind=kind,
        chosen=lambda pod, container: is_followed(kind, job, pod, container),
        takeover=Takeover(cursor, f"{until.isoformat(timespec='microseconds')}000Z", lambda source: ignore),
        job=lambda: job,
    )
    try:
        for pod in pods:
            follower.observe(pod)
        await follower.log_remainder(seconds, seconds, seconds)
    finally:
        await follower.close()
    earlier, gone = follower.earlier_report(), follower.report().containers
    missing = {key for key, tally in earlier.containers.items() if tally.unlogged or not tally.complete}
    missing |= {key for key, tally in gone.items() if tally.gaps}
    if missing:
        number = earlier.total.unlogged
        least = "" if all(tally.complete for tally in earlier.containers.values()) else "at least "
        lines = f"{least}{counted(number, 'line')}" if number else "some lines"
        log.warning(f"Not logged again: {lines} of {names_of(sorted(missing))}.\n{ONLY_IN_TRIGGER_LOG}")
