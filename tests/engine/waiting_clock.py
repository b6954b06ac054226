"""A clock that stands still while the event loop is busy, for tests in which limits of seconds pass.

A slow or loaded machine then makes such a test longer, but doesn't let a limit pass between two of its steps. What a
test follows has to run in the same event loop, as a `SmallApi` does: other processes have the real clock.
"""

from __future__ import annotations

import time
from typing import Any


class WaitingClock:
    """Counts the seconds for which a selector waits.

    :param selector: of the event loop.
    """

    def __init__(self, selector: Any) -> None:
        self._select, self._real = selector.select, time.monotonic
        self._epoch = time.time() - time.monotonic()
        self._now = time.monotonic()

    def select(self, timeout: float | None = None) -> Any:
        began = self._real()
        found = self._select(timeout)
        waited = self._real() - began  # longer than the timeout if another process had the CPU
        self._now += waited if timeout is None else min(waited, max(timeout, 0.0))
        return found

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._epoch + self._now
