"""Time, read in one place, so that the event loop of a test can own it.

Durations come from the running event loop, whose time in production is that of `time.monotonic`. Epoch time is
`time.time()` at each call, so that it follows NTP and a suspended machine, unless the loop has a method `epoch`: only a
test's loop has one. Code that runs without a loop gets a `Clock`.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Time for code that runs without an event loop, such as the main thread of a worker."""

    def now(self) -> float:
        """Seconds since an unspecified start, for durations."""
        ...

    def epoch(self) -> float:
        """Seconds since the epoch."""
        ...


def now() -> float:
    """Seconds of the running event loop, for durations.

    :raises RuntimeError: no event loop runs in this thread.
    """
    return asyncio.get_running_loop().time()


def epoch() -> float:
    """Seconds since the epoch; in a thread without an event loop, those of the machine."""
    try:
        return epoch_of(asyncio.get_running_loop())
    except RuntimeError:
        return time.time()  # noqa: TID251  # the one place


def epoch_of(loop: asyncio.AbstractEventLoop) -> float:
    """Seconds since the epoch, by an event loop that need not run."""
    own: Callable[[], float] | None = getattr(loop, "epoch", None)
    return time.time() if own is None else own()  # noqa: TID251  # the one place


def utc_now() -> datetime.datetime:
    """`epoch` as a datetime with the time zone UTC."""
    return datetime.datetime.fromtimestamp(epoch(), datetime.UTC)


def thread_works() -> Callable[[], object]:
    """Announce to the running loop that a thread begins to work for it: a test's loop doesn't advance time meanwhile.

    :returns: what the thread calls when it has ended its work.
    """
    begin: Callable[[], Callable[[], object]] | None = getattr(asyncio.get_running_loop(), "thread_works", None)
    return (lambda: None) if begin is None else begin()
