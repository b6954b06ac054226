"""Logs the lines of containers: with their replica as source, and with the time at which the kubelet received them."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow_provider_ktrain.core.kinds import Kind
from airflow_provider_ktrain.core.text.output import Verbatim
from airflow_provider_ktrain.engine.api.job_calls import Log
from airflow_provider_ktrain.engine.logs.log_line import LogLine

MICROSECONDS = len("2026-11-21T10:00:00.000000")  #: Characters of a timestamp up to microseconds, Airflow's resolution.


AGAIN = "(again, after a takeover)"  #: Stands before lines that another triggerer may have logged.


class LineLogger:
    """Logs lines as they come; a sink of `LogFollower`.

    Airflow shows consecutive records once if they are equal (`airflow.utils.log.file_task_handler`). Equal lines that a
    container writes within a microsecond therefore get times one microsecond apart.

    :param log: where the lines are logged, with the replica as the logger's name: Airflow's UI filters by it.
    """

    def __init__(self, log: Log, kind: Kind) -> None:
        self._log, self._kind = log, kind
        # by role, index and container: the last line's text, the kubelet's time, and the time with which it was logged
        self._last: dict[tuple[str, int, str], tuple[str, str, str]] = {}

    def __call__(self, line: LogLine) -> None:
        """Log `[Role index] text`, or `[Role index container] text`. Notices of the follower itself are warnings.

        Lines that may have been logged before follow on a line that says so.
        """
        write = self._log.warning if line.notice else self._log.info
        container = f" {line.container}" if line.init else ""
        prefix = f"[{line.role} {line.index}{container}] "
        text = f"{prefix}{line.text}"
        if not line.notice:
            again = f"{prefix}{AGAIN}\n" if line.again else ""
            text = Verbatim(again + text.replace("\n", f"\n{prefix}"))
        source = self._kind.replica_name(line.role, line.index)
        if line.time:
            write(text, logger=source, timestamp=f"{self._time(line)}Z")
        else:
            write(text, logger=source)

    def _time(self, line: LogLine) -> str:
        written = logged = line.time[:MICROSECONDS]
        key = line.role, line.index, line.container
        text, first, last = self._last.get(key, ("", "", ""))
        if text == line.text and first <= written <= last:
            later = datetime.fromisoformat(last) + timedelta(microseconds=1)
            logged = later.isoformat(timespec="microseconds")
        self._last[key] = line.text, written, logged
        return logged
