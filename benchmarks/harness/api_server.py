"""A real API server of Airflow with deferred tasks that have statuses for the training page."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.core.formats import STATUS_XCOM

from .triggerer import Airflow, wait_for

Json = dict[str, Any]


@dataclass(frozen=True)
class ApiServer:
    """A running API server.

    :param url: its address.
    :param token: an administrator's.
    :param pid: of its parent process.
    :param database: Airflow's.
    """

    url: str
    token: str
    pid: int
    database: Path

    def rewrite(self, task_id: str, **changes: Any) -> None:
        """Write the status of a task again, as a triggerer does: its time changes."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=60)) as connection, connection:
            where, names = "WHERE key = ? AND task_id = ?", (STATUS_XCOM, task_id)
            stored = json.loads(connection.execute(f"SELECT value FROM xcom {where}", names).fetchone()[0])
            value = json.loads(stored) if isinstance(stored, str) else stored
            value |= {"written_at": round(time.time(), 1), **changes}
            text = json.dumps(json.dumps(value) if isinstance(stored, str) else value)
            connection.execute(f"UPDATE xcom SET value = ? {where}", (text, *names))


def on_free_port() -> tuple[str, dict[str, str]]:
    """The URL of an API server on a free port, and its settings."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    return url, {
        "AIRFLOW__API__PORT": port, "AIRFLOW__API__HOST": "127.0.0.1", "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API__BASE_URL": url,
    }  # fmt: skip


@contextlib.contextmanager
def api_server(statuses: Mapping[str, Json]) -> Iterator[ApiServer]:
    """Start an API server. It has one worker, and a deferred task for each status.

    :param statuses: by task id.
    """
    url, settings = on_free_port()
    with tempfile.TemporaryDirectory(prefix="ktrain-bench-") as folder:
        airflow = Airflow(Path(folder, "airflow"), Path(folder, "none"), **settings)
        task = {"map_index": -1, "classpath": "in_triggerer.Probe", "kwargs": {}}
        airflow.defer([{**task, "task_id": name, "xcoms": {STATUS_XCOM: status}} for name, status in statuses.items()])
        try:
            pid = airflow.run("api-server").supervisor
            token = wait_for("the API server answers", lambda: _token(url))
            yield ApiServer(url, token, pid, airflow.database)
        finally:
            airflow.stop()


def _token(url: str) -> str:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/auth/token", timeout=60) as response:
        return str(json.load(response)["access_token"])
    return ""
