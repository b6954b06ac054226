"""What is known of a container, and what its follower does next: a decision without I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from airflow_provider_ktrain.core.logs.container_run import Run
from airflow_provider_ktrain.core.logs.cursor import Position


@dataclass
class ObservedContainer:
    """What was observed of a container: by the watch, by reads of its pod, and by its follower.

    :param deleted: its pod is gone, as the watch or a read of the pod shows.
    :param draining_since: when the final drain began, in seconds of the event loop's clock; None before.
    """

    run: Run = field(default_factory=Run)
    deleted: bool = False
    deletion_reported: bool = False
    draining_since: float | None = None

    @property
    def draining(self) -> bool:
        """Whether the final drain has begun."""
        return self.draining_since is not None

    @property
    def stream_ends_by_itself(self) -> bool:
        """Whether the server ends a stream that follows the log, because nothing more is written."""
        return self.run.ended or self.deleted


@dataclass
class RunProgress:
    """What is known of the run that is read, besides its position.

    :param unended_line: what the last COMPLETE response left without a line end; None before there was one.
    :param unreadable: responses in a row that the kubelet ended with an error.
    :param any_start: whether the next response may begin with any line: its log is known to be this run's.
    """

    unended_line: bytes | None = None
    tail: bytes = b""
    size: int = 0
    reads_without_news: int = 0
    unreadable: int = 0
    any_start: bool = False


class State(enum.Enum):
    """What a container follower does next."""

    WAITING = "wait until a run starts"
    RESUMING = "read the pod before resuming a run that another process read"
    FOLLOWING = "follow the log of the newest run, which is still writing"
    RESTARTING = "wait until the run that has just ended can be requested as the previous run"
    SETTLING = "read the rest of the newest run, which has ended or is being drained"
    PREVIOUS = "read the rest of an earlier run"
    DONE = "stop: nothing is left to read"


def next_state(observed: ObservedContainer, position: Position, *, resumed: bool, drained: bool) -> State:
    """Decide what to do next from what is known now.

    :param resumed: whether another process read this run, and the pod wasn't read since.
    :param drained: whether the final drain has read the log of a running container up to now.
    """
    run = observed.run
    if drained or observed.deleted:
        return State.DONE
    if position.restart < run.restart:
        return State.PREVIOUS
    if not run.started or position.complete:
        return State.DONE if run.final or observed.draining else State.WAITING
    if resumed:
        return State.RESUMING
    if not run.ended and not observed.draining:
        return State.FOLLOWING
    return State.RESTARTING if run.restarting and not observed.draining else State.SETTLING
