"""Runs blocking calls beside the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(ask: Callable[[], T]) -> asyncio.Future[T]:
    """Run `ask` in a daemon thread of its own. The loop waits for threads of its own executor when it closes, and
    another call that blocks can occupy them.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()

    def answered() -> None:
        try:
            answer.set_result(ask())
        except BaseException as e:
            answer.set_exception(e)

    threading.Thread(target=answered, name="ktrain-call", daemon=True).start()
    return asyncio.wrap_future(answer)
