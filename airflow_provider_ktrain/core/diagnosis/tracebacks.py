"""The tracebacks in a log: which exception each of them ends with, and whether that may have ended the program."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.diagnosis.failure_patterns import PROGRAM_ERRORS
from airflow_provider_ktrain.core.diagnosis.log_lines import TRACEBACK, Line, is_progress

MAX_SKIPPED = 3  #: Lines of other streams that may be read between two of a traceback.
MAX_MARKED = 6  #: Lines between what says where an exception was raised, and its traceback.


class Weight(enum.IntEnum):
    """How likely an exception has ended its process: the lowest is the likeliest."""

    UNHANDLED = 0
    PRINTED = 1
    IN_THREAD = 2
    AT_EXIT = 3


@dataclass
class Traceback:
    """The traceback of an exception, or an exception alone.

    :param chain: the exceptions, of which each led to the next one.
    :param lines: numbers of its lines.
    :param process: see `Line`.
    :param outermost: function of the outermost frame; empty if it isn't known.
    :param is_ignored: whether it says nothing about the end of a process.
    :param is_direct: whether each of the chain is the direct cause of the next one (`raise ... from`).
    """

    process: str = ""
    chain: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    weight: Weight = Weight.PRINTED
    outermost: str = ""
    is_ignored: bool = False
    is_direct: bool = True

    @property
    def exception(self) -> str:
        """The one that counts: the first of the chain if it is one of the environment, else the last."""
        is_first = is_of_environment(self.chain[0]) or (self.is_direct and _OS_ERROR.match(self.chain[0]))
        return self.chain[0] if is_first else self.chain[-1]

    @property
    def is_handled(self) -> bool:
        """Whether the program is known to have gone on after it."""
        if self.weight is Weight.PRINTED:
            return bool(self.outermost)
        return self.weight is not Weight.UNHANDLED


_CHAIN_MESSAGES = ("During handling of the above exception", "The above exception was the direct cause")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.<>]{,199}(:\s.*|:|)$")
_QUALIFIED = re.compile(r"^[A-Za-z_][\w.]{,199}\.[A-Z]\w{,99}: ")  #: A class: not the name of a logger.
_BARE_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]{,199}(Error|Exception|Exit|Interrupt|Timeout)|Exception|MemoryError)(:\s.*|:|)$"
)
_FRAME = re.compile(r'^ {1,3}File ".{1,400}", line \d{1,9}, in (\S{1,200})')
#: Precedes the exception of another process or thread, whose traceback is the message of this one.
_ORIGINAL = re.compile(r"^(Original Traceback|The original traceback) ")
_CAUGHT = re.compile(r"^[\w.]{1,200}: Caught [\w.]{1,200} in \w")
_DROPPED = re.compile(r"^(multiprocessing\.pool\.|concurrent\.futures\.process\._)RemoteTraceback")
_AT_MODULE = ("<module>", "_run_module_as_main", "_run_code")
_AT_EXIT_FRAMES = (
    "__del__", "_run_exitfuncs", "_exit_function", "_run_finalizers", "_python_exit", "_shutdown",
)  # fmt: skip
#: What precedes the traceback of an exception that didn't end the main thread.
_MARKS: tuple[tuple[str, Weight | None], ...] = (
    ("Exception in thread ", Weight.IN_THREAD),
    ("Exception in callback ", Weight.IN_THREAD),
    ("Task exception was never retrieved", Weight.IN_THREAD),
    ("Exception ignored ", Weight.AT_EXIT),
    ("Error in atexit", Weight.AT_EXIT),
    ("Error in sys.exitfunc", Weight.AT_EXIT),
    ("Error in sys.excepthook", Weight.AT_EXIT),
    ("Original exception was:", Weight.UNHANDLED),
    ("--- Logging error ---", Weight.AT_EXIT),
    ("Retry attempt failed", None),
)
_ENVIRONMENT_ERRNO = re.compile(
    r"\[Errno (5|12|19|23|24|28|30|107|116|117|121|122)\]|\(os error (5|12|23|24|28|30|116|122)\)"
)
_OS_ERROR = re.compile(r"^[A-Za-z]\w{1,99}: \[Errno \d{1,9}\] ")
_ROOTS = tuple(re.compile(known.pattern) for known in PROGRAM_ERRORS if known.is_root)


def is_of_environment(exception: str) -> bool:
    """Whether an exception reports an error of memory, a disk, a device or a signal: what follows is its effect."""
    return _ENVIRONMENT_ERRNO.search(exception) is not None or any(root.search(exception) for root in _ROOTS)


class _Process:
    """Reads the lines of one process."""

    def __init__(self) -> None:
        self.found: list[Traceback] = []
        self._open: Traceback | None = None
        self._inside = self._chained = self._original = False
        self._skipped = self._marked = 0
        self._mark: Weight | None = Weight.PRINTED
        self._detail_of: int | None = None

    def read(self, number: int, line: Line) -> None:
        text = line.text
        if self._read_mark(text):
            return
        if text.startswith(_CHAIN_MESSAGES):
            self._chained = self._open is not None and bool(self._open.chain)
            if self._open is not None:
                self._open.is_direct &= text.startswith(_CHAIN_MESSAGES[1])
        elif text.startswith(TRACEBACK):
            self._begin(number, line)
        elif self._original_begins(text) and self._open is not None:
            self._open.lines.append(number)
            self._inside, self._original = True, True
        elif self._inside and self._open is not None:
            self._go_on(number, text)
        elif self._detail_of == number - 1 and text[:1].isspace() and text.strip() and self._open is not None:
            self._open.chain[-1] = f"{self._open.chain[-1]} {text.strip()}"
            self._open.lines.append(number)
        elif not self._inside and _BARE_EXCEPTION.match(text):
            self._add_bare(number, line)
        self._marked -= 1

    def _read_mark(self, text: str) -> bool:
        for begin, weight in _MARKS:
            if text.startswith(begin):
                self._mark, self._marked, self._inside = weight, MAX_MARKED, False
                return True
        return False

    def _original_begins(self, text: str) -> bool:
        return bool(self._open and self._open.chain and _ORIGINAL.match(text) and _CAUGHT.match(self._open.chain[-1]))

    def _begin(self, number: int, line: Line) -> None:
        if not (self._chained and self._open is not None):
            mark = self._mark if self._marked > 0 else Weight.PRINTED
            self._open = Traceback(line.process, weight=mark or Weight.AT_EXIT, is_ignored=mark is None)
            if line.process.startswith("[rank") and mark is Weight.PRINTED:
                self._open.weight = Weight.UNHANDLED  # PyTorch's excepthook prints it
            self.found.append(self._open)
            self._marked = 0
        self._open.lines.append(number)
        self._open.outermost = ""
        self._inside, self._chained, self._skipped, self._detail_of = True, False, 0, None

    def _go_on(self, number: int, text: str) -> None:
        assert self._open is not None
        if not text or text[0].isspace():
            if not self._open.outermost and (frame := _FRAME.match(text)):
                self._open.outermost = frame[1]
            self._open.lines.append(number)
        elif _EXCEPTION.match(text) and (_QUALIFIED.match(text) or not is_progress(text)):
            if self._original:
                self._open.chain.pop()
            self._open.chain.append(text.strip())
            self._open.lines.append(number)
            self._inside = self._original = False
            self._detail_of = number if text.rstrip().endswith(":") else None
        else:
            self._skipped += 1
            self._inside = self._skipped <= MAX_SKIPPED

    def _add_bare(self, number: int, line: Line) -> None:
        """An exception without a traceback counts only if there is none before it."""
        if self._marked > 0:
            self._marked = 0
        elif not any(one.chain and not one.is_ignored for one in self.found):
            self._open = Traceback(line.process, [line.text.strip()], [number])
            self.found.append(self._open)
            self._detail_of = number if line.text.rstrip().endswith(":") else None


def find_tracebacks(lines: Sequence[Line]) -> list[Traceback]:
    """The tracebacks, in the order in which they end."""
    processes: dict[str, _Process] = {}
    for number, line in enumerate(lines):
        processes.setdefault(line.process, _Process()).read(number, line)
    found = [
        _weighed(one)
        for process in processes.values()
        for one in process.found
        if one.chain and not one.is_ignored and not _DROPPED.match(one.chain[-1])
    ]
    return sorted(found, key=lambda one: one.lines[-1])


def _weighed(one: Traceback) -> Traceback:
    if one.outermost in _AT_EXIT_FRAMES:
        one.weight = max(one.weight, Weight.AT_EXIT)
    elif one.outermost in _AT_MODULE and one.weight is Weight.PRINTED:
        one.weight = Weight.UNHANDLED
    return one
