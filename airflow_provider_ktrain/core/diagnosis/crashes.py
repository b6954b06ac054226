"""Crashes that a log reports: the signal that ended a process, and the place in its code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from airflow_provider_ktrain.core.diagnosis.log_lines import Line

MAX_DUMP_LINES = 400  #: Lines from the head of a dump to the innermost frame: other threads come first.
_SIGNALS = {
    "Segmentation fault": 11, "Bus error": 7, "Illegal instruction": 4, "Floating point exception": 8,
    "Trace/breakpoint trap": 5,
}  # fmt: skip
_BY_NAME = {"SIGSEGV": 11, "SIGBUS": 7, "SIGILL": 4, "SIGFPE": 8, "SIGABRT": 6, "SIGTRAP": 5}
_WORDS = "|".join(re.escape(words) for words in _SIGNALS)


@dataclass(frozen=True)
class Crash:
    """The crash of a process.

    :param signal: its number; 0 if it isn't reported.
    :param text: what ended the process.
    :param place: the innermost function, with its file; empty if it isn't known.
    :param line: number of the line that reports it.
    """

    signal: int
    text: str
    place: str
    line: int
    process: str = ""

    def __str__(self) -> str:
        return f"{self.text} in {self.place}" if self.place else self.text


#: The first lines of dumps: of Python's faulthandler, UCX, Open MPI, and glog or absl.
_HEADS = (
    re.compile(r"^(?P<text>Fatal Python error: (?P<words>.{1,300}))"),
    re.compile(r"\bCaught signal (?P<number>\d{1,2}) \((?P<text>(?P<words>[\w /-]{1,40}))"),
    re.compile(r"^\[[^\]]{1,100}\] Signal: (?P<text>(?P<words>[\w /-]{1,40})) \((?P<number>\d{1,2})\)"),
    re.compile(r"^\*\*\* (?P<text>(?P<words>SIG[A-Z]{2,8})) \(?(@|received|see)"),
    re.compile(r"^\*\*\* Error in `.{1,200}': (?P<text>(?P<words>[^:]{1,200}))"),
)
#: What a shell prints when a child has died: with the line of its script, or alone.
_OF_SHELL = re.compile(
    r"^(?:[^\s:]{1,300}: (?:line )?\d{1,9}: +\d{1,9} )?"
    rf"(?P<words>{_WORDS})(?P<core>\s{{1,40}}\(core dumped\))?(?:\s|$)"
)
_CURRENT_THREAD = re.compile(r"^(Current thread 0x\w{1,32}|Stack)\b.{0,100} \(most recent call first\):")
_PYTHON_FRAME = re.compile(r'^ {1,3}File "(?P<path>.{1,400})", line (?P<line>\d{1,9}) in (?P<name>.{1,200})')
#: Frames of a native stack, as UCX, Open MPI, and glog or absl print them.
_NATIVE_FRAMES = (
    re.compile(r"^ ?\d{1,3} +0x\w{1,32} (?P<name>[^()]{1,200})\(.{0,300}?\)\s+(?P<place>\S{1,300})"),
    re.compile(
        r"^(?:\[[^\]]{1,100}\] \[ *\d{1,3}\] ?| ?\d{1,3} +|(?=/))(?P<place>[^\s(]{1,300})\((?P<name>[^)+]{1,200})\+0x"
    ),
    re.compile(r"^(PC:)? +@ +0x\w{1,32} +(\(unknown\) +|\d{1,9} +)?(?P<name>[\w:~<>,* ]{1,200})"),
)
#: Functions that handle a signal, or raise it.
_OF_HANDLERS = re.compile(
    r"ucs_|__?restore_rt|killpg|__?sigaction|gsignal|raise$|abort$|__assert_fail|pthread_kill|absl::|google::|unknown"
)
_PACKAGES = re.compile(r"^.{0,300}/(?:site|dist)-packages/")


def find_crashes(lines: Sequence[Line]) -> list[Crash]:
    """The crashes that are reported, in the order of the reports."""
    found: list[Crash] = []
    for number, line in enumerate(lines):
        text = line.text
        if match := next((match for head in _HEADS if (match := head.search(text))), None):
            words = match["words"].strip()
            numbered = match.groupdict().get("number")
            signal = int(numbered) if numbered else _SIGNALS.get(words) or _BY_NAME.get(words) or 6
            found.append(Crash(signal, match["text"].strip(), _place(lines, number), number, line.process))
        elif (match := _OF_SHELL.match(text)) and (match["core"] or ": " in text or text.strip() in _SIGNALS):
            found.append(Crash(_SIGNALS[match["words"]], text.strip(), "", number, line.process))
    return found


def _place(lines: Sequence[Line], head: int) -> str:
    """The innermost function of the dump whose first line is `head`, with its file; empty if there is none."""
    process, is_current = lines[head].process, False
    own = (line.text for line in lines[head + 1 : head + MAX_DUMP_LINES] if line.process == process)
    for text in own:
        if text.startswith("Fatal Python error: ") or "End of error message" in text:
            break
        if is_current:
            match = _PYTHON_FRAME.match(text)
            return f"{match['name']} ({_PACKAGES.sub('', match['path'])}:{match['line']})" if match else ""
        is_current = _CURRENT_THREAD.match(text) is not None
        for name, place in _native(text):
            return f"{name} ({place})" if place else name
    return ""


def _native(text: str) -> Iterator[tuple[str, str]]:
    """Name and place of a frame of a native stack that doesn't handle the signal."""
    for frame in _NATIVE_FRAMES:
        match = frame.match(text)
        if match and not _OF_HANDLERS.search(match["name"].strip()):
            place = (match.groupdict().get("place") or "").rpartition("/")[2]
            if not place.startswith(("libc.so", "libc-", "libpthread")):
                yield match["name"].strip(), "" if place.startswith("?") else place
            return
