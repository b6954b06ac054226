"""The tools that a pod finds in its PATH: `python -I -S agent.py TOOL ROOT SOCKET NAMESPACE [argument]...`.

Standard library only. `nslookup` asks the kubelet whether a name resolves; `ssh` and `kubectl exec` run a command in
another pod, below that pod's shim, with this process's own standard input, output and error; `mpirun` is the real one,
and tells of lost hosts; `deliver-kubectl` is what the launcher's init container does in an MPIJob v1.
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

KILLED = 137  # the exit code of what was killed
LOST_PATIENCE = 10.0  # seconds that mpirun's remote commands have to end after it
SSH_WITH_VALUE = set("BbcDEeFIiJLlmOopQRSWw")  # options of ssh that take a value
TOOLS, _, OTHERS = os.environ.get("PATH", "").partition(":")  # the directory of these tools, and the rest of PATH
UNDERWAY = Path(TOOLS, "underway")  # a file for each command in another pod, by the process that waits for it


class Agent:
    """`root` and `address`: where the kubelet listens, and as what; `namespace`: the pod's own."""

    def __init__(self, root: str, address: str, namespace: str) -> None:
        self._root = root
        self._address = address
        self._namespace = namespace

    def ask(self, how: str, name: str, container: str = "") -> dict[str, Any]:
        """What the kubelet knows of a name: ip, phase and directory of the pod, or {}. `how` is dns or pod."""
        question = {"namespace": self._namespace, "name": name, "how": how, "container": container}
        with connect(self._root, self._address) as kubelet:
            kubelet.sendall(json.dumps(question).encode() + b"\n")
            answer: dict[str, Any] = json.loads(kubelet.makefile("rb").readline() or b"{}")
        return answer

    def nslookup(self, name: str) -> int:
        """Print the address of a pod or service, as nslookup does; exit code 1 if it has none."""
        found = self.ask("dns", name)
        if not found:
            say(f"** server can't find {name}: NXDOMAIN", sys.stdout)
            return 1
        say(f"Name:\t{name}\nAddress: {found['ip']}", sys.stdout)
        return 0

    def ssh(self, *arguments: str) -> int:
        """Run a command in the Worker of this host name, instead of a real sshd."""
        rest = list(arguments)
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if len(option) == 2 and option[1] in SSH_WITH_VALUE and rest:
                rest.pop(0)
        host = rest.pop(0).rpartition("@")[2] if rest else ""
        found = self.ask("dns", host)
        if not found:
            say(f"ssh: Could not resolve hostname {host}: Name or service not known")
            return 255
        if not found["directory"]:
            say(f"ssh: connect to host {host} port 22: Connection refused")
            return 255
        return execute(found["directory"], ["/bin/sh", "-c", " ".join(rest)])

    def kubectl(self, *arguments: str) -> int:
        """Run a command in a pod; `exec` is the only command of kubectl that mpirun uses."""
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
        """The real mpirun, but for one thing: Open MPI 5 ends with 0 when a host is lost, where 4 ended with 1."""
        shutil.rmtree(UNDERWAY, ignore_errors=True)
        process = subprocess.Popen([shutil.which("mpirun", path=OTHERS) or "mpirun", *arguments])
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda caught, _: process.send_signal(caught))
        code = process.wait()
        return 128 - code if code < 0 else code or int(lost_any())

    def deliver_kubectl(self, hostfile: str) -> int:
        """Put kubectl where the launcher looks for it, then wait until all hosts of the hostfile run, or have run."""
        shutil.copy(Path(TOOLS, "kubectl-exec"), Path(os.environ["TARGET_DIR"], "kubectl"))
        for host in filter(None, (line.partition(" ")[0] for line in Path(hostfile).read_text().splitlines())):
            while self.ask("pod", host).get("phase", "Pending") == "Pending":
                time.sleep(0.5)
        return 0


def execute(directory: str, argv: list[str]) -> int:
    """Run a command in the container whose shim listens in `directory`; its exit code."""
    mark = UNDERWAY / str(os.getpid())
    mark.parent.mkdir(exist_ok=True)
    mark.touch()
    with connect(directory, "exec.sock") as shim:
        request = json.dumps({"argv": argv}).encode() + b"\n"
        sent = socket.send_fds(shim, [request], [0, 1, 2])
        shim.sendall(request[sent:])
        code: int = json.loads(shim.makefile("rb").readline() or b'{"exit": 137}')["exit"]
    if code != KILLED:  # what was killed leaves its mark
        mark.unlink(missing_ok=True)
    return code


def lost_any() -> bool:
    """Whether a command in another pod did not come to its end, once all that wait for one have ended."""
    until = time.monotonic() + LOST_PATIENCE
    marks = list(UNDERWAY.glob("*"))
    while any(alive(int(mark.name)) for mark in marks) and time.monotonic() < until:
        time.sleep(0.01)
    return any(mark.exists() for mark in marks)


def alive(pid: int) -> bool:
    """Whether a process of this id exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def connect(directory: str, name: str) -> socket.socket:
    """A connection to a socket whose path may be longer than an address: by way of its directory."""
    os.chdir(directory)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(name)
    return connection


def say(text: str, file: Any = None) -> None:
    """Print a line, also if nobody reads it any more."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=file or sys.stderr, flush=True)


if __name__ == "__main__":
    tool, root, address, namespace, *arguments = sys.argv[1:]
    sys.exit(getattr(Agent(root, address, namespace), tool.replace("-", "_"))(*arguments))
