"""Tests of the embedded cluster: those that a real cluster can run, too, and what they compared."""

from __future__ import annotations

import os
import pathlib

import pytest
from hypothesis import settings

from conformance.facts import Facts
from tests import captured, leaks
from tests.isolation import own_directories

own_directories()

COMPONENTS = pathlib.Path(__file__).parent / "components"  # tests of the embedded cluster's own parts

# the same examples in each run, even on a slow machine: HYPOTHESIS_PROFILE=explore searches for others
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=300)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    captured.register(config)
    leaks.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a real cluster, leave out the parts of the embedded one."""
    if os.environ.get("KTRAIN_TEST_KUBECONFIG"):
        left_out = [i for i in items if COMPONENTS in i.path.parents]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many facts of the recordings agree with the tested cluster."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    found = [Facts(*value) for r in reports for name, value in r.user_properties if name == "facts"]
    if found:
        terminalreporter.write_line(f"Conformance: {sum(found, Facts())}, in {len(found)} scenarios")
