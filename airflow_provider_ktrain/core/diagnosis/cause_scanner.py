"""Keeps the lines of a log that may show the cause of its end, before the last ones that are kept of all logs.

A report of torchrun, a memory map or a dump pushes the cause out of the last lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from airflow_provider_ktrain.core.diagnosis.log_lines import (
    MAX_PREFIX_CHARS,
    MAX_PREFIXES,
    is_progress,
    may_be_progress,
    process_of,
)
from airflow_provider_ktrain.core.diagnosis.log_parser import is_end_of_processes

T = TypeVar("T")
MAX_PROCESSES = 16  #: How many processes' lines are kept for one container.
#: How many of the first, and of the last, tracebacks and dumps of a process are kept. Ranks without a prefix count as
#: one process.
MAX_BLOCKS = 4
#: How many lines of a traceback or a dump are kept. Of frames, the outermost of each traceback is kept, and no line of
#: code.
MAX_LINES = 12
MAX_AFTER = 6  #: How many of them may follow the exception.
MAX_SEEN = 400  #: Lines after which a traceback or a dump has ended.
SAMPLED = 16  #: One of so many later lines is parsed, until the process makes progress.
MAX_SIGNS = 8  #: How many of the last lines with a sign of an error are kept.
MAX_ENDS = 4  #: Reports of torchrun that a process has ended.
LAST_LINES = 50  #: Last lines of a block that are read whatever it contains.
MANY_LINES = 200  #: Of a larger block, other lines are read only if it has a sign of an error.
#: What stands in most of the blocks that show a cause, besides `rror`: where the first is left of the block without
#: _DELETED, the others are searched for in the whole block, for 35 to 80 ns a line each. Deleting costs 40 to 60.
_IN_REST = (
    (b"ERROR", b"ERROR"), (b"TAL", b"CRITICAL", b"FATAL"), (b"T(", b"Traceback ("), (b"`", b"Assertion `"),
    (b"*", b" detected ***"),
)  # fmt: skip
_DELETED = bytes(set(range(256)) - set(b"AELORT`*("))
_GOES_ON = ("During handling of the above", "The above exception was", "Current thread 0x", "Stack (most recent call")


def count_plain(block: bytes, lines: int) -> int:
    """How many of the first lines of a block are not read: none unless it has many, and no sign of an error.

    A flood has millions of lines, and a look at each costs more than to read it.
    """
    return 0 if lines <= MANY_LINES or _may_show_error(block) else lines - LAST_LINES


def _may_show_error(block: bytes) -> bool:
    if b"rror" in block:
        return True
    rest = block.translate(None, _DELETED)
    return any(part in rest and any(sign in block for sign in signs) for part, *signs in _IN_REST)


@dataclass
class _Block(Generic[T]):
    """The lines of a traceback or a dump, each with its number."""

    lines: list[tuple[int, T]] = field(default_factory=list)
    seen: int = 0
    frames: int = 0
    after: int = 0
    goes_on: bool = True  # whether another traceback belongs to it

    def add(self, number: int, line: T) -> None:
        self.lines.append((number, line))
        del self.lines[MAX_BLOCKS : len(self.lines) - MAX_LINES + MAX_BLOCKS]


class CauseScanner(Generic[T]):
    """Reads all lines of one run of a container."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[_Block[T]]] = {}  # by process
        self._signs: deque[tuple[int, T]] = deque(maxlen=MAX_SIGNS)
        self._ends: deque[tuple[int, T]] = deque(maxlen=MAX_ENDS)
        self._progress: dict[str, tuple[int, T]] = {}  # the last one of each process, while anything else is kept
        self._prefixes: tuple[str, ...] = ()  # of processes, that tracebacks have shown
        self._unknown_prefix = ""
        self.number = 0  #: How many lines were read.
        #: Up to this one, also lines without a sign count: they may belong to what is kept. 0: nothing is.
        self.reads_until = 0
        self._begun_at = -MAX_SEEN

    def see(self, text: str, line: T) -> None:
        """Read a line.

        :param line: what `kept` returns of it.
        """
        self.number += 1
        # All lines pass here. One of these stands in each line that is looked for, and a search for one costs 40 ns.
        if "Traceback (" in text or "rror" in text or "ERROR" in text or "AL" in text or "ed" in text:
            self._look_for_signs(text, line)
        elif self.reads_until:
            self._go_on(text, line)

    def _look_for_signs(self, text: str, line: T) -> None:
        if (
            "Traceback (most recent call last)" in text
            or "Fatal Python error: " in text
            or "terminate called " in text
            or "*** Error in `" in text
            or "' panicked at " in text
            or "─ Error ─" in text
        ):
            self._begin(text, line)
            return
        if (
            "ERROR" in text
            or "CRITICAL" in text
            or "FATAL" in text
            or "Check failed: " in text
            or "Assertion `" in text
            or "core dumped" in text
            or " detected ***" in text
            or "Killed" in text
        ):
            self.reads_until = self.number + MAX_SEEN
            self._signs.append((self.number, line))
            is_open = self.number <= self._begun_at + MAX_SEEN
        else:
            is_open = self.reads_until > 0
        if is_end_of_processes(text):
            self._ends.append((self.number, line))
        if is_open:
            self._go_on(text, line)

    def kept(self) -> Iterator[T]:
        """The lines that are kept, in their order."""
        blocks = (block for found in self._blocks.values() for block in found)
        lines = (numbered for block in blocks for numbered in block.lines)
        found = dict([*self._ends, *self._signs, *self._progress.values(), *lines])
        yield from (found[number] for number in sorted(found))

    def _begin(self, text: str, line: T) -> None:
        self._begun_at = self.number
        self.reads_until = self.number + MAX_SEEN
        process, _ = process_of(text, self._prefixes)
        blocks = self._blocks.get(process)
        if blocks is None:
            if len(self._blocks) >= MAX_PROCESSES:
                return
            blocks = self._blocks[process] = []
        if not blocks or not blocks[-1].goes_on:
            blocks.append(_Block())
            del blocks[MAX_BLOCKS:-MAX_BLOCKS]
        block = blocks[-1]
        block.seen = block.frames = block.after = 0
        block.goes_on = False
        block.add(self.number, line)
        begin = text.find("Traceback")
        is_known = process.startswith(("[", "("))
        self._unknown_prefix = text[:begin] if not is_known and 0 < begin <= MAX_PREFIX_CHARS else ""

    def _go_on(self, text: str, line: T) -> None:
        is_over = self.number > self.reads_until
        if is_over and self.number % SAMPLED:
            return
        if self.number > self._begun_at + MAX_SEEN and not may_be_progress(text):
            return
        if self._unknown_prefix:
            self._learn_prefix(text)
        process, own = process_of(text, self._prefixes)
        if is_progress(own):
            self._record_progress(process, line, is_over=is_over)
        if process not in self._blocks:
            return
        block = self._blocks[process][-1]
        block.seen += 1
        if block.seen > MAX_SEEN or not own:
            return
        if own.startswith(_GOES_ON):
            block.frames = block.after = 0
            block.goes_on = own.startswith(_GOES_ON[:2])
            block.add(self.number, line)
        elif own[0].isspace():
            block.frames += 1
            if block.frames == 1:
                block.add(self.number, line)
        else:
            block.after += 1
            if block.after <= MAX_AFTER:
                block.add(self.number, line)

    def _learn_prefix(self, text: str) -> None:
        """A traceback that another prefix precedes: it names a process if it precedes the first frame, too."""
        prefix, self._unknown_prefix = self._unknown_prefix, ""
        if text.startswith(f"{prefix}  File ") and len(self._prefixes) < MAX_PREFIXES:
            self._prefixes = (*self._prefixes, prefix)
            process, _ = process_of(text, self._prefixes)
            if process not in self._blocks and (blocks := self._blocks.get("")):
                self._blocks[process] = [blocks.pop()]
                if not blocks:
                    del self._blocks[""]

    def _record_progress(self, process: str, line: T, *, is_over: bool) -> None:
        """A process goes on, so that it has survived what came before.

        Ranks without a prefix count as one process, of which others go on for a while if one has failed: the parser
        decides about these, and a program that goes on for long has survived all.
        """
        if not is_over:
            if process in self._progress or len(self._progress) < MAX_PROCESSES:
                self._progress[process] = self.number, line
            return
        self._blocks.pop(process, None)
        if not self._blocks:
            self._signs.clear()
            self._progress.clear()
            self.reads_until = 0
