"""Bounds what pytest keeps of a test's output, so that a test that floods a log fails and doesn't fill the memory.

Each stream and log keeps `KEPT` characters until it is read, and says so where it ends. A report has `REPORTED` of
them all: the beginning and the end of each section.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Generator
from typing import Any

import pytest
from _pytest import capture

KEPT = 8_000_000  #: Characters of a stream while a test runs; tests read logs of some megabytes.
REPORTED = 1_000_000  #: Characters in the report of a phase of a test.
CUT = "\n[... {} characters left out by tests/captured.py ...]\n"


class _Limit(logging.Filter):
    """Lets a handler of pytest keep records until their text has `KEPT` characters."""

    def __init__(self, handler: Any) -> None:
        super().__init__()
        self._handler = handler

    def filter(self, record: logging.LogRecord) -> bool:
        return bool(self._handler.stream.tell() < KEPT)


def _limit(stream: Any) -> None:
    """Let streams of this class, a TextIOWrapper, ignore what is written beyond `KEPT`."""

    def write(self: Any, text: str, /) -> int:
        written = self.buffer.tell()
        if written < KEPT:
            io.TextIOWrapper.write(self, text[: KEPT - written])
            if written + len(text) >= KEPT:
                io.TextIOWrapper.write(self, CUT.format("further"))
        return len(text)

    stream.write = write


class Limits:
    """The plugin."""

    def __init__(self, config: pytest.Config) -> None:
        for stream in (capture.CaptureIO, capture.EncodedFile):
            _limit(stream)
        self._manager: Any = config.pluginmanager.get_plugin("capturemanager")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        plugin: Any = session.config.pluginmanager.get_plugin("logging-plugin")
        for handler in (plugin.caplog_handler, plugin.report_handler):
            handler.addFilter(_Limit(handler))

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside of what reads the output
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            self._cut_files()

    def _cut_files(self) -> None:
        """Shorten the files in which pytest captures what child processes write, too."""
        captured = getattr(self._manager, "_global_capturing", None)
        for stream in (getattr(captured, "out", None), getattr(captured, "err", None)):
            file = getattr(stream, "tmpfile", None)
            if isinstance(file, capture.EncodedFile) and os.fstat(file.fileno()).st_size > 2 * KEPT:
                os.ftruncate(file.fileno(), KEPT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.sections = shortened(report.sections)
        return report


def shortened(sections: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sections of a report with at most about `REPORTED` characters in all: of each, the beginning and the end."""
    if sum(len(text) for _, text in sections) <= REPORTED:
        return sections
    half = REPORTED // len(sections) // 2
    return [
        (name, text if len(text) <= 2 * half else text[:half] + CUT.format(len(text) - 2 * half) + text[-half:])
        for name, text in sections
    ]


def register(config: pytest.Config) -> None:
    """Bound the output of this run; each `conftest.py` may ask for it."""
    if not config.pluginmanager.has_plugin("limits-of-output"):
        config.pluginmanager.register(Limits(config), "limits-of-output")
