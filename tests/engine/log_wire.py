"""A real socket between a log and a reader that stands for the supervisor of a triggerer."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import sys
import termios
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from airflow_provider_ktrain.core.text.output import clean
from airflow_provider_ktrain.engine.logs.log_socket import LogSocket, log_socket

READ_BYTES = 4096  # as a supervisor does
BUFFER_BYTES = 106_496  # of which Linux makes 212,992, its own default, whatever the machine's default is


class Wire:
    """The socket, the logger that writes to it and may block, and what was read."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.size = self._writer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.data = bytearray()

    def connect(self) -> LogSocket:
        """Let the running loop log through it."""
        log_socket().connect(self.unread, self.size)
        return log_socket()

    def unread(self) -> int:
        """Bytes that nobody has read, as Linux counts them."""
        return int.from_bytes(fcntl.ioctl(self._writer.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)

    def info(self, event: Any, *args: Any, **kw: Any) -> None:
        record = json.dumps(clean({"event": event, **kw, "level": "info"}), ensure_ascii=False)
        os.write(self._writer.fileno(), record.encode() + b"\n")

    warning = error = info

    def fill(self) -> None:
        """Write until nothing more fits."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._writer.send(b"{}\n", socket.MSG_DONTWAIT)

    def go_away(self) -> None:
        """Read nothing any more: writes raise an error."""
        self.reader.close()

    def read_some(self) -> bool:
        """Read once; returns whether there was anything."""
        with contextlib.suppress(BlockingIOError):
            self.data += self.reader.recv(READ_BYTES)
            return True
        return False

    async def read_until(self, condition: Callable[[], bool], pause: float = 0.001) -> None:
        """Read as a slow supervisor does, until a condition is true."""
        async with asyncio.timeout(240):
            while not condition():
                self.read_some()
                await asyncio.sleep(pause)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All whole records that were read."""
        whole = bytes(self.data[: self.data.rfind(b"\n") + 1])
        return [record for line in whole.splitlines() if (record := json.loads(line))]

    @property
    def lines(self) -> list[str]:
        """The lines of all records."""
        return [line for record in self.records for line in record["event"].split("\n")]


class Loop:
    """How long the running loop is busy between two of its turns."""

    def __init__(self) -> None:
        self.turns = 0
        self.busy: list[float] = []  # CPU seconds: others may use the machine, too

    async def watch(self) -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            self.busy.append(time.thread_time() - began)
            self.turns += 1
            await asyncio.sleep(0.001)

    @property
    def p99(self) -> float:
        return sorted(self.busy)[int(len(self.busy) * 0.99)]


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    made = Wire()
    with made.reader, made._writer:
        yield made


async def turns(loop: Loop, count: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
    """Wait until the loop has had that many turns: in a loop that is blocked, this never returns."""
    end = loop.turns + count
    async with asyncio.timeout(240):
        while loop.turns < end:
            await asyncio.sleep(0.001)
            if meanwhile is not None:
                await meanwhile()
