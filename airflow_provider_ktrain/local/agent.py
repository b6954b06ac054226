"""The tools that a pod finds in its PATH: `python -I -S agent.py TOOL ROOT SOCKET NAMESPACE [argument]...`.

Standard library only. `nslookup` asks the kubelet whether a name resolves; `ssh` and `kubectl exec` run a command in
another pod, below that pod's shim, with this process's own standard input, output and error; `sshd` waits, as its work
is done by the shim; `mpirun` is the real one, and tells of lost hosts; `deliver-kubectl` is what the launcher's init
container does in an MPIJob v1.
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
from typing import Any, NoReturn

KILLED = 137  # the exit code of what was killed
LOST_PATIENCE = 10.0  # seconds that mpirun's remote commands have to end after it
SSH_WITH_VALUE = set("BbcDEeFIiJLlmOopQRSWw")  # options of ssh that take a value
KUBECTL_WITH_VALUE = {"-n", "--namespace", "-c", "--container"}


class Agent:
    """`root` and `address`: where the kubelet listens, and as what; `namespace`: the pod's own."""

    def __init__(self, root: str, address: str, namespace: str, tool: str) -> None:
        self._root = root
        self._address = address
        self._namespace = namespace
        self._tool = tool

    def ask(self, name: str, how: str, container: str | None = None, namespace: str | None = None) -> dict[str, Any]:
        """What the kubelet knows of a name: ip and directory of the pod, or {}. `how` is dns or pod."""
        question = {"namespace": namespace or self._namespace, "name": name, "how": how, "container": container}
        with connect(self._root, self._address) as kubelet:
            kubelet.sendall(json.dumps(question).encode() + b"\n")
            answer: dict[str, Any] = json.loads(kubelet.makefile("rb").readline() or b"{}")
        return answer

    def execute(self, directory: str, argv: list[str]) -> int:
        """Run a command in the container whose shim listens in `directory`; its exit code."""
        mark = self._underway / str(os.getpid())
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
        with connect(directory, "exec.sock") as shim:
            request = json.dumps({"argv": argv}).encode() + b"\n"
            sent = socket.send_fds(shim, [request], [0, 1, 2])
            shim.sendall(request[sent:])
            answer: dict[str, int] = json.loads(shim.makefile("rb").readline() or b'{"exit": 137}')
        code = 126 if "error" in answer else answer["exit"]
        if code != KILLED:
            mark.unlink(missing_ok=True)
        return code

    @property
    def _underway(self) -> Path:
        """A file for each command in another pod, by the process that waits for it; those that were killed stay."""
        return Path(os.environ["PATH"].partition(":")[0], "underway")

    def _lost_any(self) -> bool:
        """Whether a command in another pod did not come to its end, once all that wait for one have ended."""
        until = time.monotonic() + LOST_PATIENCE
        marks = list(self._underway.glob("*"))
        while any(alive(int(mark.name)) for mark in marks) and time.monotonic() < until:
            time.sleep(0.01)
        return any(mark.exists() for mark in marks)

    # the tools

    def nslookup(self, name: str) -> int:
        found = self.ask(name, "dns")
        if not found:
            say(f"** server can't find {name}: NXDOMAIN", sys.stdout)
            return 1
        say(f"Name:\t{name}\nAddress: {found['ip']}", sys.stdout)
        return 0

    def ssh(self, *arguments: str) -> int:
        rest = list(arguments)
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if len(option) == 2 and option[1] in SSH_WITH_VALUE and rest:
                rest.pop(0)
        host = rest.pop(0).rpartition("@")[2] if rest else ""
        found = self.ask(host, "dns") if host else {}
        if not found:
            real = shutil.which("ssh", path=os.environ["PATH"].partition(":")[2])
            if real and host and "." in host and not host.endswith(".svc"):
                os.execv(real, ["ssh", *arguments])
            say(f"ssh: Could not resolve hostname {host}: Name or service not known")
            return 255
        if not found["directory"]:
            say(f"ssh: connect to host {host} port 22: Connection refused")
            return 255
        return self.execute(found["directory"], ["/bin/sh", "-c", " ".join(rest)])

    def kubectl(self, *arguments: str) -> int:
        if arguments[:1] != ("exec",) or "--" not in arguments:
            say("error: this kubectl knows nothing but: exec POD [-c CONTAINER] -- COMMAND")
            return 1
        split = arguments.index("--")
        options, argv, pod = dict[str, str](), list(arguments[split + 1 :]), ""
        words = iter(arguments[1:split])
        for word in words:
            if word in KUBECTL_WITH_VALUE:
                options[word.lstrip("-")[0]] = next(words, "")
            elif not word.startswith("-"):
                pod = word.rpartition("/")[2]
        found = self.ask(pod, "pod", options.get("c"), options.get("n"))
        if not found:
            say(f'Error from server (NotFound): pods "{pod}" not found')
            return 1
        if not found["directory"]:
            say(f"error: cannot exec into a container in a pod that does not run; current phase is {found['phase']}")
            return 1
        code = self.execute(found["directory"], argv)
        if code:
            say(f"command terminated with exit code {code}")
        return code

    def sshd(self, *_: str) -> int:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda caught, _: sys.exit(caught))
        try:
            say("Server listening on 0.0.0.0 port 22.\nServer listening on :: port 22.")
            signal.pause()
        except SystemExit as told:  # said here: the signal can come in the middle of what is said above
            say(f"Received signal {told.code}; terminating.")
        return 0

    def mpirun(self, *arguments: str) -> int:
        """The real mpirun, but for one thing: Open MPI 5 ends with 0 when a host is lost, where 4 ended with 1."""
        real = shutil.which("mpirun", path=os.environ["PATH"].partition(":")[2]) or "mpirun"
        shutil.rmtree(self._underway, ignore_errors=True)
        process = subprocess.Popen([real, *arguments])
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda caught, _: process.send_signal(caught))
        code = process.wait()
        return 128 - code if code < 0 else code or int(self._lost_any())

    def deliver_kubectl(self, hostfile: str) -> int:
        """Put kubectl where the launcher looks for it, then wait until all hosts of the hostfile run, or have run."""
        shutil.copy(
            Path(os.environ["PATH"].partition(":")[0], "kubectl-exec"), Path(os.environ["TARGET_DIR"], "kubectl")
        )
        for line in Path(hostfile).read_text().splitlines():
            while line.split() and self.ask(line.split()[0], "pod").get("phase", "Pending") == "Pending":
                time.sleep(0.5)
        return 0


def connect(directory: str, name: str) -> socket.socket:
    """A connection to a socket whose path may be longer than an address: by way of its directory."""
    os.chdir(directory)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(name)
    return connection


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def say(text: str, file: Any = None) -> None:
    with contextlib.suppress(BrokenPipeError):
        (file or sys.stderr).write(text + "\n")
        (file or sys.stderr).flush()


def main(tool: str, root: str, address: str, namespace: str, *arguments: str) -> NoReturn:
    agent = Agent(root, address, namespace, tool)
    sys.exit(getattr(agent, tool.replace("-", "_"))(*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
