"""Only end-to-end tests run a second time, also in the groups of pytest-xdist, and nothing of a failure is hidden."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reruns import TITLE

pytest.importorskip("pytest_rerunfailures")

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
import pathlib
import pytest
from tests.reruns import print_first_failures, run_twice_at_most

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def shared():
    with (HERE / "shared").open("a") as file:
        file.write("x")
    return HERE


@pytest.fixture(scope="session")
def starts_late(shared):
    attempt(shared, "fixture")


def attempt(folder, name):
    first = not (folder / name).exists()
    (folder / name).touch()
    assert not first, f"first attempt of {name}"


def pytest_collection_modifyitems(config, items):
    run_twice_at_most(config, items)


def pytest_terminal_summary(terminalreporter):
    print_first_failures(terminalreporter)
"""
TESTS = """
import pytest
from conftest import attempt

grouped = pytest.mark.xdist_group("one")


@grouped
@pytest.mark.e2e
def test_that_passes_later(shared):
    attempt(shared, "call")


@grouped
@pytest.mark.e2e
def test_whose_fixture_starts_late(starts_late): ...


@grouped
@pytest.mark.e2e
def test_after_it(shared): ...


@pytest.mark.e2e
def test_that_always_fails():
    raise AssertionError("fails always")


@pytest.mark.e2e
@pytest.mark.chaos
def test_of_chaos(tmp_path_factory):
    raise AssertionError("chaos failed")


def test_unit():
    raise AssertionError("unit failed")
"""
OPTIONS = "[pytest]\naddopts = --strict-markers\nmarkers =\n    e2e: x\n    chaos: x\n"


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadgroup")], ids=["one process", "xdist"])
def test_only_end_to_end_tests_run_twice(tmp_path: Path, workers: tuple[str, ...]) -> None:
    for name, text in (("conftest.py", CONFTEST), ("test_it.py", TESTS), ("pytest.ini", OPTIONS)):
        (tmp_path / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers],
        cwd=tmp_path, env={**kept, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert re.search(r"3 failed, 3 passed, 3 rerun", done.stdout), done.stdout + done.stderr
    before, _, after = done.stdout.partition(TITLE)
    assert "test_that_passes_later" in after
    assert "first attempt of call" in after
    assert "first attempt of fixture" in after
    for text in ("fails always", "chaos failed", "unit failed"):
        assert text in before
    assert (tmp_path / "shared").read_text() == "x", "a session fixture is kept"
