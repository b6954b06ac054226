"""The process in which the owner of a training works: worker, trigger or terminal. It is data, not code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from airflow_provider_ktrain.core.end_rules import Successor
from airflow_provider_ktrain.engine import timing

REFRESH_SECONDS = 60.0  #: Longest time between two statuses of a job that runs, if nothing else changes.
#: How long after a process of a try has handed over or written a status no other one can have written one: Airflow
#: assigns a trigger to another triggerer after 30 s without a heartbeat.
UNSHARED_SECONDS = 20.0


class StatusSink(Protocol):
    """Where a host takes statuses."""

    host: str
    """`worker` or `trigger`."""
    try_number: int
    """Of the task instance."""
    earlier: Mapping[str, Any] | None
    """The status that an earlier process of the same try wrote last; empty if there is none. None: it was not read."""

    def offer(self, build: Callable[[], Callable[[], Mapping[str, Any]]], *, urgent: bool) -> None:
        """Publish a status soon. It must not block or raise.

        :param build: takes the status as it is when the host is about to write it. It returns a function that makes the
            document, which the host calls in a thread.
        :param urgent: whether the phase has changed.
        """

    async def read_earlier(self) -> None:
        """Read `earlier`, unless it was read or this process has replaced it. It never raises, and takes up to 10 s."""

    async def store_conclusion(self, document: Mapping[str, Any]) -> bool:
        """Store a `core.reporting.conclusion.Conclusion` as a dict. It never raises.

        :return: whether it was stored within 10 s. False: it may still be stored later.
        """

    def retract(self) -> None:
        """Leave the conclusion out of later statuses: the job was not released."""

    async def stored_conclusion(self) -> Mapping[str, Any] | None:
        """The conclusion that a process of the same try has stored; empty if there is none. It never raises.

        :return: None: Airflow doesn't answer.
        """


@dataclass(frozen=True)
class Host:
    """What differs between the processes in which a training is owned.

    :param seconds: that the process may still take when it was asked to stop, or when the deadline has passed. Default:
        None, as long as it needs.
    :param ask_state: returns the task's state in Airflow, in at most the given seconds; empty if there is no answer.
        Default: None: there is no task, and only the user asks the process to stop.
    :param successor: who continues with the job when this process stops while its task goes on. Default: nobody.
    :param patience: seconds for which the task's state is asked for again while it decides nothing. Default: 0.
    :param shared: whether the process follows many jobs, as a triggerer does: it uses one watch for all jobs of the
        deployment. Default: False.
    :param began_at: when the process received the job, before it built a client, in epoch seconds. Default: None, now.
    :param status_sink: takes statuses and conclusions. Default: None, nobody does.
    :param refresh_seconds: returns the seconds between two statuses of a job that runs. Default: REFRESH_SECONDS.
    :param node_seconds: between two reads of a node while a job runs, one node at a time. Default: 60.
    """

    seconds: float | None = None
    ask_state: Callable[[float], Awaitable[str]] | None = None
    successor: Successor = Successor.NOBODY
    patience: float = 0.0
    shared: bool = False
    began_at: float | None = None
    status_sink: StatusSink | None = None
    refresh_seconds: Callable[[], float] = lambda: REFRESH_SECONDS
    node_seconds: float = 60.0

    def began(self) -> float:
        """When the process received the job, by `timing.now`; the beginning of time if this isn't known."""
        return 0.0 if self.began_at is None else timing.now() - (timing.epoch() - self.began_at)
