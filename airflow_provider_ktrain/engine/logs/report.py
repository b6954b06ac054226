"""What became of a job's logs, container by container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_GAPS = 20  #: kept per container of deleted pods


@dataclass(slots=True)
class Tally:
    """What became of one container's log. Its emitter counts in it; a copy is reported.

    :param lines, bytes: that were logged; repetitions that were left out count as lines.
    :param dropped: lines dropped by the rate limit.
    :param dropped_bytes: bytes of these lines, and bytes cut off lines over MAX_LINE_BYTES.
    :param gaps: where lines may be missing, and why.
    :param complete: whether everything that the server had was read.
    :param late: lines that were counted but not logged, because the final drain ran out of time.
    """

    lines: int = 0
    bytes: int = 0
    dropped: int = 0
    dropped_bytes: int = 0
    gaps: tuple[str, ...] = ()
    complete: bool = False
    late: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.lines + other.lines,
            self.bytes + other.bytes,
            self.dropped + other.dropped,
            self.dropped_bytes + other.dropped_bytes,
            (self.gaps + other.gaps)[:MAX_GAPS],
            self.complete and other.complete,
            self.late + other.late,
        )


@dataclass(frozen=True)
class DrainReport:
    """What became of a job's logs, by (pod, container). Successive pods with the same name count as one.

    :param gone: the sum of containers that were read to their end without a gap and whose pods are deleted.
    """

    containers: Mapping[tuple[str, str], Tally]
    gone: Tally = field(default_factory=Tally)

    @property
    def total(self) -> Tally:
        """The sum of existing and of deleted pods."""
        return sum(self.containers.values(), self.gone)

    @property
    def gaps(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Where lines may be missing, and why, by (pod, container)."""
        return {key: tally.gaps for key, tally in self.containers.items() if tally.gaps}

    @property
    def unread(self) -> list[tuple[str, str]]:
        """Containers whose logs were not read to the end."""
        return [key for key, tally in self.containers.items() if not tally.complete]
