"""Keeps the lines of a log that may show the cause of its end, before the last ones that are kept of all logs.

A report of torchrun, a memory map or a dump pushes the cause out of the last lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from airflow_provider_ktrain.core.diagnosis.log_lines import TRACEBACK, is_progress, process_of
from airflow_provider_ktrain.core.diagnosis.log_parser import is_end_of_processes

T = TypeVar("T")
MAX_PROCESSES = 16  #: How many processes' lines are kept for one container.
#: How many lines of a traceback or a dump are kept. Of frames, the outermost of each traceback is kept, and no line of
#: code.
MAX_LINES = 12
MAX_SEEN = 400  #: Lines after which a traceback or a dump has ended.
MAX_ENDS = 4  #: Reports of torchrun that a process has ended.
_HEADS = (TRACEBACK, "Fatal Python error: ", "*** Error in `")
_GOES_ON = ("During handling of the above", "The above exception was", "Current thread 0x", "Stack (most recent call")


@dataclass
class _Block(Generic[T]):
    """The lines of a traceback or a dump, each with its number."""

    lines: list[tuple[int, T]] = field(default_factory=list)
    seen: int = 0
    frames: int = 0
    is_open: bool = True


class CauseScanner(Generic[T]):
    """Reads all lines of one run of a container."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block[T]] = {}  # the last one of each process
        self._ends: list[tuple[int, T]] = []
        self._number = 0

    def see(self, text: str, line: T) -> None:
        """Read a line.

        :param line: what `kept` returns of it.
        """
        self._number += 1
        if any(head in text for head in _HEADS):
            self._begin(text, line)
        elif self._blocks:
            self._go_on(text, line)
        if "signal SIG" in text or "failed (exitcode" in text:
            self._ends = [*self._ends, (self._number, line)][-MAX_ENDS:] if is_end_of_processes(text) else self._ends

    def kept(self) -> Iterator[T]:
        """The lines that are kept, in their order."""
        found = [*self._ends, *(numbered for block in self._blocks.values() for numbered in block.lines)]
        yield from (line for _, line in sorted(found, key=lambda numbered: numbered[0]))

    def _begin(self, text: str, line: T) -> None:
        process, _ = process_of(text)
        block = self._blocks.get(process)
        if block is None or not block.is_open:
            self._blocks.pop(process, None)
            if len(self._blocks) >= MAX_PROCESSES:
                return
            block = self._blocks[process] = _Block()
        block.seen = block.frames = 0
        self._add(block, line)

    def _go_on(self, text: str, line: T) -> None:
        process, own = process_of(text)
        block = self._blocks.get(process)
        if block is None:
            return
        block.seen += 1
        if not block.is_open or block.seen > MAX_SEEN:
            block.is_open = False
            if is_progress(own):
                del self._blocks[process]
        elif own.startswith(_GOES_ON):
            block.frames = 0
            self._add(block, line)
        elif own[:1].isspace():
            block.frames += 1
            if block.frames == 1:
                self._add(block, line)
        elif own:
            self._add(block, line)

    def _add(self, block: _Block[T], line: T) -> None:
        block.lines.append((self._number, line))
        block.is_open = len(block.lines) < MAX_LINES
