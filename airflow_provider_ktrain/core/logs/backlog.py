"""Lines of one container that were inspected and are not logged yet: the log is behind."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_provider_ktrain.core.logs.cursor import Position


@dataclass
class Backlog:
    """From where the log stopped to where inspecting is. Both positions move on, and may be in different runs.

    :param logged: where the log stopped.
    :param inspected: where inspecting is.
    :param lines: how many lines of each run were inspected and are not logged, by restartCount.
    :param ends: where inspecting has ended in runs before the one of `inspected`, by restartCount.
    :param removed: from when until when lines were no longer found; None if all were.
    """

    logged: Position
    inspected: Position
    lines: dict[int, int] = field(default_factory=dict)
    ends: dict[int, Position] = field(default_factory=dict)
    removed: tuple[str, str] | None = None

    @property
    def total(self) -> int:
        """All lines that are not logged."""
        return sum(self.lines.values())

    @property
    def end_is_reached(self) -> bool:
        """Whether the log has reached the end of its run, or where inspecting is in it."""
        return self.logged.has_reached(self.ends.get(self.logged.restart, self.inspected))

    def add(self, lines: int) -> None:
        """Count lines that were inspected."""
        run = self.inspected.restart
        self.lines[run] = self.lines.get(run, 0) + lines

    def take(self) -> None:
        """Count a line that was logged."""
        run = self.logged.restart
        self.lines[run] = self.lines.get(run, 0) - 1

    def begin(self, position: Position) -> None:
        """Inspecting goes on in another run."""
        self.ends[self.inspected.restart] = self.inspected
        self.inspected = position

    def next_run(self) -> bool:
        """Go on with the next run; returns whether there was one."""
        later = [run for run in (*self.ends, self.inspected.restart) if run > self.logged.restart]
        if not later:
            return False
        self.logged, self.removed = Position(min(later)), None
        return True
