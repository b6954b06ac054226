"""The tools in a pod's PATH: `python -I -S agent.py TOOL ROOT SOCKET NAMESPACE [argument]...`.

This module uses the standard library only.

- `nslookup` asks the kubelet whether a name resolves.
- `ssh` and `kubectl exec` run a command in another pod. The command is a child of that pod's shim and uses the
  standard input, output and error of this process.
- `mpirun` runs the real mpirun and also fails if a host was lost.
- `deliver-kubectl` does what the launcher's init container does in an MPIJob v1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

KILLED = 137  # the exit code of a killed process
REMOTE_COMMANDS_TIMEOUT = 10.0  # seconds to wait for mpirun's remote commands after mpirun has ended
SSH_WITH_VALUE = set("BbcDEeFIiJLlmOopQRSWw")  # options of ssh that take a value
TOOLS, _, OTHER_PATHS = os.environ.get("PATH", "").partition(":")  # the directory of these tools, and the rest of PATH
RUNNING_COMMANDS = Path(
    TOOLS, "underway"
)  # a file for each command in another pod; its name is the id of the waiting process


class Agent:
    """Runs the tools of a pod.

    :param root: the directory of the kubelet's socket.
    :param address: the name of the socket in that directory.
    :param namespace: the namespace of the pod.
    """

    def __init__(self, root: str, address: str, namespace: str) -> None:
        self._root = root
        self._address = address
        self._namespace = namespace

    def ask(self, how: str, name: str, container: str = "") -> dict[str, Any]:
        """Return ip, phase and directory of a pod, or {} if the kubelet doesn't find it. `how` is dns or pod."""
        question = {"namespace": self._namespace, "name": name, "how": how, "container": container}
        with connect(self._root, self._address) as kubelet:
            kubelet.sendall(json.dumps(question).encode() + b"\n")
            answer: dict[str, Any] = json.loads(kubelet.makefile("rb").readline() or b"{}")
        return answer

    def nslookup(self, name: str) -> int:
        """Print the address of a pod or service, as nslookup does. The exit code is 1 if it doesn't resolve."""
        found = self.ask("dns", name)
        if not found:
            say(f"** server can't find {name}: NXDOMAIN", sys.stdout)
            return 1
        say(f"Name:\t{name}\nAddress: {found['ip']}", sys.stdout)
        return 0

    def ssh(self, *arguments: str) -> int:
        """Run a command in the Worker with this host name, whose sshd must run. It is not a real one."""
        rest, attempts = list(arguments), 1
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if len(option) == 2 and option[1] in SSH_WITH_VALUE and rest:
                option += rest.pop(0)
            name, _, value = option.partition("=")
            if name == "-oConnectionAttempts" and value.isdigit():
                attempts = int(value)
        host = rest.pop(0).rpartition("@")[2] if rest else ""
        command = ["/bin/sh", "-c", " ".join(rest)]
        for attempt in range(attempts):
            if attempt:
                time.sleep(1)
            found = self.ask("dns", host)
            if not found:
                say(f"ssh: Could not resolve hostname {host}: Name or service not known")
                return 255
            if found["directory"] and Path(found["directory"]).parent == Path(TOOLS).parent:
                os.execv(command[0], command)  # mpirun starts the ranks on its own host without ssh
            if found["sshd"]:
                return execute(found["directory"], command, session=True)
        say(f"ssh: connect to host {host} port 22: Connection refused")
        return 255

    def kubectl(self, *arguments: str) -> int:
        """Run a command in a pod. `exec` is the only kubectl command that mpirun uses."""
        match list(arguments):
            case ["exec", pod, "--", *argv]:
                container = ""
            case ["exec", pod, "--container", container, "--", *argv]:
                pass
            case _:
                say("error: this kubectl knows nothing but: exec POD [--container CONTAINER] -- COMMAND")
                return 1
        found = self.ask("pod", pod, container)
        if not found:
            say(f'Error from server (NotFound): pods "{pod}" not found')
            return 1
        if not found["directory"]:
            say(f"error: cannot exec into a container in a pod that does not run; current phase is {found['phase']}")
            return 1
        code = execute(found["directory"], argv)
        if code:
            say(f"command terminated with exit code {code}")
        return code

    def mpirun(self, *arguments: str) -> int:
        """Run the real mpirun. If a host is lost, return 1 as Open MPI 4 does; Open MPI 5 returns 0."""
        shutil.rmtree(RUNNING_COMMANDS, ignore_errors=True)
        process = subprocess.Popen([shutil.which("mpirun", path=OTHER_PATHS) or "mpirun", *arguments])
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda caught, _: process.send_signal(caught))
        code = process.wait()
        return 128 - code if code < 0 else code or int(lost_any())

    def deliver_kubectl(self, hostfile: str) -> int:
        """Copy kubectl to the launcher's directory, then wait until the Workers of the hostfile have started."""
        shutil.copy(Path(TOOLS, "kubectl-exec"), Path(os.environ["TARGET_DIR"], "kubectl"))
        hosts = (line.partition(" ")[0] for line in Path(hostfile).read_text().splitlines())
        for host in (host for host in hosts if host and not host.endswith("launcher")):
            while self.ask("pod", host).get("phase", "Pending") == "Pending":
                time.sleep(0.5)
        return 0


def execute(directory: str, argv: list[str], *, session: bool = False) -> int:
    """Run a command in the container whose shim listens in `directory`, and return its exit code.

    :param session: whether sshd starts the command, without the container's variables.
    """
    mark = RUNNING_COMMANDS / str(os.getpid())
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    with connect(directory, "exec.sock") as shim:
        request = json.dumps({"argv": argv, "session": session}).encode() + b"\n"
        sent = socket.send_fds(shim, [request], [0, 1, 2])
        shim.sendall(request[sent:])
        code: int = json.loads(shim.makefile("rb").readline() or b'{"exit": 137}')["exit"]
    if code != KILLED:  # the file of a killed command remains
        mark.unlink(missing_ok=True)
    return code


def lost_any() -> bool:
    """Whether a command in another pod was killed. Waits until the local processes of all commands have ended."""
    until = time.monotonic() + REMOTE_COMMANDS_TIMEOUT
    marks = list(RUNNING_COMMANDS.glob("*"))
    while any(alive(int(mark.name)) for mark in marks) and time.monotonic() < until:
        time.sleep(0.01)
    return any(mark.exists() for mark in marks)


def alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def connect(directory: str, name: str) -> socket.socket:
    """Connect to a socket. Changes to its directory first, because a full path can be too long for an address."""
    os.chdir(directory)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(name)
    return connection


def say(text: str, file: Any = None) -> None:
    """Print a line, and ignore a closed pipe."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=file or sys.stderr, flush=True)


if __name__ == "__main__":
    tool, root, address, namespace, *arguments = sys.argv[1:]
    sys.exit(getattr(Agent(root, address, namespace), tool.replace("-", "_"))(*arguments))
