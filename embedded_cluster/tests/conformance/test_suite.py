"""The process that runs the scenarios ends with the one that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import ROOT
from .suite import REAL, runnable

# starts the suite as the fixture does, and prints its process ID
PYTEST = """
import json, subprocess, sys
suite = subprocess.Popen(json.loads(sys.argv[1]), stdin=subprocess.PIPE)
print(suite.pid, flush=True)
suite.wait()
"""


@pytest.fixture
def temporary() -> Iterator[str]:
    """A directory with a short path, in which a cluster that is killed on a slow machine may leave its own."""
    with tempfile.TemporaryDirectory(prefix="kt") as directory:
        yield directory


@pytest.mark.thorough
@pytest.mark.skipif(bool(REAL), reason="on the embedded cluster only: the suite starts it")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_suite_ends_with_its_parent_process(tmp_path: Path, temporary: str, end: signal.Signals) -> None:
    longest = max(runnable(), key=lambda s: s.seconds)
    command = [sys.executable, "-m", "conformance.suite", str(tmp_path), longest.name]
    starter = subprocess.Popen(
        [sys.executable, "-c", PYTEST, json.dumps(command)],
        cwd=ROOT, env={**os.environ, "TMPDIR": temporary}, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert starter.stdout is not None
    suite = int(starter.stdout.readline())
    wait_for("the suite has started its cluster", lambda: children(suite))
    clusters = children(suite)
    starter.send_signal(end)
    starter.wait()
    starter.stdout.close()
    wait_for("the suite has ended", lambda: is_gone(suite))
    wait_for("its clusters have ended", lambda: all(map(is_gone, clusters)))


def wait_for(what: str, look: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not look():
        assert time.monotonic() < end, f"not within 120 s: {what}"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for task in os.listdir(f"/proc/{pid}/task") for child in _children(pid, task)]


def _children(pid: int, task: str) -> list[str]:
    return Path(f"/proc/{pid}/task/{task}/children").read_text().split()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; who would reap it may not have done so yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
