"""A failed end-to-end test runs once more, and the terminal summary shows the failure of its first attempt.

So does a test that is marked as `timed`: it waits for real limits of seconds beside many others, and a machine that
stands still for longer than they last makes it fail.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

TITLE = "Passed at the second attempt"
ADVICE = "A test failed before it passed: find the cause of the failure and fix it."


def run_twice_at_most(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """Mark the end-to-end and timed tests among `items`. Without pytest-rerunfailures, nothing changes."""
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if item.get_closest_marker("chaos"):
            continue
        if item.get_closest_marker("e2e") or item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.flaky(reruns=1))


def print_first_failures(reporter: pytest.TerminalReporter) -> None:
    """Print the failed attempts of the tests that passed in the end."""
    failed = {report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, ())}
    attempts = [report for report in reporter.stats.get("rerun", ()) if report.nodeid not in failed]
    if not attempts:
        return
    reporter.section(TITLE, yellow=True)
    reporter.write_line(ADVICE, yellow=True)
    for report in attempts:
        reporter.write_sep("_", f"{report.nodeid} ({report.when})")
        reporter.write_line(report.longreprtext)
        for name, text in report.sections:
            reporter.write_sep("-", name)
            reporter.write_line(text)
