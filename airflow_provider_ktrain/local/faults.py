"""Fault switches for tests: what goes wrong, where and for how long. Set by an authenticated request or by the CLI."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_ktrain.local.errors import REASONS, ApiError

STATUSES = (401, 403, 404, 409, 410, 429, 500, 502, 503, 504)
MESSAGES = {401: "Unauthorized", 429: "the server has received too many requests and has asked us to try again later"}
FOREVER = float("inf")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong until `until` (loop time), for requests that match `verb` and the pattern `path`.

    `kind` is one of KINDS; `status` is the code of an error answer, `amount` the bytes after which a log stream is cut
    or the seconds that watch events are held back, `count` how many requests it still meets.
    """

    kind: str
    until: float
    verb: str = ""
    path: str = ""
    status: int = 0
    amount: float = 0.0
    count: list[int] = field(default_factory=list, compare=False)

    def meets(self, verb: str, path: str) -> bool:
        return (not self.verb or verb in self.verb.split(",")) and bool(re.search(self.path, path))


KINDS = ("refuse", "drop", "status", "cut_logs", "delay_watch")


class Faults:
    """The faults in force. `clock` gives the time in seconds that `until` is measured in."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._faults: list[Fault] = []

    def set(self, wanted: dict[str, Any]) -> Fault:
        """Add a fault; ApiError 400 says what is wrong with the wish."""
        kind = wanted.get("fault")
        if kind not in KINDS:
            raise ApiError(400, f"fault: found {kind!r}, expected one of {', '.join(KINDS)}")
        seconds, path, status = wanted.get("seconds", FOREVER), wanted.get("path", ""), wanted.get("status", 0)
        amount, count = wanted.get("bytes", wanted.get("delay", 0)), wanted.get("count")
        if not isinstance(seconds, (int, float)) or seconds <= 0:
            raise ApiError(400, f"seconds: found {seconds!r}, expected a number over 0")
        if kind in ("refuse", "drop") and seconds == FOREVER:
            raise ApiError(400, f"seconds: {kind} needs them: nothing could take it back")
        if kind == "status" and status not in STATUSES:
            raise ApiError(400, f"status: found {status!r}, expected one of {', '.join(map(str, STATUSES))}")
        if not isinstance(amount, (int, float)) or amount < 0:
            raise ApiError(400, f"bytes or delay: found {amount!r}, expected a number of 0 or more")
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ApiError(400, f"count: found {count!r}, expected a whole number over 0")
        try:
            re.compile(path)
        except (re.error, TypeError) as e:
            raise ApiError(400, f"path: found {path!r}, expected a regular expression: {e}") from None
        fault = Fault(
            kind, self._clock() + seconds, str(wanted.get("verb", "")), path, status, float(amount),
            [] if count is None else [count],
        )  # fmt: skip
        self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Everything works again (a refused port opens when its time is over)."""
        self._faults.clear()

    def found(self, kind: str, verb: str, path: str) -> Fault | None:
        """The fault of this kind in force for a request; counted faults are used up by it."""
        now = self._clock()
        self._faults = [f for f in self._faults if f.until > now and f.count != [0]]
        for fault in self._faults:
            if fault.kind == kind and fault.meets(verb, path):
                if fault.count:
                    fault.count[0] -= 1
                return fault
        return None

    def check(self, verb: str, path: str) -> None:
        """ApiError where requests like this one are to be answered with an error."""
        fault = self.found("status", verb, path)
        if fault:
            code = fault.status
            details = {"retryAfterSeconds": 1} if code in (429, 503) else None
            raise ApiError(code, MESSAGES.get(code, f"a fault switch answers {code}"), REASONS.get(code, ""), details)
