"""Parses the last lines of a replica's log: the exception, known messages, and whether it only lost a peer."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from airflow_provider_ktrain.core.diagnosis.crashes import Crash, find_crashes
from airflow_provider_ktrain.core.diagnosis.failure_patterns import (
    PROGRAM_ERRORS,
    first_match,
    is_survivable,
    reports_peer_loss,
)
from airflow_provider_ktrain.core.diagnosis.horovod import reported_end
from airflow_provider_ktrain.core.diagnosis.log_lines import (
    STREAMS_SECONDS,
    TRACEBACK,
    Line,
    TimedText,
    in_order,
    is_progress,
    parsed_lines,
)
from airflow_provider_ktrain.core.diagnosis.log_records import Record, find_records
from airflow_provider_ktrain.core.diagnosis.tracebacks import Traceback, Weight, find_tracebacks
from airflow_provider_ktrain.core.logs.stacks import own_text
from airflow_provider_ktrain.core.text.output import clipped

T = TypeVar("T", Traceback, Record)

MAX_OTHERS = 3  #: Other exceptions that a cause names.
MAX_QUOTED_LINES = 20  #: Last lines of a log that a cause quotes.
PATTERN_WINDOW_LINES = 15  #: Last lines of a log in which a known message can explain the end of a program.


@dataclass(frozen=True)
class Tail:
    """The end of one container's log, without the report of a launcher such as torchrun.

    :param exception: of the traceback that explains the end, or C++'s what(); of an exception that wraps an error of
        NCCL, NCCL's own message. Default: "", none found.
    :param is_handled: whether the exception was printed by a program that went on, or raised by another thread, so that
        it doesn't explain a signal. Default: False.
    :param is_last_printed: whether it was printed, and no line of progress of its process follows. Default: False.
    :param assertion: that failed on the GPU, if the exception says only that one has. Default: "".
    :param crash_line: without an exception, the line by which a library or the C library explains why it ended the
        process, or what ended it, and where. Default: "".
    :param crash_signal: the signal that a dump reports. Default: 0, none.
    :param is_kill_reported: whether a shell reports that SIGKILL has ended a child, without progress after it.
    :param record: without both, the message of a logger at the level of an error with which the program ends. Default:
        "".
    :param at: when the exception, the crash or the record was read, in epoch seconds. Default: None, not known.
    :param others: other exceptions of the same chain or of other processes. Default: none.
    :param points_elsewhere: whether the exception says only that another process has failed. Default: False.
    :param last_line: the last line that contains a letter or digit, without markers and the answers of nslookup.
        Default: "".
    :param is_peer_loss: whether the program failed only because it lost a peer: the cause is another replica.
    :param child_exit_code: exit code of the process that torchrun or mpirun reports as the first to fail; negative for
        a signal. Default: None, no report.
    :param process: the process that Horovod reports as the first to fail: `rank 0 on train-worker-0`. Default: "".
    :param quoted_lines: the last MAX_QUOTED_LINES lines, limited in length: what a cause quotes.
    :param final_text: the last PATTERN_WINDOW_LINES lines in which known messages are searched, without those that the
        program has survived.
    """

    exception: str = ""
    is_handled: bool = False
    is_last_printed: bool = False
    assertion: str = ""
    crash_line: str = ""
    crash_signal: int = 0
    is_kill_reported: bool = False
    record: str = ""
    at: float | None = None
    others: tuple[str, ...] = ()
    points_elsewhere: bool = False
    last_line: str = ""
    is_peer_loss: bool = False
    child_exit_code: int | None = None
    process: str = ""
    quoted_lines: tuple[str, ...] = ()
    text: str = ""
    has_log: bool = False
    final_text: str = ""


#: Markers for this provider, what nslookup of an init container prints for a name that resolves, wandb, and Rust.
_NOISE = re.compile(r"KTRAIN_[A-Z_]{1,64} |(Server|Name|Address):\s+\S+$|wandb: |note: run with `RUST_BACKTRACE")
#: A line below the level of an error, also UserWarning and those of PyTorch, or about an attempt that is repeated.
_MINOR = re.compile(
    r"(?i:(\b|[a-z])warn(ing)?\b|\bretrying\b|\bretry (\d|loop|attempt)|\bwill retry\b)|"
    r"(?<!=)\b(INFO|DEBUG)\b|^\[?[WI](\d{3,4} \d\d:| \w+\.cpp:)"
)
#: A line of a level at which a lost peer isn't reported, while PyTorch reports it as a warning.
_INFORMATION = re.compile(r"(?<!=)\b(INFO|DEBUG)\b|^\[?I\d{3,4} \d\d:")
_REPEATED = re.compile(r"^\s*Retrying\b")  #: What huggingface_hub logs after the message.
_DASHED_LINE = re.compile(r"-{20,}\s*$")
#: Signals that a lost peer does not explain. SIGABRT is not among them: NCCL aborts after a lost peer.
_CRASH_SIGNALS = {4, 7, 8, 9, 11}
MAX_EXIT_CODE = 128  #: A higher one is that of a signal.
_CPP_WHAT = re.compile(r"^\s*what\(\):\s*(\S.*)")
#: Exceptions that say only that NCCL failed; NCCL's own message follows `Last error:` or is in a line NCCL WARN.
_OF_NCCL = re.compile(r"NCCL [Ee]rror( in)?\b|\bnccl\w+Error\b")
_NCCL_WARN = re.compile(r"\bNCCL WARN (.+)")
_CRASH_LINE = re.compile(
    r"Process group watchdog thread terminated with exception: (?P<why>\S.*)|"
    r"\] (?P<check>Check failed: \S.*)|"
    r"(free\(\)|malloc\(\)|double free|corrupted |munmap_chunk\(\)|Memory access fault by GPU|"
    r"Assertion `.{1,200}' failed|\*\*\* [\w ]{1,40} detected \*\*\*)"
)
#: An assertion of a CUDA kernel. The exception says only that one has failed.
_DEVICE_ASSERTION = re.compile(r"Assertion `.{1,200}?` failed")
_OF_GLIBC = re.compile(r"^\*\*\* Error in `[^']{1,200}': |: 0x\w{1,32} \*\*\*$")
_LAUNCHER_MESSAGES = (
    "ChildFailedError",
    "Horovod detected that one or more",
    "exits with return code",
    *(f"{program} {saw} that" for program in ("mpirun", "mpiexec", "prterun") for saw in ("detected", "noticed")),
)
#: An exception that says only that another process has failed, or where the cause stands.
_POINTS = re.compile(
    r"(?i)\broot cause\b|"
    r"\b(see|check|consult|look at|refer to|inspect)\b.{0,60}?"
    r"\b(above|below|previous|logs?|traceback|stack ?trace|output)\b|"
    r"\b(another|other|some|a|one of the|one or more) (worker|rank|process|node|replica)(s|es)?( \w{1,20})? "
    r"(has |have )?(failed|died|raised|crashed|exited)|"
    r"\b(rank|worker|process) \d{1,6} (has )?(failed|died|crashed|raised)|"
    r"\b(worker|process|child|subprocess)\b.{0,60}\b(failed|died|crashed|exited)\b.{0,20}\bexit ?(code|status)\b|"
    r"\b(mpirun|mpiexec|prterun|horovodrun|torchrun|deepspeed|pdsh|srun)\b.{0,60}?"
    r"\b(failed|died|exited|returned|ended|finished)\b.{0,20}\b(code|status|\d{1,3}$)"
)
#: The exception that a process has recorded for torchrun, which shows it with an indent.
_OF_REPORT = re.compile(
    r"traceback : Traceback \(most recent call last\):(?:\n {2,400}\S.*)*"
    r"\n {2,4}(?P<exception>[A-Za-z_][\w.]{,199}(: .*)?)\s*(\n|$)"
)
#: A message of Open MPI between dashed lines: its first sentences tell what has happened.
_OF_MPI = re.compile(r"\b(MPI|MPI_ABORT|mpirun|mpiexec|prterun|ORTE|PRTE)\b")
_KILLED = re.compile(r"^Killed$|\bKilled  ")
_FIRST_OF_HOROVOD = re.compile(
    r"first process to do so was:\s{0,9}Process name:[^\n]{0,200}\s{1,9}Exit code:\s{1,9}(\d{1,9})"
)
BUILD_FAILED = re.compile(r"Error building extension '(\w{1,200})'")
#: An error of a shell's script: the script, with the number of the line, and the message.
_OF_SCRIPT = re.compile(r"^([^\s:]{1,300}(?:: -c)?): (?:line )?\d{1,9}: (.*)")
_WRAPPER_EXCEPTIONS = re.compile(
    r"ChildFailedError|Horovod detected that one or more|^SystemExit|CalledProcessError|ProcessRaisedException"
)
#: Torchrun's reports that a process has failed, and that it stops the others, in torch 1.9 to 2.13.
_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\) of ")
_STOPPED = re.compile(r"(Sending|Closing) process \d+ (closing|via) signal SIG")
_IS_STOPPED = "death signal, shutting down workers"  #: torchrun itself has got a signal, and ends.
_OF_TORCHRUN = re.compile(r"torch[./]distributed[./]")  #: A line that torchrun logs.
#: A line of the traceback with which torchrun itself ends.
_TORCHRUN_FAILED = re.compile(r"torch/distributed/launcher/api\.py")


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
        rest = rest[: max((i for i in range(own) if rest[i].startswith(TRACEBACK)), default=own)]
    return any(re.search(r"\w", line) and not _OF_TORCHRUN.search(line) for line in rest)


def read_tail(log: Sequence[str] | None, message: str = "") -> Tail:
    """Parse the end of a log.

    :param log: the last lines, without timestamps, oldest first; None if no log is available.
    :param message: the container's termination message: torchelastic's error file, or text. Default: "".
    """
    reported = _error_file(message)
    lines = [clip for text in log or ([] if reported else message.splitlines()) if (clip := _clipped(text)) is not None]
    lines = lines[count_replaced(lines) :]
    parsed = parsed_lines(lines)
    clean = [line.text for line in parsed]
    text = "\n".join(clean)
    has_launcher = any(phrase in text for phrase in _LAUNCHER_MESSAGES)
    end = next((i for i, line in enumerate(clean) if has_launcher and is_end_of_processes(line)), len(clean))
    named = reported_end(lines)
    spoken = parsed[:end] if named is None else [parsed[at] for at in named.lines]
    protected = frozenset(n for one in find_tracebacks(spoken) for n in one.lines)
    ordered = in_order(spoken, protected)
    own = [line.text for line in ordered]
    progress = [number for number, line in enumerate(ordered) if is_progress(line.text)]
    raised = [t for t in find_tracebacks(ordered) if not _WRAPPER_EXCEPTIONS.search(t.exception)]
    own_end = max((t.lines[0] for t in raised if t.process.startswith("[rank")), default=0)
    raised = [t for t in raised if has_launcher or not _is_survived(t, ordered, progress, own_end)] or [
        Traceback("", [match[1].strip()], [number], Weight.UNHANDLED)
        for number, line in enumerate(own)
        if (match := _CPP_WHAT.match(line))
    ]
    if reported:
        raised.insert(0, Traceback("", [reported], [-1], Weight.UNHANDLED))
    if not raised and (recorded := _OF_REPORT.search(_root_cause(clean))):
        raised = [Traceback("", [recorded["exception"].strip()], [len(own)], Weight.UNHANDLED)]
    nccl = _nccl_message(own)
    effects = _effects(raised, nccl)
    causes = [t for t in raised if t not in effects]
    pointing = [t for t in causes if _POINTS.search(t.exception)]
    causes = [t for t in causes if t not in pointing] or causes
    failed = _failed_process(clean)
    pick = _Picker(has_launcher or bool(reported), failed)
    chosen = pick(causes or effects, lambda one: (one.weight, one.lines[0]))
    latest = {ordered[n].process: n for n in progress}
    records = [r for r in find_records(ordered) if latest.get(r.process, -1) <= r.line]
    record = pick([r for r in records if not _POINTS.search(r.text)] or records, lambda one: (0, one.line))
    of_library = next((m["why"] or m["check"] or line.strip() for line in own if (m := _CRASH_LINE.search(line))), "")
    crash = _explaining(find_crashes(ordered), chosen, bool(causes), of_library)
    if crash or (record and chosen and chosen.weight >= Weight.IN_THREAD):
        chosen = None
    exception = chosen.exception if chosen else ""
    crash_line = str(crash) if crash else nccl or of_library
    if crash and of_library and crash.signal == signal.SIGABRT and of_library not in crash.text:
        crash_line = f"{_OF_GLIBC.sub('', of_library)} in {crash.place}"
    child = _first_to_fail(clean) if named is None else named.exit_code
    last = [line for line in _since_progress(own[-MAX_QUOTED_LINES:]) if not _INFORMATION.search(line)] + [crash_line]
    # NCCL and UCX abort after a lost peer
    aborted = crash is not None and crash.signal == signal.SIGABRT and any(map(reports_peer_loss, last))
    crashed = (crash is not None and not aborted) or (child is not None and -child in _CRASH_SIGNALS)
    of_failed = [line.text for line in ordered if failed and failed.fullmatch(line.process)]
    written = [line.strip() for line in reversed(_without_frame(of_failed or own)) if re.search(r"\w", line)]
    record_counts = not exception and not crash_line and record is not None
    return Tail(
        exception=exception,
        is_handled=chosen is not None and chosen.is_handled,
        is_last_printed=chosen is not None
        and chosen.weight is Weight.PRINTED
        and not _goes_on(spoken, ordered[chosen.lines[-1]]),
        assertion=next((m[0] for line in own if (m := _DEVICE_ASSERTION.search(line))), "")
        if "device-side assert" in exception
        else "",
        crash_line="" if exception else crash_line,
        crash_signal=crash.signal if crash else 0,
        is_kill_reported=any(_KILLED.search(line) for line in _since_progress(own)),
        record=record.text if record is not None and record_counts else "",
        at=_time_of(ordered, crash or (record if record_counts else None), chosen),
        others=_others(chosen, causes),
        points_elsewhere=chosen in pointing
        or (record is not None and record_counts and _POINTS.search(record.text) is not None),
        last_line=_last_line(written),
        is_peer_loss=not causes and not crashed and bool(effects if raised else any(map(reports_peer_loss, last))),
        child_exit_code=child,
        process="" if named is None else named.name,
        quoted_lines=tuple((lines[:end] or lines)[-MAX_QUOTED_LINES:]),
        text="\n".join(own),
        has_log=log is not None,
        final_text="\n".join(_final_lines(own, exception)),
    )


class _Picker:
    """Picks what explains the end from what is found in a log: of each process its last one, and of these the earliest.

    :param is_joint: whether the lines without a prefix are those of several processes, of which the first counts.
    :param failed: prefixes of the process that the launcher reports as the first to fail.
    """

    def __init__(self, is_joint: bool, failed: re.Pattern[str] | None) -> None:
        self._is_joint, self._failed = is_joint, failed

    def __call__(self, found: Sequence[T], order: Callable[[T], tuple[int, int]]) -> T | None:
        """None if nothing is found.

        :param order: weight, of which the lowest counts, and number of the line.
        """
        processes = {one.process: [other for other in found if other.process == one.process] for one in found}
        chosen = []
        for process, ones in processes.items():
            weight = min(order(one)[0] for one in ones)
            ones = [one for one in ones if order(one)[0] == weight]
            chosen.append(ones[0 if self._is_joint and not process else -1])
        of_failed = [one for one in chosen if self._failed and self._failed.fullmatch(one.process)]
        return min(of_failed or chosen, key=order, default=None)


def _effects(raised: Sequence[Traceback], nccl: str) -> list[Traceback]:
    """The exceptions that another process has caused. Those that wrap an error of NCCL get its own message."""
    lost = [t for t in raised if reports_peer_loss(t.exception)]
    if nccl:  # what it says is the cause only if it is known, or if the exception isn't about a peer either
        wrapping = [t for t in raised if _OF_NCCL.search(t.exception)]
        is_cause = not reports_peer_loss(nccl) and (
            first_match(PROGRAM_ERRORS, nccl) or any(t not in lost for t in wrapping)
        )
        lost = [*(t for t in lost if t not in wrapping), *(() if is_cause else wrapping)]
        for one in wrapping:
            one.chain = [nccl]
    failed = [match[1] for t in raised if (match := BUILD_FAILED.search(t.exception))]
    built = [t for t in raised if t.exception.startswith("ImportError") and any(name in t.exception for name in failed)]
    return [*lost, *(t for t in built if t not in lost)]


def _is_survived(one: Traceback, lines: Sequence[Line], progress: Sequence[int], own_end: int) -> bool:
    """Whether a process has made progress after an exception, later than by the order in which streams are read.

    :param own_end: where the last traceback with PyTorch's prefix begins; 0 if there is none. A process that ends with
        one, after it has made progress, has survived what it printed without a prefix.
    """
    raised_at = lines[one.lines[-1]].at
    after = [n for n in progress if n > one.lines[-1] and lines[n].process == one.process]
    if not one.process and after and after[0] < own_end:
        return True
    times = (lines[n].at for n in after)
    return raised_at is not None and any(at is not None and at > raised_at + STREAMS_SECONDS for at in times)


def _goes_on(lines: Sequence[Line], last: Line) -> bool:
    """Whether the process of a line has made progress after it, by the order in which the node has read the lines."""
    after = lines[lines.index(last) + 1 :]
    return any(line.process == last.process and is_progress(line.text) for line in after)


def _explaining(crashes: Sequence[Crash], chosen: Traceback | None, is_cause: bool, of_library: str) -> Crash | None:
    """The crash that explains the end: the first one, unless an exception has ended the process before."""
    crash = next(iter(crashes), None)
    if crash is None:
        return None
    if crash.signal == signal.SIGABRT and ((of_library and not crash.place) or (chosen and not is_cause)):
        return None
    if chosen is None or not is_cause or chosen.is_handled:
        return crash
    return crash if crash.line < chosen.lines[0] and crash.process != chosen.process else None


def _time_of(lines: Sequence[Line], found: Crash | Record | None, chosen: Traceback | None) -> float | None:
    """When what explains the end was read; None if it isn't known."""
    number = chosen.lines[0] if chosen else -1 if found is None else found.line
    return lines[number].at if 0 <= number < len(lines) else None


