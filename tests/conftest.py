"""Shared by all tests: their order, and the selection of those that a real cluster can run."""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import settings

from tests.cluster.facts import Facts
from tests.clusters import REAL
from tests.reruns import print_first_failures

# the same examples in each run, even on a slow machine: HYPOTHESIS_PROFILE=explore searches for others
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

LOCAL = pathlib.Path(__file__).parent / "local"  # tests of the embedded cluster itself


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run long tests first, so that no worker waits for them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    if REAL:
        left_out = [i for i in items if i.get_closest_marker("embedded") or LOCAL in i.path.parents]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many facts of the recordings agree with the tested cluster, and what failed at the first attempt."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    for title, counted in (("Conformance", "facts"), ("Replays of Kueue", "kueue")):
        found = [Facts(*value) for r in reports for name, value in r.user_properties if name == counted]
        if found:
            terminalreporter.write_line(f"{title}: {sum(found, Facts())}, in {len(found)} scenarios")
    print_first_failures(terminalreporter)
