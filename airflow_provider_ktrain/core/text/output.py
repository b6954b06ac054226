"""The doors of all text that leaves this package.

`clean` is for the user's own values: it replaces what databases reject. `masked` is for what we compose or quote: it
hides secrets as well. What shortens a text hides its secrets first: a part of a secret would not be recognized.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")
MAX_LINE_CHARS = 2048  #: Length of a log line or a summary.
MIN_SEARCHED_CHARS = 8192  #: How much of each end of a long text is searched for secrets: the whole would take long.
MAX_FIRST_LINE_CHARS = 200  #: Length of the first line of a message to the user.
SIZE_UNITS = ("bytes", "KiB", "MiB", "GiB")
SUGGESTION = "did you mean "  #: A remedy that begins so comes first in a message.

#: NUL, which PostgreSQL rejects in JSON, and lone surrogates, which UTF-8 can't encode.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_WORD_END = re.compile(r"[\s\"']")


_host_maskers: list[Callable[[str], str]] = []


class Verbatim(str):
    """A text that `masked` only cleans: a line of the user's program, or a manifest that `redacted` has masked."""

    __slots__ = ()


def clean(value: T) -> T:
    """The same nested value, with U+FFFD for each UNSTORABLE character in its strings and keys."""
    return cast("T", _each_text(value, _storable))


def masked(value: T) -> T:
    """The same nested value as `clean` returns, without the secrets in its strings and keys."""
    return cast("T", _each_text(value, _presentable))


def add_host_masker(masker: Callable[[str], str]) -> None:
    """Let this process hide what its host knows to be secret, such as passwords of Airflow's connections."""
    _host_maskers.append(masker)


def masked_log(name: str) -> logging.Logger:
    """A logger of this process whose records are `masked`, for what belongs to no task. Tracebacks become text."""
    log = logging.getLogger(name)
    log.addFilter(_show)
    return log


def _show(record: logging.LogRecord) -> bool:
    traceback = f"\n{logging.Formatter().formatException(record.exc_info)}" if record.exc_info else ""
    record.msg, record.args, record.exc_info = masked(f"{record.getMessage()}{traceback}"), (), None
    return True


def _storable(text: str) -> str:
    return UNSTORABLE.sub("\ufffd", text) if UNSTORABLE.search(text) else text


def _presentable(text: str) -> str:
    if isinstance(text, Verbatim):
        return _storable(str(text))
    from airflow_provider_ktrain.core.text.secret_rules import without_secrets  # not loaded when a DAG file is parsed

    for masker in _host_maskers:
        text = masker(text)
    return _storable(without_secrets(text))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_each_text(item, change) for item in value)
    return value


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 GPU`, `2 GPUs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def capitalized(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, and the number of others: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def readable_size(size: int) -> str:
    """A number of bytes: `34.1 KiB`."""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.1f} {SIZE_UNITS[power]}" if power else counted(size, "byte")


def format_duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`: the two largest units."""
    rest, parts = max(round(seconds), 0), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        parts.append((count, unit))
    first = next((n for n, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or unit == parts[first][1])


def clipped(text: str, size: int = MAX_LINE_CHARS) -> str:
    """The text if it fits, else its head and tail, `masked`, with the number of characters left out between them.

    :param size: maximum length of the result in characters. Default: MAX_LINE_CHARS.
    """
    if len(text) <= size:
        return text
    half = (size - 40) // 2  # the text between them is shorter than 40 characters
    searched = max(2 * size, MIN_SEARCHED_CHARS)
    if len(text) <= 2 * searched:
        head = tail = masked(str(text))
        if len(head) <= size:
            return head
    else:
        # a secret that is cut: an @ shows the end of one in a URL, and what is left of a word may be the end of one
        head = masked(f"{text[:searched]}@")
        tail = masked("".join(_WORD_END.split(text[-searched:], maxsplit=1)[1:]))
    head, tail = head[:half], tail[-half:]
    return f"{head} [... {len(text) - len(head) - len(tail):,} characters ...] {tail}"


def ends_of(text: str, size: int = MAX_LINE_CHARS) -> str:
    """A text that is kept for later, if it is long its first and last `size` characters, without the words at the cut.

    Nothing is masked, because that costs more than to keep the text: whoever makes a message of it does that.
    """
    if len(text) <= 2 * size:
        return text
    head, tail = text[:size], text[-size:]
    head, tail = head[: len(head) - len(_WORD_END.split(head)[-1])], tail[len(_WORD_END.split(tail, maxsplit=1)[0]) :]
    return f"{head}[... {len(text) - len(head) - len(tail):,} characters ...]{tail}"


def with_short_first_line(text: str) -> str:
    """The message as it is `masked`, with a short copy of its first line if that has over MAX_FIRST_LINE_CHARS.

    Messages quote programs and the API server, whose texts have any length.
    """
    text = masked(text)
    line = text.partition("\n")[0]
    return text if len(line) <= MAX_FIRST_LINE_CHARS else f"{shortened(line)}\n{text}"


def shortened(line: str, most: int = MAX_FIRST_LINE_CHARS) -> str:
    """The line if it fits, else its words that fit, and `...`. Where these are less than 3/4 of it, a word is cut.

    :param most: characters. Default: MAX_FIRST_LINE_CHARS.
    """
    if len(line) <= most:
        return line
    words = line[: most - 2].rpartition(" ")[0]
    return f"{words.rstrip(' ,;:') if len(words) >= most * 3 / 4 else line[: most - 3]}..."


def ends_of_chain(text: str, most: int) -> str:
    """The first line of a chain of errors, `what: why: why`; of a long one what fits of its beginning and its end.

    :param most: characters.
    """
    line = masked(text.strip().partition("\n")[0])
    if len(line) <= most:
        return line
    parts = line.split(": ")
    head = f"{parts[0].strip()}: ... " if len(parts[0]) <= most // 2 else "... "
    ends = (": ".join(parts[i:]) for i in range(1, len(parts)))
    return next((f"{head}{end}" for end in ends if len(head) + len(end) <= most), line)


def first_line(text: str) -> str:
    """The first line of a message as it is `masked`, at most 300 characters."""
    return shortened(masked(text.strip().partition("\n")[0]), 300)
