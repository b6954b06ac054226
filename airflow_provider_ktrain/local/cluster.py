"""Start, stop and look at an embedded cluster, which is a process of its own: for tests, and for the command line."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from airflow_provider_ktrain.local.config import Config

COMMAND = (sys.executable, "-m", "airflow_provider_ktrain.local.server", "--config")
START_TIMEOUT = 60.0  # seconds until the server must be ready
STOP_TIMEOUT = 60.0  # seconds that it has to end its containers


class ClusterError(RuntimeError):
    """An embedded cluster did not start or stop; says why and what to look at."""


def default_state_dir() -> Path:
    """$KTRAIN_HOME, or ~/.ktrain."""
    return Path(os.environ.get("KTRAIN_HOME") or Path.home() / ".ktrain").expanduser()


def start(config: Config, *, timeout: float = START_TIMEOUT) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a server and wait until it is ready.

    :return: its process and what it tells: pid, url, kubeconfig, token, ca_file.
    :raises ClusterError: it ended, or was not ready in `timeout` seconds.
    """
    directory = Path(config.state_dir)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(directory / "server.log", "ab") as log:
        process = subprocess.Popen(
            [*COMMAND, config.dump()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        line = _first_line(process, timeout)
        return process, json.loads(line)
    except (ValueError, TimeoutError) as e:
        process.kill()
        process.wait()
        tail = (directory / "server.log").read_text(errors="replace")[-2000:]
        raise ClusterError(
            f"the embedded cluster did not start: {e}; {directory / 'server.log'} ends:\n{tail}"
        ) from None


def _first_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout)
    if not ready:
        raise TimeoutError(f"not ready after {timeout:.0f} s")
    line: bytes = process.stdout.readline()
    if not line:
        raise ValueError(f"it ended with exit code {process.wait()}")
    return line


def running(state_dir: Path) -> dict[str, Any] | None:
    """What the cluster of a state directory told when it was ready, or None where none is up."""
    try:
        with open(state_dir / "lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except OSError:
                state: dict[str, Any] = json.loads((state_dir / "cluster.json").read_text())
                return state
    except (FileNotFoundError, ValueError):
        return None


def stop(state_dir: Path, *, timeout: float = STOP_TIMEOUT) -> bool:
    """End the cluster of a state directory with everything it started; False where none was up."""
    state = running(state_dir)
    if state is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["pid"], signal.SIGTERM)
    until = time.monotonic() + timeout
    while running(state_dir) is not None:
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["pid"], signal.SIGKILL)
            raise ClusterError(
                f"the embedded cluster (process {state['pid']}) did not end in {timeout:.0f} s and was killed"
            )
        time.sleep(0.05)
    for name in ("cluster.json", "kubeconfig"):
        (state_dir / name).unlink(missing_ok=True)
    return True


def admin(url: str, token: str, ca_file: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Post to the fault switches; urllib.error.HTTPError where they refuse."""
    request = urllib.request.Request(
        f"{url}/ktrain/faults",
        data=json.dumps(wanted).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ca_file), timeout=30) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


class EmbeddedCluster:
    """An embedded cluster for the length of a `with`: a process of its own that dies with this one.

    :param images: directory by image name (None or "": an empty directory).
    :param resources: more resources of each node, such as {"cpu": "96"}.
    :param port: 0 for any free one.
    :param state_dir: where it keeps its files; a temporary directory by default, removed at the end.
    """

    def __init__(
        self,
        images: Mapping[str, Path | str | None] | None = None,
        nodes: int = 1,
        gpus_per_node: int = 0,
        mpi_api: str = "v1",
        resources: Mapping[str, str] | None = None,
        port: int = 0,
        state_dir: Path | None = None,
    ) -> None:
        named = {name: str(Path(path).resolve()) if path else "" for name, path in (images or {}).items()}
        self._config = Config(
            str(state_dir or ""), port=port, images=named, nodes=nodes, gpus_per_node=gpus_per_node,
            resources=dict(resources or {}), mpi_api=mpi_api, parent=os.getpid(),
        )  # fmt: skip
        self._temporary = state_dir is None
        self._process: subprocess.Popen[bytes] | None = None
        self._told: dict[str, Any] = {}

    def __enter__(self) -> EmbeddedCluster:
        if self._temporary:
            self._config = replace(self._config, state_dir=tempfile.mkdtemp(prefix="ktrain-"))
        self._process, self._told = start(self._config)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._temporary:
            shutil.rmtree(self._config.state_dir, ignore_errors=True)

    def stop(self) -> None:
        """End the server and everything it started."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._process = None

    @property
    def state_dir(self) -> Path:
        return Path(self._config.state_dir)

    @property
    def pid(self) -> int:
        return int(self._told["pid"])

    @property
    def url(self) -> str:
        return str(self._told["url"])

    @property
    def token(self) -> str:
        """The admin's bearer token."""
        return str(self._told["token"])

    @property
    def ca_file(self) -> Path:
        return Path(self._told["ca_file"])

    @property
    def kubeconfig(self) -> Path:
        return Path(self._told["kubeconfig"])

    def admin(self, fault: str, **options: Any) -> dict[str, Any]:
        """Set a fault switch: `admin("status", seconds=2, status=503, verb="list")`, `admin("clear")`."""
        return admin(self.url, self.token, str(self.ca_file), {"fault": fault, **options})
