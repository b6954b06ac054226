"""The records of a logger at the level of an error: what a program says before it ends with a code of its own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.diagnosis.failure_patterns import reports_peer_loss
from airflow_provider_ktrain.core.diagnosis.log_lines import Line

MAX_BOX_LINES = 4
MAX_HEAD_CHARS = 120  #: Length of what precedes the level: time, host, process and logger.


@dataclass(frozen=True)
class Record:
    """A record.

    :param text: its message.
    :param line: number of its line.
    """

    text: str
    line: int
    process: str = ""


_LEVEL = re.compile(
    r"\b(?:ERROR|CRITICAL|FATAL|CRIT)\b|(?<=\[)(?:error|critical) *(?=\])|^(?:Error|error|fatal)(?=: \S)"
)
_SENTENCE = re.compile(r"\b[A-Za-z]{2,40}[,;]? [a-z]{2,40} ([a-z]{2,40}\b|$)")
_LOGFMT = re.compile(r'\blevel="?(?:error|critical|fatal)\b')
_LOGFMT_MESSAGE = re.compile(r'\b(?:msg|message|event)=(?:"([^"]{1,2000})"|(\S{1,2000}))')
#: Records of absl and glog: E only from Python code, F from all.
_GLOG = re.compile(r"^\[?(?:E(?=[^\]]{1,200}\.py:\d)|F)\d{4} \d\d:\d\d:\d\d[^\]]{0,200}\] ?(.{1,2000})")
_AFTER_LEVEL = re.compile(
    r"^[\s\]):|>-]{0,20}(?:(?:\[?[\w./<>-]{1,100}(?:\.py)?:(?:\w{1,100}:)?\d{1,9}[\])]?|[\w.]{1,100}(?=:\S| - |: )|"
    r"\[[\w.:/ -]{1,100}\]|\([\w.:/ -]{1,100}\))[\s:|-]{1,5})?"
)
_PLACE = re.compile(r" {2,99}[\w.-]{1,100}\.py:\d{1,9}$")  #: Rich's column at the end of a line.
#: Records that aren't the program's own words about its end: those of launchers, NCCL, uploads and libraries.
_NOT_OF_PROGRAM = re.compile(
    r"torch[./]distributed[./]|^wandb: |\bNCCL (WARN|INFO)\b|ChildFailedError|^Root Cause|_FATAL\b|"
    r"exits with return code"
)
#: A panic of Rust, whose message is the next line, or from before Rust 1.73, stands in quotes.
_PANIC = re.compile(
    r"^thread '[^']{1,100}'(?: \(\d{1,9}\))? panicked at "
    r"(?:'(?P<old>.{1,2000})', \S{1,400}$|\S{1,400}:\d{1,9}:\d{1,9}:$)"
)
_OF_OTHER_PANIC = re.compile(r"\bAny \{|\bPoisonError\b|^a scoped thread panicked$")
_ERROR_BOX = re.compile(r"^ {1,4}╭─{1,9} Error ─{1,400}╮")  #: Typer prints errors of the command line in one.
_LEVELS = ("error", "critical", "fatal")


def find_records(lines: Sequence[Line]) -> list[Record]:
    """The records of programs at the level of an error, and panics of Rust, that don't report a lost peer."""
    found = []
    for number, line in enumerate(lines):
        text = line.text
        message = _message(text) or _of_panic(lines, number) or _of_box(lines, number)
        if message and not _NOT_OF_PROGRAM.search(text) and not reports_peer_loss(text):
            found.append(Record(message, number, line.process))
    return found


def _message(text: str) -> str:
    """The message of a record; empty if the line is none of such a level."""
    if text.startswith("{"):
        return _of_json(text)
    if match := _GLOG.match(text):
        return match[1].strip()
    if _LOGFMT.search(text):
        match = _LOGFMT_MESSAGE.search(text)
        return (match[1] or match[2]) if match else ""
    match = _LEVEL.search(text, 0, MAX_HEAD_CHARS)
    if match is None or text[:1].isspace() or _SENTENCE.search(text[: match.start()]):
        return ""
    after = text[match.end() :]
    if not after[:1] or (after[0].isspace() and match.start() and text[match.start() - 1] not in " [|(-:\t"):
        return ""
    return _PLACE.sub("", _AFTER_LEVEL.sub("", after, count=1).strip())


def _of_panic(lines: Sequence[Line], number: int) -> str:
    """The message of Rust's panic that begins in a line, unless it only follows from another one; else empty."""
    if not (match := _PANIC.match(lines[number].text)):
        return ""
    message = match["old"] or next(_following(lines, number), "").strip()
    return "" if _OF_OTHER_PANIC.search(message) else message


def _of_box(lines: Sequence[Line], number: int) -> str:
    """The text of a box of Typer that begins in a line; else empty."""
    if not _ERROR_BOX.match(lines[number].text):
        return ""
    inside = (text.strip() for text in itertools.islice(_following(lines, number), MAX_BOX_LINES))
    return " ".join(text.strip("│").strip() for text in itertools.takewhile(lambda text: text.startswith("│"), inside))


def _following(lines: Sequence[Line], number: int) -> Iterator[str]:
    """The later lines of the same process."""
    return (line.text for line in lines[number + 1 :] if line.process == lines[number].process)


def _of_json(text: str) -> str:
    try:
        fields = json.loads(text)
        fields = fields.get("record") or fields
        level = fields.get("level") or fields.get("levelname") or fields.get("severity") or fields.get("lvl") or ""
        level = level.get("name", "") if isinstance(level, dict) else level
        message = fields.get("message") or fields.get("msg") or fields.get("event") or fields.get("text") or ""
        return str(message) if str(level).lower() in _LEVELS else ""
    except (ValueError, AttributeError, RecursionError):
        return ""
