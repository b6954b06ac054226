"""The parent process of one container run: `python -I -S shim.py`. It uses the standard library only.

The shim and the kubelet exchange lines of JSON on a socket, which is the shim's standard input:

- The kubelet first sends the run: argv, env, cwd, log (path), dir (for the exec socket), memory (bytes or null),
  session (the environment of SSH sessions) and environment (path of the image's /etc/environment).
- The shim responds with `{"started": pid}` or `{"error": errno}`. At the end it sends `{"exit": code, "oom": bool}`.
  The code is 128 + n for signal n.
- On `{"stop": seconds}` the shim sends SIGTERM to the command, and after these seconds SIGKILL to all processes.

When the command has ended, the time to stop is over, or the kubelet's end of the socket is closed, the shim kills all
descendants. This includes processes in other sessions: as a subreaper, the shim becomes the parent of orphans.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterable
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RECORD = 16 * 1024  # maximum length of a record. containerd splits longer lines
READ = 256 * 1024
MEMORY_INTERVAL = 0.1  # seconds between measurements of the memory
KILL_TIMEOUT = 10.0  # seconds to wait for killed processes. One that hangs in the kernel must not block the report
DRAIN_TIMEOUT = 2.0
ROTATE_BYTES, ROTATE_INTERVAL = 10 * 1024 * 1024, 10.0  # the kubelet's containerLogMaxSize, and seconds between checks
EXEC_SOCKET = "exec.sock"
CANNOT_EXECUTE = 126  # the exit code of an exec command that cannot be executed
HAS_CHILDREN_FILE = os.path.exists(
    f"/proc/self/task/{os.getpid()}/children"
)  # whether /proc lists the children of a process


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl. On other systems, do nothing: orphans of a killed container are not found there."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def parents() -> dict[int, int]:
    """The parent of each process on this machine."""
    found = {}
    if os.path.isdir("/proc/self"):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                found[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    else:
        with os.popen("ps -A -o pid=,ppid=") as ps:
            found.update((int(pid), int(parent)) for pid, parent in map(str.split, ps))
    return found


def children(pid: int) -> list[int]:
    """The children of a process, as listed in /proc. [] if the process doesn't exist."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as listed:
                found += map(int, listed.read().split())
    return found


def descendants(root: int) -> list[int]:
    """All descendants of `root`, parents before their children."""
    below, known = [root], {} if HAS_CHILDREN_FILE else parents()
    for pid in below:
        below += children(pid) if HAS_CHILDREN_FILE else [child for child, parent in known.items() if parent == pid]
    return below[1:]


def memory(pids: Iterable[int]) -> int:
    """Private memory of these processes in bytes: resident minus shared."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as statm:
            _, resident, shared, *_ = map(int, statm.read().split())
            pages += resident - shared
    return pages * os.sysconf("SC_PAGE_SIZE")


def kill(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
    """Send a signal to processes. Ignores those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal. As process 1 of a real container, it would ignore other signals."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (signum - 1) & 1)
    return True


