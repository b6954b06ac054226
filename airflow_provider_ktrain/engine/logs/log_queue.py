"""Lines that a triggerer's process logs while its supervisor hasn't read enough of the earlier ones.

The supervisor reads the lines of all triggers from a socket, and a write to a full socket blocks the event loop. If the
supervisor sends a long message at that moment, such as the arguments of some hundred triggers, it waits until the loop
reads it: then both processes wait for each other for ever (seen with Airflow 3.3.2). On Linux, about 160 lines fill the
socket, whatever their length.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from airflow_provider_ktrain.engine.logs.log_gate import MAX_UNREAD_BYTES, UNREAD_INTERVAL

LINE_BYTES = 1280  #: that a line takes in the socket, as Linux counts them


class LogQueue:
    """Writes lines at once, or in their order as soon as the socket has room.

    :param unread: number of bytes in the socket that the supervisor hasn't read yet.
    """

    def __init__(self, unread: Callable[[], int]) -> None:
        self._unread = unread
        self._held: deque[Callable[[], object]] = deque()

    def unread(self) -> int:
        """Bytes that the supervisor hasn't read yet, including those of held lines."""
        return self._unread() + LINE_BYTES * len(self._held)

    @property
    def has_room(self) -> bool:
        """Whether a line can be written at once: it must not overtake a held one."""
        return not self._held and self._unread() <= MAX_UNREAD_BYTES

    def hold(self, write: Callable[..., object], *args: Any, **kw: Any) -> None:
        """Call a logger's method in the present context, with the present time, when there is room.

        :param write: the method.
        :param args: its arguments.
        :param kw: its keyword arguments.
        """
        kw.setdefault("timestamp", f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z")
        if not self._held:
            asyncio.get_running_loop().call_later(UNREAD_INTERVAL, self._write_held)
        self._held.append(partial(copy_context().run, write, *args, **kw))

    def _write_held(self) -> None:
        while self._held and self._unread() <= MAX_UNREAD_BYTES:
            self._held.popleft()()
        if self._held:
            asyncio.get_running_loop().call_later(UNREAD_INTERVAL, self._write_held)


class QueuedLogger:
    """A logger that never blocks the event loop: its lines go through the queue.

    :param logger: that writes the lines.
    :param queue: of the process.
    """

    def __init__(self, logger: Any, queue: LogQueue) -> None:
        self._logger, self._queue = logger, queue

    def __getattr__(self, name: str) -> Any:
        """The logger's method if it can write now: called directly, it finds out where the line comes from."""
        method = getattr(self._logger, name)
        return method if self._queue.has_room or not _has_loop() else partial(self._queue.hold, method)


def _has_loop() -> bool:
    """Whether this is the thread of an event loop, which must not block."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, LogQueue] = WeakKeyDictionary()


def log_queue(unread: Callable[[], int]) -> LogQueue:
    """The queue of the running event loop; outside of one, a new queue.

    :param unread: see `LogQueue`.
    """
    if not _has_loop():
        return LogQueue(unread)
    return _queues.setdefault(asyncio.get_running_loop(), LogQueue(unread))
