"""The container runtime: one run of a container is one shim process with everything below it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from airflow_provider_ktrain.local import shim

SHIM = Path(shim.__file__)


@dataclass(frozen=True)
class RunSpec:
    """What the shim is told. `log` and `dir` are paths, `memory` is in bytes (None: no limit)."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    dir: str
    memory: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a run ended. `code` is 128 + n for signal n."""

    code: int
    oom: bool = False


class StartError(Exception):
    """The command cannot be executed; worded as runc words it."""

    def __init__(self, argv0: str, errno: int) -> None:
        reasons = {2: f"stat {argv0}: no such file or directory", 13: "permission denied", 8: "exec format error"}
        reason = reasons.get(errno, os.strerror(errno))
        if errno == 2 and "/" not in argv0:
            reason = "executable file not found in $PATH"
        super().__init__(
            "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
            f'failed: unable to start container process: exec: "{argv0}": {reason}'
        )


class Run:
    """A run from its start to its end; both are futures that no waiter can cancel by being cancelled (`wait`)."""

    def __init__(self, spec: RunSpec) -> None:
        loop = asyncio.get_running_loop()
        self.spec = spec
        self._started: asyncio.Future[int] = loop.create_future()
        self._ended: asyncio.Future[Ended] = loop.create_future()
        Path(spec.dir).mkdir(parents=True, exist_ok=True)
        self._unsaid: list[bytes] = []  # what the shim is to be told, in this order, once it is connected
        self._writer: asyncio.StreamWriter | None = None
        self._say(asdict(spec))
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SHIM)], stdin=theirs.fileno(), start_new_session=True, cwd="/"
            )
        self._task = loop.create_task(self._follow(ours))

    @property
    def running(self) -> bool:
        return self._started.done() and not self._started.exception() and not self._ended.done()

    async def started(self) -> int:
        """The process id of the command, once it runs; StartError where it cannot."""
        return await asyncio.shield(self._started)

    async def ended(self) -> Ended:
        return await asyncio.shield(self._ended)

    def stop(self, grace: float) -> None:
        """SIGTERM now and SIGKILL after `grace` seconds; 0 is SIGKILL at once. A later call can shorten the time."""
        self._say({"stop": grace})

    def kill_shim(self) -> None:
        """What happens when the machine takes the shim itself: for tests."""
        self._process.kill()

    def _say(self, message: dict[str, Any]) -> None:
        self._unsaid.append(json.dumps(message).encode() + b"\n")
        if self._writer and not self._writer.is_closing():
            self._writer.writelines(self._unsaid)
            self._unsaid.clear()

    async def _follow(self, connection: socket.socket) -> None:
        ended = Ended(137)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._writer.writelines(self._unsaid)
        self._unsaid.clear()
        try:
            async for line in reader:
                ended = self._told(json.loads(line)) or ended
        except OSError:
            pass
        finally:
            self._writer.close()
            self._process.wait()  # its end of the socket is closed: it is gone, or all but
            if not self._started.done():
                self._started.set_exception(StartError(self.spec.argv[0], 5))
            if self._process.returncode < 0:
                sweep(self.spec.env["PATH"].partition(":")[0])
            self._ended.set_result(ended)
            self._started.exception()  # seen, if only here

    def _told(self, message: dict[str, Any]) -> Ended | None:
        if "started" in message:
            self._started.set_result(message["started"])
        elif "error" in message:
            self._started.set_exception(StartError(self.spec.argv[0], message["error"]))
        else:
            return Ended(137 if message["oom"] else message["exit"], message["oom"])
        return None


def sweep(first_in_path: str) -> None:
    """Kill what a shim left that was itself killed: all processes whose PATH begins with the pod's own directory.

    It finds nothing where there is no /proc, nor what replaced its environment.
    """
    marker = f"PATH={first_in_path}:".encode()
    for pid in shim.parents():
        with contextlib.suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if any(variable.startswith(marker) for variable in environ.split(b"\0")):
                os.kill(pid, signal.SIGKILL)
