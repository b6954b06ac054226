"""Lines of a triggerer wait while its supervisor hasn't read earlier ones, in order and with their context."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

from airflow_provider_ktrain.engine.logs.log_gate import MAX_UNREAD_BYTES
from airflow_provider_ktrain.engine.logs.log_queue import LINE_BYTES, LogQueue, QueuedLogger, log_queue
from tests.engine.fakekube import until

TASK: ContextVar[str] = ContextVar("TASK", default="")


class Socket:
    """A supervisor that reads nothing, and the logger that writes to it."""

    def __init__(self, unread: int = 0) -> None:
        self.bytes = unread
        self.lines: list[str] = []
        self.times: list[str] = []
        self.tasks: list[str] = []

    def unread(self) -> int:
        return self.bytes

    def info(self, text: str, **kw: Any) -> None:
        self.lines.append(text)
        self.times.append(kw.get("timestamp", ""))
        self.tasks.append(TASK.get())
        self.bytes += LINE_BYTES


async def test_lines_are_held_until_there_is_room() -> None:
    socket = Socket(unread=MAX_UNREAD_BYTES + 1)
    queue = LogQueue(socket.unread)
    logger = QueuedLogger(socket, queue)
    for number in range(200):
        logger.info(f"line {number}")
    assert socket.lines == []
    assert queue.unread() == socket.bytes + 200 * LINE_BYTES
    socket.bytes = 0
    await until(lambda: bool(socket.lines))
    assert len(socket.lines) <= MAX_UNREAD_BYTES // LINE_BYTES + 1

    while len(socket.lines) < 200:
        socket.bytes = 0
        await asyncio.sleep(0)
    assert socket.lines == [f"line {number}" for number in range(200)]
    assert queue.unread() == socket.bytes


async def test_line_does_not_overtake_a_held_one() -> None:
    socket = Socket(unread=MAX_UNREAD_BYTES + 1)
    logger = QueuedLogger(socket, LogQueue(socket.unread))
    logger.info("first")
    socket.bytes = 0
    logger.info("second")
    assert socket.lines == []
    await until(lambda: socket.lines == ["first", "second"])


async def test_held_line_keeps_its_context_and_its_time() -> None:
    socket = Socket(unread=MAX_UNREAD_BYTES + 1)
    logger = QueuedLogger(socket, LogQueue(socket.unread))
    TASK.set("first")
    logger.info("without a time")
    TASK.set("second")
    logger.info("with a time", timestamp="2026-11-23T01:00:00.000000Z")
    TASK.set("third")
    socket.bytes = 0
    await until(lambda: len(socket.lines) == 2)
    assert socket.tasks == ["first", "second"]
    assert socket.times[0].endswith("Z")
    assert socket.times[1] == "2026-11-23T01:00:00.000000Z"


async def test_line_is_written_at_once_while_there_is_room() -> None:
    socket = Socket(unread=MAX_UNREAD_BYTES)
    QueuedLogger(socket, LogQueue(socket.unread)).info("line")
    assert (socket.lines, socket.times) == (["line"], [""])


async def test_thread_without_a_loop_may_block() -> None:
    socket = Socket(unread=MAX_UNREAD_BYTES + 1)
    logger = QueuedLogger(socket, LogQueue(socket.unread))
    thread = threading.Thread(target=lambda: logger.info("line"))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert socket.lines == ["line"]


async def test_all_triggers_of_a_process_share_a_queue() -> None:
    assert log_queue(lambda: 0) is log_queue(lambda: 0)
