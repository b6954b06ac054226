"""What the last lines of a replica's log say: the exception, known sentences, and whether only a peer was lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.text import clipped

SHOWN = 20  #: lines of a log that a diagnosis repeats
NEAR_END = 15  #: last lines in which a known message can explain the end of a program


@dataclass(frozen=True)
class Tail:
    """The end of one container's log.

    :param exception: the line that names it, as Python ends a traceback, or C++'s what(); empty where there is none.
    :param last: the last line with anything in it, of the program's own.
    :param is_effect: only a lost peer is told of: another replica is the cause.
    :param child: exit code of the process that torchrun or mpirun names as the first to fail (negative: a signal).
    :param lines: the last lines of the program's own, as they are but for their length: what a diagnosis repeats.
    :param text: all that is known of the program's own.
    :param end: the last `NEAR_END` lines of that, without warnings: what explains the end of a program stands here.
    :param heard: whether there was a log at all to look at.
    """

    exception: str = ""
    last: str = ""
    is_effect: bool = False
    child: int | None = None
    lines: tuple[str, ...] = ()
    text: str = ""
    heard: bool = False
    end: str = ""


_PREFIX = re.compile(r"^(\[(default)?\d*\]:|\[(rank|Rank)\d+\]:?|\[\d+(,\d+)?\]<std(out|err)>:|\(\w+ pid=\d+\))\s?")
_WARNING = re.compile(r"(?i)\bwarn(ing)?\b")
_FRAME = re.compile(r"-{20,}\s*$")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]{,199}(Error|Exception|Exit|Interrupt|Failure|Warning|Timeout)?(:\s.*|:|)$")
_CRASHES = {4, 7, 8, 9, 11}  #: signals that no lost peer explains; of those that NCCL aborts for one, SIGABRT
_NAMED = re.compile(r"^[A-Za-z_][\w.]{,199}(Error|Exception|Exit|Interrupt|Timeout)(:\s.*|:|)$")
_WHAT = re.compile(r"^\s*what\(\):\s*(\S.*)")  # of C++
_LAUNCHERS = (
    "ChildFailedError",
    "Horovod detected that one or more",
    *(f"{program} {saw} that" for program in ("mpirun", "mpiexec", "prterun") for saw in ("detected", "noticed")),
)
_WRAPPERS = re.compile(r"ChildFailedError|Horovod detected that one or more|^SystemExit|CalledProcessError")
_REPORT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py.*(Sending process|failed \(exitcode)")
#: plain words, in lower case: they are looked for in the logs of every replica, of which there may be 512
_EFFECTS = (
    "connection closed by peer",
    "connection closed by remote peer",
    "connection reset by peer",
    "connection reset by remote peer",
    "broken pipe",
    "socket closed",
    "connection refused",
    "client socket has timed out",
    "client socket has failed",
    "failure in name resolution",
    "name or service not known",
    "unhandled system error",
    "ncclsystemerror",
    "ncclinternalerror",
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "operations have failed or timed out",
    "rendezvousconnectionerror",
    "rendezvousclosederror",
    "rendezvoustimeouterror",
    "diststoreerror",
    "distnetworkerror",
    "signalexception",
    "got signal: 15",
    "got signal:15",
    "received signal 15",
    "orte has lost communication",
    "lost connection to the remote daemon",
    "a remote process",
    "horovodinternalerror",
)
_MEETING = ("store", "barrier", "rendezvous")  #: an effect where they are what `timed out in` is said of


def read_tail(log: Sequence[str] | None, message: str = "") -> Tail:
    """:param log: the last lines of a log, without timestamps, oldest first; None where nobody has it.
    :param message: the container's termination message: torchelastic's error file, or text.
    """
    told = _error_file(message)
    lines = [clipped(line) for line in log or ([] if told else message.splitlines())]
    clean = [_PREFIX.sub("", line.rstrip()) for line in lines]
    text = "\n".join(clean)
    launched = any(word in text for word in _LAUNCHERS)
    end = next((i for i, line in enumerate(clean) if launched and _REPORT.search(line)), len(clean))
    own = clean[:end]
    found = [e for e in ([told] if told else []) + list(_exceptions(own)) if not _WRAPPERS.search(e)]
    found = found or [match[1].strip() for line in own if (match := _WHAT.match(line))]
    causes = [e for e in found if not _is_effect(e)]
    # of several processes the first to fail is the cause, of one the last exception, which it did not survive
    child = _first_to_fail(clean)
    crashed = child is not None and -child in _CRASHES
    exception = (causes or found or [""])[0 if launched or told else -1]
    return Tail(
        exception=exception,
        last=next((line.strip() for line in reversed(own) if re.search(r"\w", line)), ""),
        is_effect=not causes and not crashed and any(map(_is_effect, found or own[-SHOWN:])),
        child=child,
        lines=tuple((lines[:end] or lines)[-SHOWN:]),
        text="\n".join(own),
        heard=log is not None,
        end="\n".join(line for line in _last_lines(own) if not _WARNING.search(line)),
    )


def _last_lines(lines: Sequence[str]) -> Sequence[str]:
    """The last `NEAR_END` lines; one of mpirun's messages, which dashed lines frame, counts as one line."""
    count, framed = 0, False
    for start in range(len(lines) - 1, -1, -1):
        framed ^= _FRAME.match(lines[start]) is not None
        count += not framed
        if count == NEAR_END:
            return lines[start:]
    return lines


def _is_effect(text: str) -> bool:
    """Whether a text tells of a peer that was lost."""
    lower = text.lower()
    late = lower.partition("timed out in ")[2]
    return any(word in lower for word in _EFFECTS) or any(word in late for word in _MEETING)


def _first_to_fail(lines: Sequence[str]) -> int | None:
    """The exit code in torchrun's report, which lists the other failures before the first, or in mpirun's."""
    root = next((i for i, line in enumerate(lines) if line.startswith("Root Cause")), len(lines))
    text = "\n".join(lines[root:])
    if match := re.search(r"exitcode\s*:\s*(-?\d+)", text):
        return int(match[1])
    match = re.search(r"process rank \d+[^\n]*exited on\s+signal (\d+)", "\n".join(lines))
    return -int(match[1]) if match else None


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """The exception of each traceback; of a chain the last one, which is what ended the program."""
    pending = ""
    inside = False
    for line in lines:
        if line.startswith(_CHAINED):
            pending = ""
        elif line.startswith(_TRACEBACK):
            if pending:
                yield pending
            pending, inside = "", True
        elif inside and line and not line[0].isspace():
            inside = False
            if _EXCEPTION.match(line):
                pending = line.strip()
        elif not inside and not pending and _NAMED.match(line):
            pending = line.strip()
    if pending:
        yield pending


def _error_file(message: str) -> str:
    """The message of torchelastic's error file: `{"message": {"message": "ValueError: ...", "extraInfo": ...}}`."""
    try:
        content = json.loads(message)["message"]
        inner = str((content.get("message") if isinstance(content, dict) else content) or "").strip()
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return clipped(inner.splitlines()[0]) if inner else ""
