"""Fault switches for tests: which requests fail, how and for how long. The CLI or authenticated requests set them."""

from __future__ import annotations

import asyncio
import math
import re
from dataclasses import dataclass
from typing import Any

from ktrain_embedded.objects.errors import REASONS, ApiError

KINDS = ("refuse", "drop", "status", "cut_logs", "delay_watch")
MESSAGES = {401: "Unauthorized", 429: "the server has received too many requests and has asked us to try again later"}


@dataclass
class Fault:
    """A fault that applies until `until` (loop time) to requests that match `verb` and the pattern `path`.

    `kind` is one of KINDS. `status` is the HTTP code of the error response. `amount` is the number of bytes after which
    a log stream is cut, or the seconds by which watch events are delayed. `count` is the number of requests to which
    the fault still applies.
    """

    kind: Any
    until: float
    verb: str
    path: str
    status: int
    amount: float
    count: float

    def meets(self, kind: str, verb: str, path: str) -> bool:
        """Whether the fault applies to a request."""
        among = not self.verb or verb in self.verb.split(",")
        return self.kind == kind and among and bool(re.search(self.path, path))


class Faults:
    """The active faults."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def set(self, options: dict[str, Any]) -> Fault:
        """Add a fault. Raise ApiError 400 if a parameter is invalid."""
        kind, path, verb = options.get("fault"), options.get("path", ""), str(options.get("verb", ""))
        seconds, count = options.get("seconds", math.inf), options.get("count", math.inf)
        status, amount = options.get("status", 0), options.get("bytes", options.get("delay", 0))
        endless = kind in ("refuse", "drop") and "seconds" not in options
        expected = (
            ("fault", kind, kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("seconds", seconds, _number(seconds, over=0) and not endless, "a number over 0"),
            ("status", status, kind != "status" or status in range(400, 600), "a code from 400 to 599"),
            ("bytes or delay", amount, _number(amount, over=-1), "a number of 0 or more"),
            ("count", count, _number(count, over=0), "a number over 0"),
            ("path", path, _pattern(path), "a regular expression"),
        )
        for name, found, right, what in expected:
            if not right:
                raise ApiError(400, f"{name}: found {found!r}, expected {what}")
        self._faults.append(Fault(kind, _now() + seconds, verb, path, status, amount, count))
        return self._faults[-1]

    def clear(self) -> None:
        """Remove all faults. A port that refuses connections opens when the fault's time is over."""
        self._faults.clear()

    def found(self, kind: str, verb: str, path: str) -> Fault | None:
        """Return the active fault of this kind for a request, and decrement the fault's count."""
        self._faults = [f for f in self._faults if f.until > _now() and f.count > 0]
        fault = next((f for f in self._faults if f.meets(kind, verb, path)), None)
        if fault:
            fault.count -= 1
        return fault

    def check(self, verb: str, path: str) -> None:
        """Raise ApiError if a `status` fault applies to the request."""
        fault = self.found("status", verb, path)
        if fault:
            code = fault.status
            details = {"retryAfterSeconds": 1} if code in (429, 503) else None
            raise ApiError(code, MESSAGES.get(code, f"a fault switch answers {code}"), REASONS.get(code, ""), details)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _number(value: Any, over: int) -> bool:
    return isinstance(value, (int, float)) and value > over


def _pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError):
        return False
    return True
