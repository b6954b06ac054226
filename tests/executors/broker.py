"""Celery's broker for tests: a Redis server of its own on loopback, which a test can stop and start again."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests import leaks
from tests.e2e.airflow import wait_for
from tests.e2e.database import ends_with_parent, free_port


class Redis:
    """:param directory: for its files. Messages survive a restart."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._directory, "appendonly": "yes", "save": ""}
        command = ["redis-server", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
        with (self._directory / "redis.out").open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=ends_with_parent(signal.SIGTERM),
            )  # fmt: skip
        leaks.allow_process(self._process.pid)
        wait_for("Redis answers", self._answers, 30)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
        return False


@contextlib.contextmanager
def running(directory: pathlib.Path) -> Iterator[Redis]:
    """A context manager: the server. Skips the test if the machine has none."""
    if not shutil.which("redis-server"):
        pytest.skip("no redis-server on this machine (Debian: apt-get install redis-server)")
    redis = Redis(directory)
    redis.start()
    try:
        yield redis
    finally:
        redis.stop()
