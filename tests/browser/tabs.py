"""Conditions in a page. Playwright's `wait_for_function` needs `eval`, which our Content-Security-Policy forbids."""

from __future__ import annotations

import time
from typing import Any

SLOW = 60_000  # milliseconds that a request or a condition may take on a loaded machine
TICK = 200  # milliseconds between two looks
GROWS = 5 * SLOW  # a status is written once a minute at least, and the page asks for it up to 30 s later


def until(tab: Any, expression: str, arg: Any = None, timeout: int = SLOW) -> Any:
    """Wait until a JavaScript expression is true in a tab or frame; returns its value.

    :param arg: the argument of the expression, if it is a function.
    :param timeout: in milliseconds.
    """
    end = time.monotonic() + timeout / 1000
    while not (value := tab.evaluate(expression, arg)):
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout / 1000:.0f} s: {expression}")
        tab.wait_for_timeout(TICK)
    return value