def _others(chosen: Traceback | None, causes: Sequence[Traceback]) -> tuple[str, ...]:
    """The other exceptions of a chain, and those of other processes."""
    of_chain = chosen.chain if chosen else []
    found = dict.fromkeys([*of_chain, *(one.exception for one in causes if one.weight is Weight.UNHANDLED)])
    return tuple(text for text in found if chosen is None or text != chosen.exception)[:MAX_OTHERS]


def _last_line(written: Sequence[str]) -> str:
    """The last line that says something; of a message of two lines the first, if bash has printed it.

    :param written: lines with letters, the last one first.
    """
    last = next((line for line in written if not _NOISE.match(line)), written[0] if written else "")
    before = next((line for line in written[written.index(last) + 1 :]), "") if last else ""
    match, earlier = _OF_SCRIPT.match(last), _OF_SCRIPT.match(before)
    is_quote = (
        match and earlier and match[1] == earlier[1] and match[2].startswith(("`", "syntax error: unexpected end"))
    )
    return before if is_quote else last


def _without_frame(lines: Sequence[str]) -> Sequence[str]:
    """The lines, where a message of Open MPI at their end has become one: that of its first paragraph."""
    dashed = [number for number, line in enumerate(lines) if _DASHED_LINE.match(line)]
    if len(dashed) < 2 or any(re.search(r"\w", line) for line in lines[dashed[-1] :]):
        return lines
    begin, end = dashed[-2:]
    text = " ".join(itertools.takewhile(str.strip, lines[begin + 1 : end]))
    return [*lines[:begin], text] if _OF_MPI.search(text) else lines


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
        if is_progress(line) and not reports_peer_loss(line) and not is_survivable(line)
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
    text = _root_cause(lines)
    if match := re.search(r"exitcode\s*:\s*(-?\d{1,9})", text):
        return int(match[1])
    text = "\n".join(lines)
    if match := re.search(r"exits with return code = (-?\d{1,9})", text):  # DeepSpeed's launcher
        return int(match[1])
    if match := _FIRST_OF_HOROVOD.search(text):
        return int(match[1]) if int(match[1]) <= MAX_EXIT_CODE else MAX_EXIT_CODE - int(match[1])
    match = re.search(r"process rank \d+[^\n]{0,400}?exited on\s+signal (\d{1,9})", text)
    return -int(match[1]) if match else None


