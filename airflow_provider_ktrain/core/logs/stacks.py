"""The stacks that a container prints when it is stopped. They are marked: they are not the program's own lines.

`core/manifest/in_pod/starter.py` prints them. The mark may follow a line that the program had not ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MARK = "KTRAIN_STACK "
MAX_CHARS = 4096  #: Length of a record: starter.py keeps it shorter.
MAX_NUMBER = 2**53  #: Numbers of a record are below it.
MAX_RECORDS = 400  #: How many records of one container are read: they have 64 KiB together.
FUNCTION_FILE = "ktrain_function.py"  #: File with the function of a task, which begins after line FUNCTION_OFFSET.
FUNCTION_OFFSET = 2
RANK, WORKER, LAUNCHER = "rank", "worker", "launcher"  #: Parts that a process has in a training.


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    path: str
    line: int
    function: str


@dataclass(frozen=True)
class Stack:
    """What a container printed about one thread.

    :param rank: of the process; empty if it has none.
    :param part: RANK, or WORKER of a rank (such as a data loader's), or LAUNCHER of ranks (such as torchrun).
    :param frames: innermost first.
    :param why: why there are no frames: `gone`, or `no answer, state D`. Default: empty.
    """

    pid: int
    rank: str
    part: str
    main: bool
    frames: tuple[Frame, ...]
    why: str = ""


@dataclass(frozen=True)
class End:
    """The last record of a container."""

    left_out: int = 0


def own_text(text: str) -> str | None:
    """A line without the record at its end; None if nothing of the program is left.

    A program may print the mark itself, such as in a list of processes: what follows it is then its own.
    """
    if MARK not in text or read_record(text) is None:
        return text
    return text.rpartition(MARK)[0] or None


def read_record(text: str) -> Stack | End | None:
    """The record at the end of a line; None if there is none that can be read."""
    _, found, record = text.rpartition(MARK)
    if not found or len(record) > MAX_CHARS:
        return None
    try:
        fields = json.loads(record)
        if fields.get("end"):
            return End(_integer(fields.get("left_out") or 0))
        return _stack(fields)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _integer(value: Any) -> int:
    """The number, which may be an infinity or have thousands of digits.

    :raises ValueError: it is not the number of a process, a line or records.
    """
    number = int(value)
    if not 0 <= number < MAX_NUMBER:
        raise ValueError(f"expected an integer from 0 to {MAX_NUMBER:,}")
    return number


def _stack(fields: Mapping[str, Any]) -> Stack:
    frames = tuple(Frame(str(path), _integer(line), str(name)) for path, line, name in fields.get("frames") or ())
    rank, part, why = (str(fields.get(name) or "") for name in ("rank", "part", "why"))
    return Stack(_integer(fields["pid"]), rank, part, bool(fields.get("main")), frames, why)
