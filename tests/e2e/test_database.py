"""The PostgreSQL server of the end-to-end tests: it ends with the process that started it."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.e2e import database
from tests.e2e.airflow import wait_for

HOLDS_ONE = """
import pathlib, time
from tests.e2e.database import database
with database(pathlib.Path()) as url:
    print(url, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _postgresql(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("KTRAIN_TEST_DATABASE", database.POSTGRESQL)
    if reason := database.missing():
        pytest.skip(reason)


def listens(url: str) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))) == 0


def test_server_ends_with_the_context_manager(tmp_path: pathlib.Path) -> None:
    with database.database(tmp_path) as url:
        assert listens(url)
    assert not listens(url)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a signal at the parent's death")
def test_server_ends_with_a_killed_test_process() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # the server may run as another user
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDS_ONE], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": folder}, text=True
        )
        assert holder.stdout is not None
        with holder:
            url = holder.stdout.readline()
            assert listens(url)
            holder.send_signal(signal.SIGKILL)
        (data,) = pathlib.Path(folder).iterdir()
        wait_for("the server has ended", lambda: not (data / "db" / "postmaster.pid").exists(), 60)
