"""A log whose failures end nothing: a training is followed and released although nobody reads what is logged."""

from __future__ import annotations

import contextlib
from typing import Any

from airflow_provider_ktrain.core.text.output import masked_log
from airflow_provider_ktrain.engine.api.job_calls import Log

log = masked_log(__name__)


class UnfailingLog:
    """A `Log` that never raises. A worker's log fails, for example, when its supervisor has ended before it."""

    def __init__(self, target: Log) -> None:
        self._target = target
        self._failure_logged = False

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        """As of `Log`."""
        self._send("info", event, *args, **kw)

    def warning(self, event: Any, *args: Any, **kw: Any) -> None:
        """As of `Log`."""
        self._send("warning", event, *args, **kw)

    def error(self, event: Any, *args: Any, **kw: Any) -> None:
        """As of `Log`."""
        self._send("error", event, *args, **kw)

    def _send(self, level: str, event: Any, *args: Any, **kw: Any) -> None:
        """Log a line. The first failure is logged in the process's own log, as where the supervisor has ended."""
        try:
            getattr(self._target, level)(event, *args, **kw)
        except Exception:
            failed, self._failure_logged = self._failure_logged, True
            if not failed:
                with contextlib.suppress(Exception):
                    log.exception("Lines of a task's log are missing: they could not be logged.")
