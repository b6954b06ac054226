"""pods/exec over WebSocket, as kubectl 1.31 and newer and the official clients use it.

The command runs as a child of the container's shim, with the container's environment and working directory, like the
commands of an MPIJob's launcher (node/exec.py). Each message of the WebSocket begins with a channel's number.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import socket
import struct
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from ktrain_embedded.apiserver.requestinfo import flag
from ktrain_embedded.node.environment import Paths
from ktrain_embedded.node.shim import EXEC_SOCKET
from ktrain_embedded.objects.errors import ApiError
from ktrain_embedded.objects.pods import container_of, container_status
from ktrain_embedded.objects.store import Obj

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255  # channels. v5 has CLOSE, which ends another one
READ = 32 * 1024
DRAIN_SECONDS = 2.0  # for the rest of the output: a process that the command left behind may keep it open
END_OF_FILE = b"\x04"  # on a terminal
UPGRADE = (
    "this cluster serves exec over WebSocket only: use kubectl 1.31 or newer, or set "
    "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true for kubectl 1.29 and 1.30"
)
COPY = (
    "kubectl cp is not supported by the embedded cluster: containers are processes of this machine. "
    "Copy the files in {}, the directory of the container's image"
)
#: Other subresources of pods that kubectl uses, and why they are not served.
UNSUPPORTED = {
    "attach": "kubectl attach is not supported by the embedded cluster: use `kubectl logs -f` or `kubectl exec`",
    "portforward": "kubectl port-forward is not supported by the embedded cluster: containers are processes of this "
    "machine, connect to their port on 127.0.0.1",
    "proxy": "the proxy of pods is not supported by the embedded cluster: connect to the port on 127.0.0.1",
    "ephemeralcontainers": "kubectl debug is not supported by the embedded cluster: use `kubectl exec`",
}


@dataclass(frozen=True)
class ExecOptions:
    """PodExecOptions."""

    command: Sequence[str]
    container: str = ""
    stdin: bool = False
    stdout: bool = False
    stderr: bool = False
    tty: bool = False


def options(query: Any) -> ExecOptions:
    """Return the options of a query, a multi-dict. Raise ApiError 400 with the API server's message if it is wrong."""
    streams = {name: flag(query, name) for name in ("stdin", "stdout", "stderr", "tty")}
    command = query.getall("command", [])
    if not any(streams[name] for name in ("stdin", "stdout", "stderr")):
        raise ApiError(400, "you must specify at least 1 of stdin, stdout, stderr")
    if not command:
        raise ApiError(400, "you must specify at least 1 command for the container")
    return ExecOptions(command, query.get("container", ""), **streams)


def place(root: Path, pod: Obj, wanted: ExecOptions) -> tuple[Path, Paths]:
    """Return the directory of the container's socket, and the container's paths.

    :raises ApiError: 400 if the container's name is wrong, 500 if it doesn't run.
    """
    container = container_of(pod, wanted.container)
    directory = root / "pods" / pod["metadata"]["uid"] / container
    runs = "running" in (container_status(pod, container).get("state") or {})
    if not runs or not (directory / EXEC_SOCKET).exists():
        raise ApiError(500, f'container not found ("{container}")')
    paths = Paths.read(directory)
    if wanted.command[:2] in (["tar", "cf"], ["tar", "-xmf"], ["tar", "xf"]) and "-" in wanted.command:
        raise ApiError(400, COPY.format(paths.image))
    return directory, paths


class Streams:
    """The standard streams of a command: pipes, or a terminal.

    `theirs` are the descriptors 0, 1 and 2 of the command. Ours are `stdin` (None: there is none) and `outputs`, by
    channel.
    """

    def __init__(self, wanted: ExecOptions) -> None:
        self.terminal: int | None = None
        self.stdin: int | None = None
        self.outputs: dict[int, int] = {}
        if wanted.tty:
            self.terminal, theirs = pty.openpty()
            self.theirs = [theirs]
            self.outputs[STDOUT] = self.terminal
            if wanted.stdin:
                self.stdin = os.dup(self.terminal)
        else:
            self.theirs = [self._input(wanted.stdin)]
            for channel, asked in ((STDOUT, wanted.stdout), (STDERR, wanted.stderr)):
                self.theirs.append(self._output(channel, asked))
        for ours in filter(None, (self.stdin, *self.outputs.values())):
            os.set_blocking(ours, False)

    def _input(self, asked: bool) -> int:
        if not asked:
            return os.open(os.devnull, os.O_RDONLY)
        theirs, self.stdin = os.pipe()
        return theirs

    def _output(self, channel: int, asked: bool) -> int:
        if not asked:
            return os.open(os.devnull, os.O_WRONLY)
        self.outputs[channel], theirs = os.pipe()
        return theirs

    def start(self, directory: Path, argv: Sequence[str]) -> socket.socket:
        """Start the command. Returns the connection to the shim: closing it kills the command."""
        shim = socket.socket(socket.AF_UNIX)
        with contextlib.chdir(directory):  # a socket address is limited to about 100 bytes; the path can be longer
            shim.connect(EXEC_SOCKET)
        request = json.dumps({"argv": list(argv), "tty": self.terminal is not None}).encode() + b"\n"
        fds = self.theirs if len(self.theirs) == 3 else self.theirs * 3
        sent = socket.send_fds(shim, [request], fds)
        shim.sendall(request[sent:])
        shim.setblocking(False)
        for fd in self.theirs:
            os.close(fd)
        self.theirs = []
        return shim

    def resize(self, width: int, height: int) -> None:
        """Set the size of the terminal, if there is one."""
        if self.terminal is not None:
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    async def write(self, data: bytes) -> None:
        """Write to the command's standard input. Data for a command that has closed it is dropped."""
        while data and self.stdin is not None:
            try:
                data = data[os.write(self.stdin, data) :]
            except BlockingIOError:
                await _ready(self.stdin, write=True)
            except OSError:
                self.close_stdin()

    def close_stdin(self) -> None:
        """End the command's standard input."""
        if self.stdin is not None and self.terminal is None:
            os.close(self.stdin)
            self.stdin = None

    def close(self) -> None:
        """Close all descriptors."""
        for fd in {*self.theirs, *self.outputs.values(), *filter(None, (self.stdin,))}:
            os.close(fd)


