"""The container runtime. Each run of a container is a shim process with its descendants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ktrain_embedded.node import shim

SHIM = Path(shim.__file__)
SWEEPS = 10  # searches for processes of a killed shim. One search can miss a process that is just forking or executing


@dataclass(frozen=True)
class RunSpec:
    """The parameters of a run, which are sent to the shim.

    :param log: path of the log file.
    :param dir: path of the directory for the exec socket.
    :param memory: memory limit in bytes. None: no limit.
    :param session: the environment of SSH sessions: sshd doesn't pass its own to them.
    :param environment: path of a file whose variables are added to it.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    dir: str
    memory: int | None = None
    session: dict[str, str] = field(default_factory=dict)
    environment: str = ""


@dataclass(frozen=True)
class Ended:
    """How a run ended. `code` is 128 + n for signal n."""

    code: int
    oom: bool = False


class StartError(Exception):
    """The command cannot be executed. The message is that of runc."""

    def __init__(self, argv0: str, errno: int) -> None:
        reason = os.strerror(errno).lower()
        if errno == 2:
            reason = f"stat {argv0}: {reason}" if "/" in argv0 else "executable file not found in $PATH"
        super().__init__(
            "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
            f'failed: unable to start container process: exec: "{argv0}": {reason}'
        )


class Run:
    """A run of a container. Cancelling a caller that waits for its start or end doesn't affect the run."""

    def __init__(self, spec: RunSpec) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self._started: asyncio.Future[int] = loop.create_future()
        self._ended: asyncio.Future[Ended] = loop.create_future()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._shim = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SHIM)], stdin=theirs.fileno(), start_new_session=True, cwd="/"
            )
        self._send(asdict(spec))
        self._task = loop.create_task(self._follow())

    async def started(self) -> int:
        """Wait until the command runs, and return its process id. StartError if it cannot be executed."""
        return await asyncio.shield(self._started)

    async def ended(self) -> Ended:
        """Wait for the end of the container. A caller that is cancelled doesn't affect it."""
        return await asyncio.shield(self._ended)

    @property
    def processes(self) -> list[int]:
        """The ids of the container's processes."""
        return shim.descendants(self._shim.pid)

    def stop(self, grace: float) -> None:
        """Send SIGTERM now and SIGKILL after `grace` seconds; with 0, only SIGKILL. A later call can shorten it."""
        self._send({"stop": grace})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the shim has ended
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    async def _follow(self) -> None:
        argv0, ended = self.spec.argv[0], Ended(137)
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        try:
            async for line in reader:
                match json.loads(line):
                    case {"started": pid}:
                        self._started.set_result(pid)
                    case {"error": errno}:
                        self._started.set_exception(StartError(argv0, errno))
                    case {"exit": code, "oom": oom}:
                        ended = Ended(code, oom)
        except OSError:
            pass
        finally:
            writer.close()
            self._shim.wait()  # its end of the socket is closed, so it has ended or is about to end
            if not self._started.done():
                self._started.set_exception(StartError(argv0, 5))
            if self._shim.returncode < 0:
                sweep(self.spec.env["PATH"].partition(":")[0])
            self._ended.set_result(ended)
            self._started.exception()  # mark the exception as retrieved, in case nobody waits for the start


def sweep(first_in_path: str) -> None:
    """Kill the processes of a shim that was killed: all processes whose PATH begins with the pod's own directory.

    It doesn't find processes on a system without /proc, or processes that have replaced their environment.
    """
    marker = f"\0PATH={first_in_path}:".encode()
    for _ in range(SWEEPS):
        found = False
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if marker in b"\0" + environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
