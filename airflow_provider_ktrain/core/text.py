"""Text of others, made fit to be kept: of a bounded length, and without what databases and encoders refuse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
LINE = 2048  #: characters of a line of a log, or of a summary, that are kept

#: NUL, which PostgreSQL refuses in JSON, and halves of surrogate pairs, which UTF-8 does
UNFIT = re.compile("[\0\ud800-\udfff]")


def clean(value: T) -> T:
    """The same nested value with U+FFFD for each character of a string, or of a key, that is `UNFIT`."""
    cleaned: Any = value
    if isinstance(value, str):
        cleaned = UNFIT.sub("\ufffd", value) if UNFIT.search(value) else value
    elif isinstance(value, Mapping):
        cleaned = {clean(key): clean(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        cleaned = type(value)(map(clean, value))
    return cast("T", cleaned)


def counted(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def clipped(text: str, size: int = LINE) -> str:
    """The text, or head and tail of it with a word on what is missing, in `size` characters together."""
    if len(text) <= size:
        return text
    half = (size - 40) // 2  # what is said between them has fewer
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else line[:297] + "..."
