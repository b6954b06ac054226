"""The parent of one container run, a process of its own: `python -I -S shim.py`, standard library only.

It speaks with the kubelet by lines of JSON on the socket that is its standard input:

- first from the kubelet, the run: argv, env, cwd, log (path), dir (for the socket of exec), memory (bytes or null);
- back `{"started": pid}` or `{"error": errno}`, at last `{"exit": code, "oom": bool}`, code 128 + n for signal n;
- `{"stop": seconds}` sends the command SIGTERM, and everything SIGKILL after so many seconds.

When the command ends, is stopped for good, or the kubelet's end of the socket closes, every descendant is killed, also
those in sessions of their own: as a subreaper, this process inherits whatever its descendants orphan.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
RECORD = 16 * 1024  # longest record; containerd splits longer lines
READ = 256 * 1024
PIPE = 1024 * 1024
MEMORY_INTERVAL = 0.1  # seconds between looks at the memory
KILL_PATIENCE = 10.0  # seconds for killed processes to go; one stuck in the kernel must not hold the report for ever
DRAIN_PATIENCE = 2.0
ROTATE_BYTES, ROTATE_INTERVAL = 10 * 1024 * 1024, 10.0  # the kubelet's containerLogMaxSize, and how often it looks
EXEC_SOCKET = "exec.sock"


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere nothing, and orphans of a killed container are not found."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    found = {}
    if os.path.isdir("/proc/self"):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as stat:
                found[int(name)] = int(stat.read().rpartition(b")")[2].split()[1])
    else:
        with os.popen("ps -A -o pid=,ppid=") as ps:
            found.update((int(pid), int(parent)) for pid, parent in map(str.split, ps))
    return found


def children(pid: int) -> list[int]:
    """The children of a process, as far as the kernel's quick answer is complete; [] for one that is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as listed:
                found.extend(map(int, listed.read().split()))
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`, parents before their children."""
    below = [root]
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        for pid in below:
            below.extend(children(pid))
        return below[1:]
    by_parent: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        by_parent.setdefault(parent, []).append(pid)
    for pid in below:
        below.extend(by_parent.get(pid, ()))
    return below[1:]


def memory(pids: Iterable[int]) -> int:
    """Bytes of memory that these processes have for themselves: what is resident and not shared."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", "rb") as statm:
            fields = statm.read().split()
            pages += int(fields[1]) - int(fields[2])
    return pages * os.sysconf("SC_PAGE_SIZE")


def kill(pids: Iterable[int], signum: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def handles(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal. In a container, where it is process 1, it is deaf to all others."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        caught = next((line.split()[1] for line in status if line.startswith("SigCgt:")), "0")
        return bool(int(caught, 16) >> (signum - 1) & 1)
    return True


class Log:
    """A container's log file: records `<time> <stream> <F or P> <bytes>`, as containerd writes them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = self._open()
        self._last = 0
        self._looked = time.monotonic()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def write(self, stream: bytes, records: list[bytes], tag: bytes = b"F") -> None:
        """Append records; those of one read are a nanosecond apart: times tell them apart and keep their order."""
        now = max(time.time_ns(), self._last + 1)
        if now % 1_000_000_000 + len(records) > 1_000_000_000:
            now += 1_000_000_000 - now % 1_000_000_000
        self._last = now + len(records) - 1
        second, first = divmod(now, 1_000_000_000)
        prefix = time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second)).encode()
        middle = b"Z " + stream + b" " + tag + b" "
        self._append(b"".join([b"%b%09d%b%b\n" % (prefix, first + i, middle, r) for i, r in enumerate(records)]))

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError):  # a full disk loses lines, as on a node, but does not stop the container
            while view:
                view = view[os.write(self._fd, view) :]
            if time.monotonic() - self._looked > ROTATE_INTERVAL:
                self._looked = time.monotonic()
                self._rotate()

    def _rotate(self) -> None:
        if os.fstat(self._fd).st_size > ROTATE_BYTES:
            os.rename(self._path, self._path + ".rotated")
            os.close(self._fd)
            self._fd = self._open()


class Stream:
    """One output of the container, cut into records."""

    def __init__(self, log: Log, name: bytes) -> None:
        self._log = log
        self._name = name
        self._rest = b""
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self.reader, fcntl.F_SETPIPE_SZ, PIPE)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        try:
            data = os.read(self.reader, READ)
        except BlockingIOError:
            return True
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if lines and max(map(len, lines)) <= RECORD:
            self._log.write(self._name, lines)
        else:
            for line in lines:
                self._log.write(self._name, [self._split(line)])
        self._rest = self._split(self._rest)
        if not data and self._rest:
            self._log.write(self._name, [self._rest], b"P")
        return bool(data)

    def _split(self, line: bytes) -> bytes:
        cuts = range(0, len(line) - RECORD, RECORD)
        for start in cuts:
            self._log.write(self._name, [line[start : start + RECORD]], b"P")
        return line[len(cuts) * RECORD :]


def spawn(run: dict[str, Any], stdio: tuple[int, int, int]) -> int:
    """Start a command in a session of its own; OSError where it cannot be executed."""
    check, told = os.pipe()
    pid = os.fork()
    if pid:
        os.close(told)
        with os.fdopen(check, "rb") as pipe:
            failure = pipe.read()
        if failure:
            os.waitpid(pid, 0)
            raise OSError(int(failure), "exec")
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3) for fd in stdio]
        for target, fd in enumerate(kept):
            os.dup2(fd, target)
        os.closerange(3, told)
        os.closerange(told + 1, 1024)
        os.chdir(run["cwd"])
        os.execvpe(run["argv"][0], run["argv"], run["env"])
    except OSError as error:
        os.write(told, str(error.errno).encode())
    finally:
        os._exit(127)


class Shim:
    """The command, what it writes, what is started beside it by exec, and the kubelet."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._received = b""
        self._poll = select.poll()
        self._ready: dict[int, Callable[[], None]] = {}
        self._main = 0
        self._exit: int | None = None
        self._execs: dict[int, socket.socket] = {}
        self._deadline: float | None = None
        self._oom = False

    def run(self) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        run = self._message()
        self._run = run
        self._log = Log(run["log"])
        streams = [Stream(self._log, b"stdout"), Stream(self._log, b"stderr")]
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            self._main = spawn(run, (null, streams[0].writer, streams[1].writer))
        except OSError as error:
            self._tell(error=error.errno)
            return
        for stream in streams:
            os.close(stream.writer)
            self._when(stream.reader, functools.partial(self._read, stream))
        self._listen(run["dir"])
        self._control.setblocking(False)
        self._when(self._control.fileno(), self._command)
        self._when(woken.fileno(), functools.partial(self._drain, woken))
        self._tell(started=self._main)
        self._obey()
        self._reap()
        while self._exit is None:
            self._turn(self._timeout())
            self._reap()
            self._check_memory()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                break
        self._end(streams)
        self._tell(exit=137 if self._exit is None else self._exit, oom=self._oom)

    # the loop

    def _when(self, fd: int, act: Callable[[], None]) -> None:
        self._ready[fd] = act
        self._poll.register(fd, select.POLLIN)

    def _forget(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._ready[fd]

    def _read(self, stream: Stream) -> None:
        if not stream.read():
            self._forget(stream.reader)

    @staticmethod
    def _drain(woken: socket.socket) -> None:
        woken.recv(4096)

    def _timeout(self) -> float | None:
        waits = [MEMORY_INTERVAL] if self._run["memory"] else []
        if self._deadline is not None:
            waits.append(max(self._deadline - time.monotonic(), 0))
        return min(waits, default=None)

    def _turn(self, timeout: float | None) -> None:
        for fd, _ in self._poll.poll(None if timeout is None else timeout * 1000 + 1):
            if fd in self._ready:
                self._ready[fd]()

    def _reap(self) -> bool:
        """Collect ended children; False where there is none left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                code = os.waitstatus_to_exitcode(status)
                code = 128 - code if code < 0 else code
                if pid == self._main:
                    self._exit = code
                elif pid in self._execs:
                    self._end_exec(pid, exit=code)
        return False

    def _end(self, streams: list[Stream]) -> None:
        """Kill all that is left, and read what it wrote last."""
        end = time.monotonic() + KILL_PATIENCE
        while self._reap() and time.monotonic() < end:
            kill(descendants(os.getpid()))
            self._turn(0.005)
        end = time.monotonic() + DRAIN_PATIENCE
        for stream in streams:
            while stream.reader in self._ready and time.monotonic() < end:
                self._turn(0.05)

    # the kubelet

    def _message(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            data = self._control.recv(READ)
            if not data:
                sys.exit(0)
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _command(self) -> None:
        try:
            data = self._control.recv(READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the kubelet is gone
            self._forget(self._control.fileno())
            self._deadline = time.monotonic()
        self._received += data
        self._obey()

    def _obey(self) -> None:
        """Do what was received: a stop can be so early that it comes together with the run itself."""
        while b"\n" in self._received:
            grace = self._message()["stop"]
            if grace > 0 and self._exit is None and handles(self._main, signal.SIGTERM):
                kill([self._main], signal.SIGTERM)
            due = time.monotonic() + grace
            self._deadline = due if self._deadline is None else min(due, self._deadline)

    def _tell(self, **message: Any) -> None:
        self._control.setblocking(True)
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")
        self._control.setblocking(False)

    def _check_memory(self) -> None:
        limit = self._run["memory"]
        if limit and memory(descendants(os.getpid())) > limit:
            self._oom = True
            self._exit = 137

    # commands beside the container's own

    def _listen(self, directory: str) -> None:
        os.chdir(directory)  # a path of any length, where an address has a hundred bytes
        with contextlib.suppress(FileNotFoundError):
            os.unlink(EXEC_SOCKET)
        server = socket.socket(socket.AF_UNIX)
        server.bind(EXEC_SOCKET)
        os.chmod(EXEC_SOCKET, 0o600)
        server.listen(64)
        self._when(server.fileno(), lambda: self._accept(server))

    def _accept(self, server: socket.socket) -> None:
        """One command to run: JSON with argv and the caller's own standard input, output and error as descriptors."""
        caller, _ = server.accept()
        caller.settimeout(5)
        fds = array.array("i")
        data = b""
        try:
            while not data.endswith(b"\n"):
                part, ancillary, _, _ = caller.recvmsg(READ, socket.CMSG_SPACE(3 * fds.itemsize))
                if not part:
                    raise OSError("incomplete")
                data += part
                for _, _, passed in ancillary:
                    fds.frombytes(passed)
            pid = spawn({**self._run, **json.loads(data)}, (fds[0], fds[1], fds[2]))
        except (OSError, ValueError, IndexError) as error:
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps({"error": getattr(error, "errno", None) or 22}).encode() + b"\n")
            caller.close()
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._execs[pid] = caller
        self._when(caller.fileno(), lambda: self._end_exec(pid))

    def _end_exec(self, pid: int, **message: int) -> None:
        """Tell the caller that its command ended; or, as the caller is gone, kill that command."""
        caller = self._execs.pop(pid)
        self._forget(caller.fileno())
        if message:
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps(message).encode() + b"\n")
        else:
            kill([pid, *descendants(pid)])
        caller.close()


if __name__ == "__main__":
    Shim(socket.socket(fileno=0)).run()
