"""Parses the last lines of a replica's log: the exception, known messages, and whether it only lost a peer."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.diagnosis.failure_patterns import (
    PROGRAM_ERRORS,
    first_match,
    is_survivable,
    reports_peer_loss,
)
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.text.output import clipped
from airflow_provider_ktrain.core.text.timestamps import epoch_seconds

MAX_QUOTED_LINES = 20  #: last lines of a log that a cause quotes
PATTERN_WINDOW_LINES = 15  #: last lines of a log in which a known message can explain the end of a program


@dataclass(frozen=True)
class Tail:
    """The end of one container's log, without the report of a launcher such as torchrun.

    :param exception: the last line of a Python traceback, or C++'s what(); of an exception that wraps an error of NCCL,
        NCCL's own message. Default: "", none found.
    :param crash_line: without an exception, the line by which a library or the C library explains why it ended the
        process. Default: "".
    :param last_line: the last line that contains a letter or digit, without markers and the answers of nslookup.
        Default: "".
    :param is_peer_loss: whether the program failed only because it lost a peer: the cause is another replica.
    :param child_exit_code: exit code of the process that torchrun or mpirun reports as the first to fail; negative for
        a signal. Default: None, no report.
    :param quoted_lines: the last MAX_QUOTED_LINES lines, limited in length: what a cause quotes.
    :param final_text: the last PATTERN_WINDOW_LINES lines in which known messages are searched, without those that the
        program has survived.
    """

    exception: str = ""
    crash_line: str = ""
    last_line: str = ""
    is_peer_loss: bool = False
    child_exit_code: int | None = None
    quoted_lines: tuple[str, ...] = ()
    text: str = ""
    has_log: bool = False
    final_text: str = ""


_PREFIX = re.compile(r"^(\[(default)?\d*\]:|\[(rank|Rank)\d+\]:?|\[\d+(,\d+)?\]<std(out|err)>:|\(\w+ pid=\d+\))\s?")
#: markers for this provider, and what nslookup of an init container prints for a name that resolves
_NOISE = re.compile(r"KTRAIN_[A-Z_]{1,64} |(Server|Name|Address):\s+\S+$")
#: a line below the level of an error, also UserWarning and those of PyTorch, or about an attempt that is repeated
_MINOR = re.compile(
    r"(?i:(\b|[a-z])warn(ing)?\b|\bretrying\b|\bretry (\d|loop|attempt)|\bwill retry\b)|"
    r"(?<!=)\b(INFO|DEBUG)\b|^\[?[WI](\d{3,4} \d\d:| \w+\.cpp:)"
)
#: a line of a level at which a lost peer isn't reported, while PyTorch reports it as a warning
_INFORMATION = re.compile(r"(?<!=)\b(INFO|DEBUG)\b|^\[?I\d{3,4} \d\d:")
_REPEATED = re.compile(r"^\s*Retrying\b")  #: of huggingface_hub, after the message
_DASHED_LINE = re.compile(r"-{20,}\s*$")
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN_MESSAGES = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]{,199}(Error|Exception|Exit|Interrupt|Failure|Warning|Timeout)?(:\s.*|:|)$")
#: Signals that a lost peer does not explain. SIGABRT is not among them: NCCL aborts after a lost peer.
_CRASH_SIGNALS = {4, 7, 8, 9, 11}
_BARE_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]{,199}(Error|Exception|Exit|Interrupt|Timeout)|Exception|MemoryError)(:\s.*|:|)$"
)
_IGNORED = ("Exception ignored in", "Retry attempt failed")  #: begin a traceback that didn't end the program
_CPP_WHAT = re.compile(r"^\s*what\(\):\s*(\S.*)")
#: Exceptions that say only that NCCL failed; NCCL's own message follows `Last error:` or is in a line NCCL WARN.
_OF_NCCL = re.compile(r"NCCL [Ee]rror( in)?\b|\bnccl\w+Error\b")
_NCCL_WARN = re.compile(r"\bNCCL WARN (.+)")
_CRASH_LINE = re.compile(
    r"Process group watchdog thread terminated with exception: (?P<why>\S.*)|"
    r"(free\(\)|malloc\(\)|double free|corrupted |munmap_chunk\(\)|Memory access fault by GPU)"
)
_LAUNCHER_MESSAGES = (
    "ChildFailedError",
    "Horovod detected that one or more",
    *(f"{program} {saw} that" for program in ("mpirun", "mpiexec", "prterun") for saw in ("detected", "noticed")),
)
_WRAPPER_EXCEPTIONS = re.compile(r"ChildFailedError|Horovod detected that one or more|^SystemExit|CalledProcessError")
#: a line of metrics or progress
_PROGRESS = re.compile(
    r"KTRAIN_(METRIC|RESULT)|\d%\||"
    r"\b(step|epoch|iter(ation)?|batch|(train_|val_)?loss|acc(uracy)?|lr)\b\W{0,3}\d",
    re.IGNORECASE,
)
#: torchrun's reports that a process has failed, and that it stops the others, in torch 1.9 to 2.13
_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of ")
_STOPPED = re.compile(r"(Sending|Closing) process \d+ (closing|via) signal SIG")
_IS_STOPPED = "death signal, shutting down workers"  #: torchrun itself has got a signal, and ends
_OF_TORCHRUN = re.compile(r"torch[./]distributed[./]")  #: in each line that torchrun logs
#: in the traceback with which torchrun itself ends
_TORCHRUN_FAILED = re.compile(r"torch/distributed/launcher/api\.py")


def in_order(lines: Sequence[tuple[str, str]]) -> list[str]:
    """The texts of a container's last lines, with the program's message at the end.

    stdout and stderr are two pipes, and the node reads them in any order: the message of `sys.exit("text")` may come
    before an older line of stdout. So if the log ends with metrics or progress, those of the last second come first.

    :param lines: time (RFC 3339, or empty) and text of each line, oldest first.
    """
    texts = [text for _, text in lines]
    written = [time for time, text in lines if re.search(r"\w", text)]
    if not texts or not written or not _is_routine(texts[-1]) or (end := epoch_seconds(written[-1])) is None:
        return texts
    start = len(lines)
    while start and (at := epoch_seconds(lines[start - 1][0])) is not None and at >= end - 1:
        start -= 1
    return [*texts[:start], *sorted(texts[start:], key=lambda text: not _is_routine(text))]


def _is_routine(text: str) -> bool:
    return not text.strip() or _PROGRESS.search(text) is not None


def is_end_of_processes(line: str) -> bool:
    """Whether torchrun reports by this line that one of its processes has failed, or that it ends one."""
    return ("failed (exitcode" in line and _FAILED.search(line) is not None) or (
        " signal SIG" in line and _STOPPED.search(line) is not None
    )


def count_replaced(lines: Sequence[str]) -> int:
    """How many of the lines precede the processes that torchrun started last: it starts them again in the container.

    What the earlier ones said was not the end of the program. They have failed, or torchrun has stopped them without a
    failure because others fail or join. It stops the peers of a failed process, too, which may write then, and reports
    the failure afterwards.
    """
    ends = [number for number, line in enumerate(lines, 1) if is_end_of_processes(line)]
    failures = [number for number in ends if _FAILED.search(lines[number - 1])]
    last = ends[-1] if ends else 0
    if _is_replaced(lines[last:]) and (last in failures or not any(_IS_STOPPED in line for line in lines)):
        return last
    return max((number for number in failures if number < last), default=0)


def _is_replaced(rest: Sequence[str]) -> bool:
    """Whether, by the lines after the end of its processes, torchrun has started others before it ended itself.

    ChildFailedError reports these processes: other lines before it are theirs, from a pipe that was read later.
    """
    if any("ChildFailedError" in line for line in rest):
        return False
    own = next((i for i, line in enumerate(rest) if _TORCHRUN_FAILED.search(line)), None)
    if own is not None:
        rest = rest[: max((i for i in range(own) if rest[i].startswith(_TRACEBACK)), default=own)]
    return any(re.search(r"\w", line) and not _OF_TORCHRUN.search(line) for line in rest)


def read_tail(log: Sequence[str] | None, message: str = "") -> Tail:
    """Parse the end of a log.

    :param log: the last lines, without timestamps, oldest first; None if no log is available.
    :param message: the container's termination message: torchelastic's error file, or text. Default: "".
    """
    reported = _error_file(message)
    texts = map(own_text, log or ([] if reported else message.splitlines()))
    lines = [clipped(line) for line in texts if line is not None]
    lines = lines[count_replaced(lines) :]
    clean = [_PREFIX.sub("", line.rstrip()) for line in lines]
    text = "\n".join(clean)
    has_launcher = any(phrase in text for phrase in _LAUNCHER_MESSAGES)
    end = next((i for i, line in enumerate(clean) if has_launcher and is_end_of_processes(line)), len(clean))
    own = clean[:end]
    exceptions = ([reported] if reported else []) + list(_exceptions(own))
    found = [e for e in exceptions if not _WRAPPER_EXCEPTIONS.search(e)]
    found = found or [match[1].strip() for line in own if (match := _CPP_WHAT.match(line))]
    nccl = _nccl_message(own)
    lost = [e for e in found if reports_peer_loss(e)]
    if nccl:  # what it says is the cause only if it is known, or if the exception isn't about a peer either
        is_cause = not reports_peer_loss(nccl) and (
            first_match(PROGRAM_ERRORS, nccl) or any(_OF_NCCL.search(e) and e not in lost for e in found)
        )
        lost = [*(e for e in lost if not _OF_NCCL.search(e)), *([] if is_cause else [nccl])]
        found = list(dict.fromkeys(nccl if _OF_NCCL.search(e) else e for e in found))
    causes = [e for e in found if e not in lost]
    written = [line.strip() for line in reversed(own) if re.search(r"\w", line)]
    crashes = ((line, match) for line in own if (match := _CRASH_LINE.search(line)))
    crash_line = nccl or next((match["why"] or line.strip() for line, match in crashes), "")
    child = _first_to_fail(clean)
    last = [line for line in _since_progress(own[-MAX_QUOTED_LINES:]) if not _INFORMATION.search(line)] + [crash_line]
    crashed = child is not None and -child in _CRASH_SIGNALS
    # of several processes, the first to fail is the cause; one process survived all its exceptions but the last
    exception = (causes or found or [""])[0 if has_launcher or reported else -1]
    return Tail(
        exception=exception,
        crash_line="" if exception else crash_line,
        last_line=next((line for line in written if not _NOISE.match(line)), written[0] if written else ""),
        is_peer_loss=not causes and not crashed and bool(lost if found else any(map(reports_peer_loss, last))),
        child_exit_code=child,
        quoted_lines=tuple((lines[:end] or lines)[-MAX_QUOTED_LINES:]),
        text="\n".join(own),
        has_log=log is not None,
        final_text="\n".join(_final_lines(own, exception)),
    )


def _nccl_message(lines: Sequence[str]) -> str:
    """What NCCL says of its error, preferably not that it lost a peer; empty if it says nothing."""
    said = [after.strip() for line, after in itertools.pairwise(lines) if line.strip() == "Last error:"]
    said += [match[1].strip() for line in lines[-MAX_QUOTED_LINES:] if (match := _NCCL_WARN.search(line))]
    return next((f"NCCL: {text}" for text in (*(t for t in said if not reports_peer_loss(t)), *said) if text), "")


def _last_lines(lines: Sequence[str]) -> Sequence[str]:
    """The last PATTERN_WINDOW_LINES lines. A message from mpirun, framed by dashed lines, counts as one."""
    count, framed = 0, False
    for start in range(len(lines) - 1, -1, -1):
        framed ^= _DASHED_LINE.match(lines[start]) is not None
        count += not framed
        if count == PATTERN_WINDOW_LINES:
            return lines[start:]
    return lines


def _since_progress(lines: Sequence[str]) -> Sequence[str]:
    """The lines after the last one of progress: the program has survived what it logged before."""
    progress = (
        at
        for at, line in enumerate(lines, 1)
        if _PROGRESS.search(line) and not reports_peer_loss(line) and not is_survivable(line)
    )
    return lines[max(progress, default=0) :]


def _final_lines(own: Sequence[str], exception: str) -> Iterator[str]:
    """The last lines, without what libraries log and survive: a request that is repeated, or is not needed."""
    lines = _last_lines(own)
    survived = len(lines) - len(_since_progress(lines))
    for at, (line, after) in enumerate(itertools.zip_longest(lines, lines[1:], fillvalue="")):
        is_minor = _MINOR.search(line) or _REPEATED.match(after)
        is_over = at < survived and is_survivable(line)
        if (line.strip() and exception.startswith(line.strip())) or not (is_minor or is_over):
            yield line


def _first_to_fail(lines: Sequence[str]) -> int | None:
    """The exit code of the first process to fail: torchrun lists it last, as root cause; mpirun names its signal."""
    root = max((i for i, line in enumerate(lines) if line.startswith("Root Cause")), default=len(lines))
    text = "\n".join(lines[root:])
    if match := re.search(r"exitcode\s*:\s*(-?\d{1,9})", text):
        return int(match[1])
    text = "\n".join(lines)
    if match := re.search(r"exits with return code = (-?\d{1,9})", text):  # DeepSpeed's launcher
        return int(match[1])
    match = re.search(r"process rank \d+[^\n]{0,400}?exited on\s+signal (\d{1,9})", text)
    return -int(match[1]) if match else None


def _exceptions(lines: Sequence[str]) -> Iterator[str]:
    """The exception of each traceback; of a chain only the last one, which ended the program."""
    pending = ""
    inside = ignored = False
    for line, after in itertools.zip_longest(lines, lines[1:], fillvalue=""):
        if line.startswith(_CHAIN_MESSAGES):
            pending = ""
        elif line.startswith(_IGNORED):
            ignored = True
        elif line.startswith(_TRACEBACK):
            if pending:
                yield pending
            pending, inside = "", True
        elif inside and line and not line[0].isspace():
            if _EXCEPTION.match(line) and not ignored:
                pending = _with_detail(line, after)
            inside = ignored = False
        elif not inside and not pending and _BARE_EXCEPTION.match(line):
            pending = _with_detail(line, after)
    if pending:
        yield pending


def _with_detail(line: str, after: str) -> str:
    """An exception; if its first line ends with a colon and goes on in an indented one, both."""
    goes_on = line.rstrip().endswith(":") and after[:1].isspace()
    return f"{line.strip()} {after.strip()}" if goes_on else line.strip()


def _error_file(message: str) -> str:
    """The message of torchelastic's error file: `{"message": {"message": "ValueError: ...", "extraInfo": ...}}`."""
    try:
        content = json.loads(message)["message"]
        inner = str((content.get("message") if isinstance(content, dict) else content) or "").strip()
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return clipped(inner.splitlines()[0]) if inner else ""
