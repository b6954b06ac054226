"""What the last lines of a replica's log say: the exception, known sentences, and whether only a peer was lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHOWN = 20  #: lines of a log that a diagnosis repeats


@dataclass(frozen=True)
class Tail:
    """The end of one container's log.

    :param exception: the line that names it, as Python ends a traceback; empty where there is none.
    :param last: the last line with anything in it.
    :param is_effect: only a lost peer is told of: another replica is the cause.
    :param killed_child: exit code of the process that torchrun names as the first to fail, where it told nothing else.
    :param lines: the last lines, as they are.
    :param heard: whether there was a log at all to look at.
    """

    exception: str = ""
    last: str = ""
    is_effect: bool = False
    killed_child: int | None = None
    lines: tuple[str, ...] = ()
    heard: bool = False

    @property
    def text(self) -> str:
        return "\n".join((*self.lines, self.exception))


_PREFIX = re.compile(r"^(\[(default)?\d*\]:|\[(rank|Rank)\d+\]:?|\[\d+,\d+\]<std(out|err)>:|\(\w+ pid=\d+\))\s?")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Failure|Warning|Timeout)?(:\s.*|:|)$")
_NAMED = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Timeout)(:\s.*|:|)$")
_WRAPPERS = re.compile(r"ChildFailedError|^SystemExit|CalledProcessError")
_CHILD = re.compile(r"exitcode\s*:\s*(-?\d+)")
_EFFECTS = re.compile(
    r"connection closed by( remote)? peer|connection reset by( remote)? peer|broken pipe|socket closed|"
    r"ncclRemoteError|remote process exited|NCCL communicator was aborted|"
    r"watchdog caught collective operation timeout|timed out in .*(store|barrier|rendezvous)|"
    r"Rendezvous(Connection|Closed|Timeout)Error|DistStoreError|DistNetworkError|"
    r"connection refused|SignalException|got signal: ?15|received signal 15|"
    r"ORTE has lost communication|lost connection to the remote daemon|a remote process|"
    r"HorovodInternalError",
    re.IGNORECASE,
)


def read_tail(log: Sequence[str] | None, message: str = "") -> Tail:
    """:param log: the last lines of a log, without timestamps, oldest first; None where nobody has it.
    :param message: the container's termination message: torchelastic's error file, or text."""
    told = _error_file(message)
    lines = log or ([] if told else message.splitlines())
    clean = [_PREFIX.sub("", line.rstrip()) for line in lines]
    found = [e for e in ([told] if told else []) + list(_exceptions(clean)) if not _WRAPPERS.search(e)]
    causes = [e for e in found if not _EFFECTS.search(e)]
    last = next((line.strip() for line in reversed(clean) if line.strip()), "")
    child = next((int(m[1]) for line in clean if (m := _CHILD.search(line))), None)
    effect = not causes and any(_EFFECTS.search(text) for text in (found or clean[-SHOWN:]))
    return Tail(
        exception=(causes or found or [""])[0],
        last=last,
        is_effect=effect,
        killed_child=child if child is not None and child < 0 and not causes else None,
        lines=tuple(lines[-SHOWN:]),
        heard=log is not None,
    )


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
    except (ValueError, KeyError, TypeError):
        return ""
    inner = content.get("message") if isinstance(content, dict) else content
    return str(inner or "").strip().splitlines()[0] if str(inner or "").strip() else ""
