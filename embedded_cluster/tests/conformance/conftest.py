"""The results of the scenarios, which a process runs beside the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .scenario import Scenario
from .suite import runnable

ROOT = Path(__file__).parents[1]
Results = Callable[[Scenario], list[str]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"scenario", "results"} <= set(metafunc.fixturenames):
        metafunc.parametrize("scenario", runnable(), ids=lambda s: s.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first scenario's test starts the process that runs all, so it comes first. The others read results: last."""
    scenarios = [item for item in items if "results" in getattr(item, "fixturenames", ())]
    for item in scenarios:
        item.add_marker(pytest.mark.thorough)
    if len(scenarios) > 1:
        others = [item for item in items if item not in scenarios]
        items[:] = [scenarios[0], *others, *scenarios[1:]]


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """What was not as expected in a scenario. The first process of pytest-xdist has all run, the others read."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "conformance"
    tests: list[Any] = [item for item in request.session.items if "results" in getattr(item, "fixturenames", ())]
    names = [item.callspec.params["scenario"].name for item in tests]
    suite: subprocess.Popen[bytes] | None = None
    temporary = tempfile.TemporaryDirectory(prefix="kt")  # its clusters come and go while other tests run
    try:
        folder.mkdir()
    except FileExistsError:
        pass
    else:
        command = [sys.executable, "-m", f"{__package__}.suite", str(folder), *names]
        where = {**os.environ, "TMPDIR": temporary.name}
        suite = subprocess.Popen(command, cwd=ROOT, env=where, stdin=subprocess.PIPE)  # it ends when this process does

    def result(scenario: Scenario) -> list[str]:
        path = folder / f"{scenario.name}.json"
        while not path.exists():
            assert suite is None or suite.poll() is None or path.exists(), "the scenarios were not run to their end"
            time.sleep(0.1)
        found: list[str] = json.loads(path.read_text())
        return found

    yield result
    if suite:
        session = request.session
        if session.shouldfail or session.shouldstop or session.exitstatus == pytest.ExitCode.INTERRUPTED:
            assert suite.stdin is not None
            suite.stdin.close()
        suite.wait()
    temporary.cleanup()
