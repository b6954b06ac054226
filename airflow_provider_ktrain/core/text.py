"""Makes text from logs and API responses storable: limits its length and replaces characters that databases reject."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
MAX_LINE_CHARS = 2048  #: of a log line or a summary
MAX_FIRST_LINE_CHARS = 200  #: of a message to the user
SIZE_UNITS = ("bytes", "KiB", "MiB", "GiB")
SUGGESTION = "did you mean "  #: a remedy that begins so comes first in a message

#: NUL, which PostgreSQL rejects in JSON, and lone surrogates, which UTF-8 can't encode
UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def clean(value: T) -> T:
    """The same nested value, with U+FFFD for each UNSTORABLE character in its strings and keys."""
    cleaned: Any = value
    if isinstance(value, str):
        cleaned = UNSTORABLE.sub("\ufffd", value) if UNSTORABLE.search(value) else value
    elif isinstance(value, Mapping):
        cleaned = {clean(key): clean(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        cleaned = type(value)(map(clean, value))
    return cast("T", cleaned)


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def readable_size(size: int) -> str:
    """A number of bytes: `34.1 KiB`."""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.1f} {SIZE_UNITS[power]}" if power else counted(size, "byte")


def clipped(text: str, size: int = MAX_LINE_CHARS) -> str:
    """The text if it fits, else its head and tail with the number of characters left out between them.

    :param text: the text.
    :param size: maximum length of the result in characters. Default: MAX_LINE_CHARS.
    """
    if len(text) <= size:
        return text
    half = (size - 40) // 2  # the note between them is shorter than 40 characters
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def with_short_first_line(text: str) -> str:
    """The message, if its first line has at most MAX_FIRST_LINE_CHARS characters, else with a short copy of that line.

    Messages quote programs and the API server, whose texts have any length.
    """
    line = text.partition("\n")[0]
    return text if len(line) <= MAX_FIRST_LINE_CHARS else f"{line[: MAX_FIRST_LINE_CHARS - 3]}...\n{text}"


def first_line(text: str) -> str:
    """The first line of a message, at most 300 characters."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else line[:297] + "..."
