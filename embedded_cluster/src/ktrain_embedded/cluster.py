"""Start, stop and inspect an embedded cluster, which is a separate process. For tests and the command line."""

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
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT = 240.0  # seconds that the server has to get ready, and to end its containers, on a loaded machine too


class ClusterError(RuntimeError):
    """An embedded cluster did not start or stop. The message contains the cause and, if known, where to look."""


@dataclass(frozen=True)
class Config:
    """The configuration of an embedded cluster. It is passed to the process of the cluster as JSON.

    :param state_dir: directory of `kubeconfig`, `cluster.json`, logs and the files of pods.
    :param kubeconfig: path of the kubeconfig to write; "" is `<state_dir>/kubeconfig`.
    :param port: port of the API server; 0 for any free port.
    :param images: directory by image name; "" for an empty directory.
    :param nodes: number of nodes.
    :param gpus_per_node: `nvidia.com/gpu` of each node.
    :param resources: additional resources of each node, such as {"cpu": "96"}.
    :param node_times: the factor for the times after which the cluster reacts to a failed node: 45 s until a silent
        node is unreachable, 300 s until its pods are deleted, 40 to 60 s until the pods of a deleted node are removed.
    :param mpi_api: the version of MPIJob to serve: v1 or v2beta1.
    :param trainer: whether to serve the Trainer.
    :param trainer_status: turn on the Trainer's feature gate TrainJobStatus.
    :param kueue: serve the resources of Kueue. Its webhooks suspend jobs that name a queue; nothing admits them.
    :param namespace: the namespace of the kubeconfig's context. It is created.
    :param client_certificate: write a client certificate instead of the token to the kubeconfig.
    :param parent: id of the parent process. The cluster stops when the parent has ended. 0: don't check.
    """

    state_dir: str
    kubeconfig: str = ""
    port: int = 0
    images: dict[str, str] = field(default_factory=dict)
    nodes: int = 1
    gpus_per_node: int = 0
    resources: dict[str, str] = field(default_factory=dict)
    node_times: float = 1.0
    mpi_api: str = "v1"
    trainer: bool = True
    trainer_status: bool = False
    kueue: bool = False
    namespace: str = "default"
    client_certificate: bool = False
    parent: int = 0


def mpi_api_for(api_version: str) -> str:
    """The version of MPIJob that a cluster must serve for a manifest with this apiVersion."""
    return "v2beta1" if api_version.endswith("/v2beta1") else "v1"


def start(config: Config) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a server and wait until it is ready.

    :return: the process, and its state: pid, url, kubeconfig, token, ca_file.
    :raises ClusterError: the server ended, or it was not ready in time.
    """
    directory = Path(config.state_dir)
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # one that existed may be open to others, and logs of programs may contain secrets
    command = [sys.executable, "-m", "ktrain_embedded.server", "--config", json.dumps(asdict(config))]
    with open(directory / "server.log", "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT)
        if line := process.stdout.readline() if ready else b"":
            return process, json.loads(line)
    except BaseException:  # interrupted: nothing runs in the cluster yet
        process.kill()
        process.wait()
        raise
    process.kill()
    why = f"it ended with exit code {process.wait()}" if ready else f"not ready after {TIMEOUT:.0f} s"
    tail = (directory / "server.log").read_text(errors="replace")[-2000:]
    raise ClusterError(f"the embedded cluster did not start: {why}; {directory / 'server.log'} ends:\n{tail}")


def running(state_dir: Path) -> dict[str, Any] | None:
    """Return url, pid, token and files of the cluster of a state directory, or None if it isn't running."""
    with contextlib.suppress(FileNotFoundError, ValueError), open(state_dir / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            state: dict[str, Any] = json.loads((state_dir / "cluster.json").read_text())
            return state
    return None


def stop(state_dir: Path) -> bool:
    """Stop the cluster of a state directory and everything it started. False if it wasn't running."""
    state = running(state_dir)
    if state is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["pid"], signal.SIGTERM)
        until = time.monotonic() + TIMEOUT
        while running(state_dir) is not None:
            if time.monotonic() > until:
                os.kill(state["pid"], signal.SIGKILL)
                raise ClusterError(f"the embedded cluster (process {state['pid']}) did not stop in time and was killed")
            time.sleep(0.05)
    for name in ("cluster.json", "kubeconfig"):
        (state_dir / name).unlink(missing_ok=True)
    return True


def admin(state: Mapping[str, Any], fault: Mapping[str, Any]) -> None:
    """Inject a fault, given the state from `running`. ClusterError if the cluster rejects it or doesn't respond."""
    headers = {"Authorization": f"Bearer {state['token']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{state['url']}/ktrain/faults", json.dumps(fault).encode(), headers)
    context = ssl.create_default_context(cafile=state["ca_file"])
    try:
        urllib.request.urlopen(request, context=context, timeout=30).close()
    except urllib.error.HTTPError as e:
        raise ClusterError(json.load(e).get("message", str(e))) from None
    except OSError as e:
        raise ClusterError(f"the embedded cluster doesn't respond: {e}") from None


class EmbeddedCluster:
    """A context manager that runs an embedded cluster in a separate process. The cluster stops if this process ends.

    Within the `with` block, these attributes are set: `pid`, `url`, `token` (the bearer token of the admin), and the
    paths `ca_file`, `kubeconfig` and `state_dir`. The state directory is temporary.

    :param images: directory by image name (None or "": an empty directory).
    :param options: the other fields of Config.
    """

    pid: int
    url: str
    token: str
    ca_file: Path
    kubeconfig: Path
    state_dir: Path

    def __init__(self, images: Mapping[str, Path | str | None] | None = None, **options: Any) -> None:
        named = {name: str(Path(path).resolve()) if path else "" for name, path in (images or {}).items()}
        self._config = Config("", images=named, parent=os.getpid(), **options)

    def __enter__(self) -> EmbeddedCluster:
        self.state_dir = Path(tempfile.mkdtemp(prefix="ktrain-"))
        try:
            self._process, self._state = start(replace(self._config, state_dir=str(self.state_dir)))
        except (KeyboardInterrupt, SystemExit):  # other errors refer to the log in this directory
            shutil.rmtree(self.state_dir, ignore_errors=True)
            raise
        self.pid, self.url, self.token = (self._state[key] for key in ("pid", "url", "token"))
        self.ca_file, self.kubeconfig = (Path(self._state[key]) for key in ("ca_file", "kubeconfig"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._process as process:
            process.terminate()
            try:
                process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(self.state_dir, ignore_errors=True)

    def admin(self, fault: str, **options: Any) -> None:
        """Set a fault switch: `admin("status", seconds=2, status=503, verb="list")`, `admin("clear")`."""
        admin(self._state, {"fault": fault, **options})
