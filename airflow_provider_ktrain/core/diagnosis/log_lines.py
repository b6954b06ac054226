"""The lines of a container's log as they are parsed: in order, without prefixes, and with what is progress."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

TRACEBACK = "Traceback (most recent call last):"
MAX_PREFIXES = 16  #: How many processes are recognized by the first lines of their tracebacks.
MAX_PREFIX_CHARS = 100
STREAMS_SECONDS = 1.0  #: How much later a line of stdout may be read than a later one of stderr.


class TimedText(str):
    """A line of a log that has the time (RFC 3339, or empty) at which the node has read it."""

    __slots__ = ("time",)
    time: str

    def __new__(cls, text: str, time: str) -> TimedText:
        """Make one."""
        made = super().__new__(cls, text)
        made.time = time
        return made

    def __reduce__(self) -> tuple[type[TimedText], tuple[str, str]]:
        """How it is copied, as where a cause becomes a dict."""
        return TimedText, (str(self), self.time)


@dataclass(frozen=True)
class Line:
    """A line.

    :param text: without prefixes and escape sequences.
    :param process: the prefix that names the process; empty if there is none.
    :param at: when the node has read it, in epoch seconds. Default: None, not known.
    """

    text: str
    process: str = ""
    at: float | None = None


_BOX = ("╭", "│", "╰")  #: Rich prints tracebacks in boxes.
#: Prefixes of torchrun, PyTorch, Horovod, mpirun, Ray, DeepSpeed's pdsh and srun.
_PREFIX = re.compile(
    r"(\[(default)?\d{0,9}\]:|\[(rank|Rank)\d{1,9}\]:?|\[\d{1,9}(,\d{1,9})?\]<std(out|err)>:|"
    r"\([\w.-]{1,64}( pid=| rank=)?\d{1,9}(, ip=[\w.:]{1,64})?\)|"
    r"(?=[\w.-]{0,63}\d:\s)[\w.-]{1,64}:(?=\s(Traceback \(most|  File \")))\s?"
)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_PROGRESS = re.compile(
    r"KTRAIN_(METRIC|RESULT)|\d%\||"
    r"\b(step|epoch|iter(ation)?|batch|(train_|val_)?loss|acc(uracy)?|lr)\b\W{0,3}\d",
    re.IGNORECASE,
)
#: What precedes a step or a metric in a line of progress, besides the name of a logger: no sentence.
_HEAD_WORDS = {
    "train", "training", "trained", "eval", "evaluation", "val", "valid", "validation", "test", "global", "total",
    "local", "current", "rank", "gpu", "worker", "node", "device", "finished", "completed", "done", "end", "of",
    "start", "starting", "begin", "running", "average", "avg", "mean", "best", "num", "time", "elapsed", "step",
    "steps", "epoch", "epochs", "iter", "iteration", "batch", "loss", "lr", "acc", "accuracy", "after",
}  # fmt: skip
_LEVEL = re.compile(r"\b(?:INFO|DEBUG|NOTICE)\b")
_BAD_LEVEL = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b", re.IGNORECASE)
_NAMED = re.compile(r"\[[^\]]{0,100}\]|\([^)]{0,100}\)|\b[a-z][\w.]{0,63}:")
_WORD = re.compile(r"[A-Za-z]{2,}")


def time_of(line: str) -> float | None:
    """When a line of a log was read, in epoch seconds; None if it isn't known."""
    return epoch_seconds(line.time) if isinstance(line, TimedText) else None


def may_be_progress(text: str) -> bool:
    """Whether a line has a word of progress. It may be that of a sentence."""
    return _PROGRESS.search(text) is not None


def is_progress(text: str) -> bool:
    """Whether a line reports progress: a metric, a step or a bar, and not a sentence about one."""
    match = _PROGRESS.search(text)
    if match is None:
        return False
    if not match[0][0].isalpha() or match[0].startswith("KTRAIN"):
        return True
    head = text[: match.start()]
    if _BAD_LEVEL.search(head):
        return False
    parts = _LEVEL.split(head)
    words = [word for word in _WORD.findall(_NAMED.sub(" ", parts[-1])) if word.lower() not in _HEAD_WORDS]
    return len(words) <= (2 if len(parts) > 1 else 0)


def parsed_lines(texts: Sequence[str]) -> list[Line]:
    """The lines with their processes. Other prefixes are known by the tracebacks that begin behind them."""
    plain = [_ESCAPE.sub("", text.rstrip()) if "\x1b" in text else text.rstrip() for text in texts]
    prefixes = tuple(_prefixes(plain))
    return [_parsed(text, prefixes, time_of(of)) for text, of in zip(plain, texts, strict=True)]


def process_of(text: str, prefixes: tuple[str, ...] = ()) -> tuple[str, str]:
    """The process that the prefix of a line names, and the rest of the line.

    :param prefixes: others that are known. Default: none.
    """
    line = _parsed(_ESCAPE.sub("", text) if "\x1b" in text else text, prefixes, None)
    return line.process, line.text


def _parsed(text: str, prefixes: tuple[str, ...], at: float | None) -> Line:
    process, rest = "", text
    for _ in range(3):  # such as that of torchrun, and PyTorch's own behind it
        match = _PREFIX.match(rest)
        if match is None:
            break
        process, rest = process or match[0].strip(), rest[match.end() :]
    known = next((prefix for prefix in prefixes if rest.startswith(prefix)), "")
    if known:
        process, rest = process or known.strip(), rest[len(known) :]
    elif (begin := rest.rfind(TRACEBACK)) > 0 and not rest[:begin].endswith(("Original ", "traceback : ")):
        rest = rest[begin:]  # it follows a bar of progress, or what a program has not ended with a line break
    if rest.startswith(_BOX):
        rest = TRACEBACK if TRACEBACK[:-1] in rest else f"  {rest}"
    return Line(rest, process, at)


def _prefixes(texts: Sequence[str]) -> list[str]:
    """What precedes each of the first two lines of a traceback: longer ones first."""
    found: dict[str, None] = {}
    for text, after in itertools.pairwise(texts):
        begin = text.find(TRACEBACK)
        if 0 < begin <= MAX_PREFIX_CHARS and len(found) < MAX_PREFIXES and after.startswith(f"{text[:begin]}  File "):
            found[_PREFIX.sub("", text[:begin], count=1) or text[:begin]] = None
    return sorted((prefix for prefix in found if prefix.strip()), key=len, reverse=True)


def in_order(lines: Sequence[Line], protected: frozenset[int]) -> list[Line]:
    """The lines with the program's message at the end.

    stdout and stderr are two pipes, and the node reads them in any order: the message of `sys.exit("text")` may come
    before an older line of stdout. So if the log ends with progress, that of the last second comes first.

    :param lines: oldest first.
    :param protected: numbers of lines that are no progress whatever they contain: those of tracebacks.
    """
    routine = [n not in protected and (not one.text.strip() or is_progress(one.text)) for n, one in enumerate(lines)]
    written = [line.at for line in lines if re.search(r"\w", line.text)]
    if not routine or not written or not routine[-1] or (end := written[-1]) is None:
        return list(lines)
    start = len(lines)
    while start and (at := lines[start - 1].at) is not None and at >= end - STREAMS_SECONDS:
        start -= 1
    last = sorted(range(start, len(lines)), key=lambda n: not routine[n])
    return [*lines[:start], *(lines[n] for n in last)]
