"""The database of an Airflow under test: SQLite, or its own PostgreSQL server (KTRAIN_TEST_DATABASE=postgresql).

The server listens on a free loopback port, keeps its data in a temporary directory and ends with the test process,
also if that process is killed. PostgreSQL refuses to run as root: in this case it runs as the user `postgres`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ktrain_embedded import ports

PORTS = range(20_000, 30_000)  # of servers of tests; clusters use others
SQLITE, POSTGRESQL = "sqlite", "postgresql"
STARTED_WITHIN = 60.0  # seconds
PR_SET_PDEATHSIG = 1  # see prctl(2)
OPTIONS = {  # tests don't need durability
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "dynamic_shared_memory_type": "mmap",  # files in its own directory: programs of other tests may clear /dev/shm
}


def free_port() -> int:
    """A loopback port for a server that starts later."""
    return ports.free_port(PORTS)


def selected() -> str:
    """The database that KTRAIN_TEST_DATABASE selects; SQLite by default."""
    name = os.environ.get("KTRAIN_TEST_DATABASE") or SQLITE
    if name not in (SQLITE, POSTGRESQL):
        raise ValueError(f"KTRAIN_TEST_DATABASE: found {name!r}, expected {SQLITE} or {POSTGRESQL}")
    return name


def missing() -> str:
    """Why the selected database can't be used on this machine; empty if it can be used."""
    if selected() == SQLITE:
        return ""
    if _program("initdb") is None:
        return "no PostgreSQL server on this machine (Debian: apt-get install postgresql)"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is no user `postgres` to run it as"
    return ""


def version() -> str:
    """Name and version of the selected database, for reports."""
    if selected() == SQLITE:
        import sqlite3

        return f"SQLite {sqlite3.sqlite_version}"
    postgres = _program("postgres")
    assert postgres is not None
    output = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True).stdout
    return f"PostgreSQL {output.split()[2]}"


@contextlib.contextmanager
def database(home: pathlib.Path) -> Iterator[str]:
    """The URL of a new, empty database for the Airflow in `home`. Skips the test if the server is missing."""
    if reason := missing():
        pytest.skip(reason)
    if selected() == SQLITE:
        yield f"sqlite:///{home}/airflow.db"
        return
    with _server() as port:
        yield f"postgresql+psycopg2://airflow:airflow@127.0.0.1:{port}/postgres"


def ends_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """A `preexec_fn`: the process gets this signal when the thread that started it ends (Linux only)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@contextlib.contextmanager
def _server() -> Iterator[int]:
    data = pathlib.Path(tempfile.mkdtemp(prefix="ktrain-postgresql-"))
    identity: dict[str, Any] = {}
    if os.geteuid() == 0 and (user := _user()):
        os.chown(data, user.pw_uid, user.pw_gid)
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    port = free_port()
    initdb, postgres = _program("initdb"), _program("postgres")
    assert initdb is not None
    assert postgres is not None
    options = {**OPTIONS, "port": str(port), "unix_socket_directories": str(data)}
    process: subprocess.Popen[bytes] | None = None
    try:
        password = data / "password"
        password.write_text("airflow")
        if identity:
            os.chown(password, identity["user"], identity["group"])
        command = [initdb, "-D", str(data / "db"), "-U", "airflow", "-E", "UTF8", "--no-locale", "--no-sync"]
        command += ["-A", "scram-sha-256", "--pwfile", str(password)]
        subprocess.run(command, check=True, capture_output=True, cwd=data, **identity)
        with (data / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [postgres, "-D", str(data / "db"), *(f"-c{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=data, start_new_session=True,
                preexec_fn=ends_with_parent(signal.SIGINT), **identity,
            )  # fmt: skip
        _wait_started(process, port, data / "server.log")
        yield port
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # fast shutdown: connections are closed
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGQUIT)
                process.wait(30)
        shutil.rmtree(data, ignore_errors=True)


def _wait_started(process: subprocess.Popen[bytes], port: int, log: pathlib.Path) -> None:
    import psycopg2

    end = time.monotonic() + STARTED_WITHIN
    while True:
        try:
            psycopg2.connect(host="127.0.0.1", port=port, user="airflow", password="airflow", dbname="postgres").close()
            return
        except psycopg2.OperationalError as e:
            if process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"PostgreSQL did not start: {e}\n{log.read_text()[-2000:]}") from None
            time.sleep(0.1)


def _program(name: str) -> str | None:
    """The path of a program of the newest PostgreSQL server. Debian doesn't put these programs in PATH."""
    debian = pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}")
    newest = sorted(debian, key=lambda path: float(path.parent.parent.name))
    return str(newest[-1]) if newest else shutil.which(name)


def _user() -> pwd.struct_passwd | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return None