def _root_cause(lines: Sequence[str]) -> str:
    """What torchrun reports of the first process to fail."""
    return "\n".join(
        lines[max((i for i, line in enumerate(lines) if line.startswith("Root Cause")), default=len(lines)) :]
    )


def _failed_process(lines: Sequence[str]) -> re.Pattern[str] | None:
    """The prefixes of the process that torchrun, Horovod or mpirun reports as the first to fail; None if none does."""
    if match := re.search(r"rank\s*:\s*(\d{1,9}) \(local_rank: (\d{1,9})\)", _root_cause(lines)):
        return prefix_of(int(match[1]), int(match[2]))
    match = re.search(r"Process name: (?:(\d{1,9})|\[\[\d{1,9},(\d{1,9})\],(\d{1,9})\])\s", "\n".join([*lines, ""]))
    return prefix_of(int(match[1] or match[3])) if match else None


def prefix_of(rank: int, local_rank: int | None = None) -> re.Pattern[str]:
    """The prefixes of a process: those of PyTorch, torchrun, Horovod and mpirun.

    :param local_rank: its number in its replica, by which torchrun names it. Default: None, torchrun didn't start it.
    """
    of_torchrun = "" if local_rank is None else rf"|\[(?!rank)[A-Za-z_-]{{0,99}}{local_rank}\]:"
    return re.compile(rf"\[[Rr]ank{rank}\]:?|\[(?:1,)?{rank}\]<std(?:err|out)>:{of_torchrun}")


def _clipped(text: str) -> str | None:
    """A line without the record at its end, limited in length; None if nothing of the program is left."""
    own = own_text(text)
    if own is None:
        return None
    short = clipped(own)
    return TimedText(short, text.time) if isinstance(text, TimedText) and short is not text else short


def _error_file(message: str) -> str:
    """The message of torchelastic's error file: `{"message": {"message": "ValueError: ...", "extraInfo": ...}}`."""
    try:
        content = json.loads(message)["message"]
        inner = str((content.get("message") if isinstance(content, dict) else content) or "").strip()
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return clipped(inner.splitlines()[0]) if inner else ""