class Log:
    """A container's log file. Its records have containerd's format: `<time> <stream> <F or P> <bytes>`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = self._open()
        self._rests: dict[bytes, bytes] = {}  # the incomplete last line of each stream
        self._free = 0  # the earliest time for the next record, in nanoseconds
        self._last_rotation_check = time.monotonic()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)

    def feed(self, stream: bytes, data: bytes) -> None:
        """Log data of a stream as complete lines and as parts of long lines. b"" is the end of the stream."""
        *lines, rest = (self._rests.get(stream, b"") + data).split(b"\n")
        records = []
        for line in lines:
            *begun, last = pieces(line)
            records += [*((b"P", piece) for piece in begun), (b"F", last)]
        *begun, self._rests[stream] = pieces(rest)
        records += [(b"P", piece) for piece in begun]
        if not data and rest:
            records.append((b"P", self._rests[stream]))
        self._write(stream, records)

    def _write(self, stream: bytes, records: list[tuple[bytes, bytes]]) -> None:
        """Append records. Each gets a later time than the one before, so that times are unique and ordered."""
        second, first = divmod(max(time.time_ns(), self._free), 1_000_000_000)
        if first + len(records) > 1_000_000_000:
            second, first = second + 1, 0
        self._free = second * 1_000_000_000 + first + len(records)
        prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        lines = [b"%b.%09dZ %b %b %b\n" % (prefix, first + i, stream, *record) for i, record in enumerate(records)]
        left = memoryview(b"".join(lines))
        with contextlib.suppress(OSError):  # a full disk loses lines, as on a real node; the container continues
            while left:
                left = left[os.write(self._fd, left) :]
            if time.monotonic() - self._last_rotation_check > ROTATE_INTERVAL:
                self._last_rotation_check = time.monotonic()
                self._rotate()

    def _rotate(self) -> None:
        if os.fstat(self._fd).st_size > ROTATE_BYTES:
            os.rename(self._path, self._path + ".rotated")
            os.close(self._fd)
            self._fd = self._open()


def pieces(line: bytes) -> list[bytes]:
    """Split a line into records of the maximum length. The last contains the rest."""
    return [line[start : start + RECORD] for start in range(0, len(line) or 1, RECORD)]


def spawn(run: dict[str, Any], stdin: int, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start a command in a new session. OSError or ValueError if it cannot be executed.

    With `tty` in `run`, its standard input is a terminal, which becomes the controlling terminal of the session.
    """
    env = {**run["env"], "TERM": "xterm"} if run.get("tty") else run["env"]

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if run.get("tty"):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        run["argv"], stdin=stdin, stdout=stdout, stderr=stderr, cwd=run["cwd"], env=env, start_new_session=True,
        preexec_fn=prepare,
    )  # fmt: skip


def set_by_pam(path: str) -> dict[str, str]:
    """The variables of /etc/environment, which PAM sets in SSH sessions. {} if the file doesn't exist."""
    lines: list[str] = []
    with contextlib.suppress(OSError), open(path, errors="replace") as file:
        lines = file.read().splitlines()
    entries = (line.strip().removeprefix("export ").partition("=") for line in lines if not line.startswith("#"))
    return {name.strip(): value.strip().strip("\"'") for name, equals, value in entries if equals and name.strip()}


