"""`make test-often`: all runs are made, and each failure is printed with the seed of its order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import test_often

SCRIPT = Path(test_often.__file__)
TESTS = """
import pathlib

import pytest

FIRST = pathlib.Path(__file__).with_name("first")


def test_that_passes(): ...


def test_that_fails_once():
    if not FIRST.exists():
        FIRST.touch()
        pytest.fail("at first")
"""


@pytest.mark.thorough
def test_failures_are_printed_with_their_seeds(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    options = ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path), str(file)]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--runs", "2", "--seed", "5", "--", *options],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| 1 | 5 |  | 1 | 1 |" in done.stdout
    assert "| 2 | 6 |  | 2 | 0 |" in done.stdout
    assert "FAILED in run 1: test_it::test_that_fails_once --randomly-seed=5" in done.stdout


def test_busy_processes_end() -> None:
    with test_often.busy_processes(1) as (process,):
        assert process.poll() is None
    assert process.poll() is not None
