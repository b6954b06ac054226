"""A test that floods its output fails with a short report, and little of the output is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.captured import CUT, REPORTED, shortened

ROOT = Path(__file__).resolve().parent.parent
CONFTEST = """
from tests import captured

captured.KEPT, captured.REPORTED = 200_000, 20_000


def pytest_configure(config):
    captured.register(config)
"""
TESTS = """
import logging
import subprocess

import pytest

LINE = "x" * 99


def test_of_prints():
    print("first")
    for _ in range(10_000):
        print(LINE)
    pytest.fail("flooded")


def test_of_logs(caplog):
    logging.error("first")
    for _ in range(10_000):
        logging.error(LINE)
    assert 200_000 < len(caplog.text) < 210_000
    assert len(caplog.records) < 2_100
    pytest.fail("flooded")


def test_of_a_child_process():
    subprocess.run("echo first; head -c 2000000 /dev/zero | tr '\\\\0' x", shell=True, check=True)
    pytest.fail("flooded")


def test_that_reads(capsys):
    for _ in range(3):
        for _ in range(10_000):
            print(LINE)
        assert 200_000 < len(capsys.readouterr().out) < 201_000
"""


@pytest.mark.thorough
def test_flooded_output_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "test_it.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "3 failed, 1 passed" in done.stdout, done.stdout[-5000:] + done.stderr
    for name in ("prints", "logs", "a_child_process"):
        _, _, section = done.stdout.partition(f"_ test_of_{name} _")
        assert "first\n" in section[:4_000] + section[-4_000:]
    assert len(done.stdout) < 3 * 20_000 + 20_000


@pytest.mark.parametrize("length", [10, REPORTED])
def test_sections_of_a_report_share_its_length(length: int) -> None:
    sections = [("Captured stdout call", "a" * length), ("Captured log call", "bc" + "d" * length + "e")]
    short = shortened(sections)
    assert sum(len(text) for _, text in short) <= REPORTED + 2 * len(CUT) + 20
    assert [name for name, _ in short] == [name for name, _ in sections]
    assert short[1][1].startswith("bc")
    assert short[1][1].endswith("e")
    assert (short == sections) is (length == 10)