async def run(request: web.Request, root: Path, pod: Obj) -> web.WebSocketResponse:
    """Run a command in a container and connect its streams with the client.

    :param root: directory whose subdirectory `pods/` contains the directories of containers.
    :raises ApiError: 400 if the request is wrong or no WebSocket, 500 if the container doesn't run.
    """
    wanted = options(request.query)
    directory, paths = place(root, pod, wanted)
    client = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=0)
    if not client.can_prepare(request).ok:
        raise ApiError(400, UPGRADE)
    await client.prepare(request)
    streams = Streams(wanted)
    tasks: list[asyncio.Task[Any]] = []
    try:
        argv = [paths.rewrite(word) for word in wanted.command]
        answer = asyncio.create_task(_run(streams, directory, argv))
        receiving = asyncio.create_task(_receive(client, streams))
        sending = [asyncio.create_task(_send(client, *output)) for output in streams.outputs.items()]
        tasks += [answer, receiving, *sending]
        await asyncio.wait([answer, receiving], return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            if sending:
                await asyncio.wait(sending, timeout=DRAIN_SECONDS)
            await _message(client, ERROR, json.dumps(status(answer.result(), wanted.command[0])).encode())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        streams.close()
        with contextlib.suppress(ConnectionError):
            await client.close()
    return client


def status(answer: Mapping[str, Any], program: str) -> Obj:
    """Return the Status of a command that has ended.

    :param answer: of the shim: `exit`, and `error` if the program could not be executed.
    :param program: the first word of the command.
    """
    if error := answer.get("error"):
        return ApiError(500, f"the command {program!r} can't be executed: {error}").status()
    code = answer["exit"]
    if not code:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {}, "status": "Failure", "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }  # fmt: skip


async def _run(streams: Streams, directory: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Run the command. Returns the shim's answer at its end. If the shim was killed, so was the command.

    Cancelling this kills the command.
    """
    try:
        shim = streams.start(directory, argv)
    except OSError as e:  # the container has ended meanwhile
        return {"exit": 126, "error": str(e)}
    with shim:
        data = b""
        while not data.endswith(b"\n"):
            more = await asyncio.get_running_loop().sock_recv(shim, READ)
            if not more:
                return {"exit": 137}
            data += more
    answer: dict[str, Any] = json.loads(data)
    return answer


async def _receive(client: web.WebSocketResponse, streams: Streams) -> None:
    """Pass the client's messages to the command, until the client disconnects."""
    async for message in client:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STDIN:
            await streams.write(data)
        elif channel == CLOSE and data[:1] == bytes([STDIN]):
            if streams.terminal is not None:
                await streams.write(END_OF_FILE)
            streams.close_stdin()
        elif channel == RESIZE:
            with contextlib.suppress(ValueError, KeyError, struct.error):
                size = json.loads(data)
                streams.resize(int(size["Width"]), int(size["Height"]))


async def _send(client: web.WebSocketResponse, channel: int, fd: int) -> None:
    """Pass the output of the command to the client."""
    await _message(client, channel, b"")  # tells the client that the command was started
    async for data in _chunks(fd):
        await _message(client, channel, data)


async def _message(client: web.WebSocketResponse, channel: int, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        await client.send_bytes(bytes([channel]) + data)


async def _chunks(fd: int) -> AsyncIterator[bytes]:
    """What arrives at a descriptor, until its end."""
    while True:
        try:
            data = os.read(fd, READ)
        except BlockingIOError:
            await _ready(fd)
            continue
        except OSError:  # a terminal that nobody has open any more
            return
        if not data:
            return
        yield data


async def _ready(fd: int, *, write: bool = False) -> None:
    """Wait until a descriptor can be read or written."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)
    add(fd, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(fd)