class Shim:
    """Runs the container's command and exec commands, writes the log, and communicates with the kubelet."""

    def __init__(self, kubelet: socket.socket) -> None:
        self._kubelet = kubelet
        self._received = b""
        self._ready = selectors.DefaultSelector()
        self._run: dict[str, Any] = {}
        self._main: subprocess.Popen[bytes] | None = None
        self._outputs: set[int] = set()
        self._exit: int | None = None
        self._execs: dict[int, socket.socket] = {}
        self._deadline = math.inf
        self._oom = False

    def run(self) -> None:
        """Run until the command and all its descendants have ended."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        woken, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda *_: None)  # not SIG_IGN, which the command would inherit
        self._when(woken, lambda: woken.recv(READ))
        self._when(self._kubelet, self._receive)
        while self._exit is None and (left := self._deadline - time.monotonic()) > 0:
            limit = self._run.get("memory")
            self._turn(min(left, MEMORY_INTERVAL if limit else 3600))
            self._reap()
            if limit and self._exit is None and memory(descendants(os.getpid())) > limit:
                self._oom = True
                break
        self._end()
        self._send(exit=137 if self._exit is None else self._exit, oom=self._oom)

    def _when(self, source: socket.socket | int, act: Callable[[], object]) -> None:
        self._ready.register(source, selectors.EVENT_READ, act)

    def _turn(self, timeout: float) -> None:
        for key, _ in self._ready.select(timeout):
            if key.fd in self._ready.get_map():
                key.data()

    def _reap(self) -> bool:
        """Collect ended children. Returns False if no children are left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code
                if self._main and pid == self._main.pid:
                    self._exit = code
                elif pid in self._execs:
                    self._answer(self._forget(pid), code)
        return False

    def _end(self) -> None:
        """Kill all remaining processes, and read the rest of their output."""
        until = time.monotonic() + KILL_TIMEOUT
        while self._reap() and time.monotonic() < until:
            kill(descendants(os.getpid()))
            self._turn(0.005)
        until = time.monotonic() + DRAIN_TIMEOUT
        while self._outputs and time.monotonic() < until:
            self._turn(0.05)

    # messages of the kubelet, and the container's command

    def _receive(self) -> None:
        """Process messages of the kubelet: run and stop. If the kubelet has ended, end everything at once."""
        data = b""
        with contextlib.suppress(OSError):
            data = self._kubelet.recv(READ)
        *messages, self._received = (self._received + data).split(b"\n")
        for message in map(json.loads, messages):
            if "stop" in message:
                self._stop(message["stop"])
            else:
                self._start(message)
        if not data:
            self._ready.unregister(self._kubelet)
            self._deadline = 0

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self._kubelet.sendall(json.dumps(message).encode() + b"\n")

    def _start(self, run: dict[str, Any]) -> None:
        log = Log(run["log"])
        try:
            self._main = spawn(run, subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE)
        except (OSError, ValueError) as error:
            self._send(error=getattr(error, "errno", errno.EINVAL))
            sys.exit()
        for stream, pipe in ((b"stdout", self._main.stdout), (b"stderr", self._main.stderr)):
            assert pipe
            self._outputs.add(pipe.fileno())
            self._when(pipe.fileno(), functools.partial(self._copy, log, stream, pipe.fileno()))
        self._run = run
        self._listen(run["dir"])
        self._send(started=self._main.pid)

    def _copy(self, log: Log, stream: bytes, pipe: int) -> None:
        data = os.read(pipe, READ)
        log.feed(stream, data)
        if not data:
            self._ready.unregister(pipe)
            self._outputs.remove(pipe)

    def _stop(self, grace: float) -> None:
        if grace > 0 and self._exit is None and self._main and handles(self._main.pid, signal.SIGTERM):
            kill([self._main.pid], signal.SIGTERM)
        self._deadline = min(self._deadline, time.monotonic() + grace)

    # exec commands

    def _listen(self, directory: str) -> None:
        os.chdir(directory)  # a socket address is limited to about 100 bytes; the path can be longer
        with contextlib.suppress(FileNotFoundError):
            os.unlink(EXEC_SOCKET)
        server = socket.socket(socket.AF_UNIX)
        server.bind(EXEC_SOCKET)
        os.chmod(EXEC_SOCKET, 0o600)
        server.listen(64)
        self._when(server, lambda: self._accept(server))

    def _accept(self, server: socket.socket) -> None:
        """Run an exec command. The request is JSON: argv, tty, session. The caller passes its standard streams."""
        caller, _ = server.accept()
        caller.settimeout(5)
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(caller, READ, 3)
            if not data.endswith(b"\n"):
                data += caller.makefile("rb").readline()
            asked = json.loads(data)
            run = {**self._run, "argv": asked["argv"], "tty": asked.get("tty", False)}
            if asked.get("session"):
                run["env"] = {**run["session"], **set_by_pam(run["environment"])}
            process = spawn(run, *fds)
        except (OSError, ValueError) as error:
            self._answer(caller, CANNOT_EXECUTE, error=str(error))
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._execs[process.pid] = caller
        self._when(caller, lambda: self._abandon(process.pid))

    @staticmethod
    def _answer(caller: socket.socket, code: int, **more: str) -> None:
        with contextlib.suppress(OSError), caller:
            caller.sendall(json.dumps({"exit": code, **more}).encode() + b"\n")

    def _abandon(self, pid: int) -> None:
        """Kill the command of a caller that has ended."""
        self._forget(pid).close()
        kill([pid, *descendants(pid)])

    def _forget(self, pid: int) -> socket.socket:
        caller = self._execs.pop(pid)
        self._ready.unregister(caller)
        return caller


if __name__ == "__main__":
    Shim(socket.socket(fileno=0)).run()
