"""A wait for a condition, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.virtual import VirtualLoop

TICK_SECONDS = 0.005  #: Pause between two looks, in real time.


async def until(condition: Callable[..., Any], seconds: float = 240) -> None:
    """Wait until the condition is true. In virtual time, this takes no time and no polls."""
    async with asyncio.timeout(seconds):
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualLoop):
            if not condition():
                await loop.when(condition)
            return
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(TICK_SECONDS)
