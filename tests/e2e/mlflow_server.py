"""MLflow's tracking server on loopback, with SQLite, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.e2e.airflow import wait_for
from tests.e2e.database import ends_with_parent, free_port

#: Settings of the server and of programs that report to it: nothing is sent elsewhere, and no other process is started.
SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@dataclass(frozen=True)
class Tracking:
    """A tracking server."""

    url: str

    def runs(self, experiment: str) -> list[Any]:
        """The runs of an experiment, the first one first."""
        found = self._post("experiments/search", {"max_results": 100})["experiments"]
        ids = [one["experiment_id"] for one in found if one["name"] == experiment]
        asked = {"experiment_ids": ids, "max_results": 100, "order_by": ["attributes.start_time ASC"]}
        return list(self._post("runs/search", asked).get("runs", ())) if ids else []

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)


@contextlib.contextmanager
def running(home: pathlib.Path) -> Iterator[Tracking]:
    """A context manager: the server, with its files in `home`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    files = ["--backend-store-uri", f"sqlite:///{home}/mlflow.db", "--artifacts-destination", str(home / "artifacts")]
    with (home / "mlflow.out").open("wb") as out:
        process = subprocess.Popen(
            [*command, *files], env={**os.environ, **SETTINGS}, cwd=home,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            preexec_fn=ends_with_parent(signal.SIGTERM),
        )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, (home / "mlflow.out").read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            return answer.status == 200
        return False

    try:
        wait_for("MLflow's server answers", answers)
        yield Tracking(url)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the server is its child
        process.wait(30)
